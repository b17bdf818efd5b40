"""The first half of a feed-forward block: activation(x @ w_gate) * (x @ w_up), or activation(x @ w_up).

The weights are stationary and the rows move. So the result comes out as blocks [f in block, block, row], the form in
which the product with w_down takes it. A PSUM bank holds as many blocks of a result as fit, one for 512 rows.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC, transfer
from nki_kernels.projection.block_loads import load_cast_into
from nki_kernels.projection.rows import in_block, load_runs_part
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks

UNIT_COLUMNS = 2048
"""The most columns of each weight that are multiplied at a time."""

PIECE_ELEMENTS = 1024
"""Elements per partition of one loaded piece of a weight, for each of gate and up: 256 KiB in bfloat16."""


def columns_at_once(weights, rows):
    """Columns of each weight whose sums take ACCUMULATOR_BANKS banks together, at most UNIT_COLUMNS."""
    return min(UNIT_COLUMNS, ACCUMULATOR_BANKS // len(weights) * (BANK // rows) * PARTITIONS)


def gated_columns(result, x, weights, biases, function, column, passing, runs=False):
    """The blocks of the intermediate for columns_at_once columns from `column` on, and x [h in block, block, row].

    runs: whether x lies in runs instead, see `rows`; then the weights are loaded in runs too.

    weights: [gate, up], or [up] for a plain block. biases: those of gate and of up, see `bias_columns`. passing: (tile,
    source) of other loads, which are triggered between those of the weights.
    """
    rows = x.shape[2]
    inner = weights[0].shape[1]
    per_bank = BANK // rows
    last = min(inner, column + columns_at_once(weights, rows))
    packed = packed_columns(last - column) if len(weights) == 2 else 0
    whole = last - packed
    sums = banks_of(len(weights), whole - column, per_bank)
    pair = None
    if packed > 0:
        pair = nl.ndarray((2 * packed, rows), dtype=nl.float32, buffer=nl.psum)
    accumulate(sums, pair, x, weights, column, whole, last, per_bank, passing, runs)
    for number in range(len(sums[0])):
        first = column // PARTITIONS + number * per_bank
        finish(result, sums, number, first, min(blocks(whole), first + per_bank), biases, function, inner)
    if packed > 0:
        finish_pair(result, pair, biases, function)


def in_both_halves(weights):
    """Whether the short last block of the intermediate lies in both halves of the partitions."""
    inner = weights[0].shape[1]
    return len(weights) == 2 and inner > PARTITIONS and packed_columns(inner) == PARTITIONS // 2


def packed_columns(width):
    """Columns of a short last block if those of gate and up together make one stationary tile: 32, 64, or else 0.

    Their sums lie on the partitions from 0 and from 32 or 64 on, where engines can begin.
    """
    short = width % PARTITIONS
    return short if short == PARTITIONS // 2 or short == PARTITIONS // 4 else 0


def banks_of(sides, width, per_bank):
    """For each weight the PSUM banks [f in block, per_bank * rows] of its product."""
    banks = []
    for side in range(sides):
        banks.append([])
        for _ in range(blocks(blocks(width), per_bank)):
            banks[side].append(nl.ndarray((PARTITIONS, BANK), dtype=nl.float32, buffer=nl.psum))
    return banks


def accumulate(sums, pair, x, weights, column, whole, last, per_bank, passing, runs):
    """The product of x and columns of the weights: column … whole into `sums`, the rest up to `last` into `pair`."""
    rows = x.shape[2]
    hidden = weights[0].shape[0]
    sides = len(weights)
    width = last - column
    end_column = whole - column
    per_piece = max(1, PIECE_ELEMENTS // width)
    passed = 0
    for block in range(0, blocks(hidden), per_piece):
        start = block * PARTITIONS
        end = min(hidden, start + per_piece * PARTITIONS)
        shape = (min(hidden, PARTITIONS), sides, blocks(end - start), width)
        piece = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf)
        for side in range(sides):
            if runs:
                load_runs_part(piece[:, side, :, :], weights[side][:, column:last], block)
            else:
                load_cast_into(piece[:, side, :, :], weights[side][start:end, column:last], STATIC)
        while passed < len(passing) and passed * hidden < len(passing) * end:
            tile, source = passing[passed]
            transfer(tile, source, STATIC)
            passed += 1
        for inside in range(piece.shape[2]):
            used = in_block(hidden, block + inside, runs)
            moving = x[0:used, block + inside, :]
            following = block + inside > 0
            for side in range(sides):
                for first in range(0, end_column, PARTITIONS):
                    columns = min(PARTITIONS, end_column - first)
                    at = first // PARTITIONS
                    place = at % per_bank * rows
                    nisa.nc_matmul(
                        dst=sums[side][at // per_bank][0:columns, place : place + rows],
                        stationary=piece[0:used, side, inside, first : first + columns],
                        moving=moving,
                        accumulate=following,
                    )
            if pair is not None:
                nisa.nc_matmul(
                    dst=pair,
                    stationary=piece[0:used, :, inside, end_column:width],
                    moving=moving,
                    accumulate=following,
                )


def finish(result, sums, number, first, last, biases, function, inner):
    """Blocks first … last of the intermediate from bank `number` of each side: activation, and gate times up.

    One instruction takes all full blocks if there is no bias, which differs from block to block.
    """
    rows = result.shape[2]
    together = inner // PARTITIONS if biases[0] is None and biases[1] is None else 0
    block = first
    while block < last:
        count = max(1, min(last, together) - block)
        used = min(PARTITIONS, inner - block * PARTITIONS)
        start = (block - first) * rows
        end = start + count * rows
        gate = None
        if len(sums) == 2:
            gate = nl.ndarray((used, count * rows), dtype=nl.float32, buffer=nl.sbuf)
            activate(gate, sums[0][number][0:used, start:end], biases[0], 0, block, function)
        up = sums[len(sums) - 1][number][0:used, start:end]
        into = result[0:used, block : block + count, :]
        if gate is None:
            activate(into, up, biases[1], 0, block, function)
        else:
            gated(into, up, gate, biases[1], 0, block)
        block += count


def finish_pair(result, pair, biases, function):
    """The short last block, whose sums for gate and up share a bank: the up half, times the gate half moved there.

    A block of 64 rows is written to both halves of the partitions.
    """
    half = pair.shape[0] // 2
    block = result.shape[1] - 1
    gate = nl.ndarray(pair.shape, dtype=nl.float32, buffer=nl.sbuf)
    own = gate[half : 2 * half, :]
    activate(own, pair[0:half, :], biases[0], 0, block, function)
    copies = 2 if result.shape[0] == 2 * half else 1
    for copy in range(copies):
        into = result[copy * half : (copy + 1) * half, block, :]
        gated(into, pair[half : 2 * half, :], own, biases[1], half, block)


def activate(dst, sums, bias, row, block, function):
    """The function of sums plus the bias of a block, which lies on the partitions from `row` on."""
    rows = sums.shape[0]
    column = None if bias is None else bias[row : row + rows, block : block + 1]
    nisa.activation(dst=dst, op=function, data=sums, bias=column)


def gated(dst, sums, gate, bias, row, block):
    """(sums plus the bias of a block, which lies on the partitions from `row` on) times the gate."""
    if bias is None:
        nisa.tensor_tensor(dst=dst, data1=sums, data2=gate, op=nl.multiply)
        return
    rows = sums.shape[0]
    nisa.scalar_tensor_tensor(
        dst=dst,
        data=sums,
        op0=nl.add,
        operand0=bias[row : row + rows, block : block + 1],
        op1=nl.multiply,
        operand1=gate,
    )


def bias_columns(bias):
    """A bias [1, F] of HBM as float32 columns [f in block, block], or None; a packed block lies there twice."""
    if bias is None:
        return None
    columns = bias.shape[1]
    full = columns // PARTITIONS
    short = columns - full * PARTITIONS
    packed = packed_columns(columns)
    raw = nl.ndarray((min(PARTITIONS, columns), blocks(columns)), dtype=bias.dtype, buffer=nl.sbuf)
    if packed > 0:
        raw = nl.ndarray((PARTITIONS, blocks(columns)), dtype=bias.dtype, buffer=nl.sbuf)
    result = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    if full > 0:
        source = bias[0, 0 : full * PARTITIONS].reshape((full, PARTITIONS)).permute((1, 0))
        nisa.dma_copy(dst=raw[:, 0:full], src=source)
        nisa.tensor_copy(dst=result[:, 0:full], src=raw[:, 0:full])
    if short > 0:
        source = bias[0:1, full * PARTITIONS : columns].permute((1, 0))
        nisa.dma_copy(dst=raw[0:short, full : full + 1], src=source)
        nisa.tensor_copy(dst=result[0:short, full : full + 1], src=raw[0:short, full : full + 1])
    if packed > 0:
        nisa.tensor_copy(dst=result[packed : 2 * packed, full : full + 1], src=raw[0:packed, full : full + 1])
    return result
