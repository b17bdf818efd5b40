"""The products of one chunk of an expert's weights: rows to gated intermediate, and that to a summand of the result.

A *chunk* is a range of the F columns of the intermediate, whose weights are in SBUF at one time; F is cut into blocks
of 128 (`experts.weight_chunks`). Weights are stationary in the gate and up products, so that the intermediate has F on
the partitions, as the down product takes it. Sums of down products over chunks, and over experts in a decode step, are
taken in float32 in SBUF. `experts_decode` and `experts.row_blocks` call these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.block_scales import choose_engine, copy_scaled_rows
from nki_kernels.experts.activation import activate_pair, multiply_pair, multiply_weighted_pair
from nki_kernels.experts.block_scales import (
    GPSIMD_SHARE,
    MOST_SCALED_SUMS,
    accumulate_scaled_rows,
    add_block_products,
)
from nki_kernels.experts.column_lines import ColumnFactors
from nki_kernels.experts.weight_chunks import WeightChunk, take_tile
from nki_kernels.tiles import BANK, PARTITIONS, blocks, copy_bank, count_block_partitions, ranges


@dataclass
class GatedSums(nl.NKIObject):
    """Gate and up sums of blocks first_block … end_block - 1 of a chunk: PSUM tiles [f in block, block, row].

    They are float32. With block scales they are in SBUF.
    """

    first_block: int
    end_block: int
    gate: nl.NkiTensor
    up: nl.NkiTensor


@dataclass
class GatedChunk(nl.NKIObject):
    """A chunk of weights and its intermediate [f in block, block, row] @ SBUF, ready for the down product."""

    weights: WeightChunk
    intermediate: nl.NkiTensor


def count_columns(chunk):
    """Return the number of columns of the intermediate in a chunk of weights."""
    return chunk.end - chunk.first


def split_blocks(chunk, rows):
    """Return ranges (first, end) of the 128-column blocks of a chunk: as many as have their sums in one PSUM bank.

    A block takes `rows` float32 elements of a bank, one for each row of activations.
    """
    return ranges(0, blocks(count_columns(chunk)), max(1, BANK // rows))


def allocate_intermediate(chunk, rows, dtype):
    """Allocate the intermediate [f in block, block, row] of a chunk in SBUF, for `rows` rows."""
    width = count_columns(chunk)
    return nl.ndarray((min(PARTITIONS, width), blocks(width), rows), dtype=dtype, buffer=nl.sbuf)


def multiply_gate_and_up(x, chunk, group, hidden, layer):
    """Multiply rows by a range of blocks of a chunk's gate and of its up, add their biases, and return the `GatedSums`.

    Args:
        x: transposed rows [h in run, block, row] @ SBUF: partition p of block c has element p * ceil(H / 128) + c.
        group: (first, end) of the blocks, see `split_blocks`.
        hidden: H.
        layer: `ExpertLayer`, which has x and the weights in blocks if it is not `in_runs`.
    """
    first, end = group
    sums = []
    for columns in (chunk.gate, chunk.up):
        if columns.block_scales is None:
            sums.append(multiply_columns(x, columns, first, end, hidden, layer))
        else:
            sums.append(multiply_block_columns(x, columns, first, end, hidden, layer))
    return GatedSums(first, end, sums[0], sums[1])


def multiply_block_columns(x, columns, first, end, hidden, layer):
    """Return what `multiply_columns` returns, for columns with block scales and x in blocks.

    Sums of up to MOST_SCALED_SUMS rows are in SBUF, others in PSUM.
    """
    width, rows = columns.end - columns.first, x.shape[2]
    copies_rows = rows > MOST_SCALED_SUMS
    shape = (min(PARTITIONS, width), end - first, rows)
    sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum if copies_rows else nl.sbuf)
    for p in range(len(columns.pieces)):
        tile = take_tile(layer, columns, columns.pieces[p])
        k_first, k_end = columns.pieces[p].first_block, columns.pieces[p].end_block
        k_heights = []
        for k in range(k_first, k_end):  # k: block of H
            k_heights.append(count_block_partitions(hidden, k, False))
        scales = columns.block_scales[:, k_first:k_end, first:end]
        copies = None
        if copies_rows:
            copies = copy_scaled_rows(
                x[:, k_first:k_end, :], scales, k_heights, choose_engine(p, GPSIMD_SHARE)
            )
        for start, stop, height in split_by_height(width, first, end):
            target = sums[0:height, start - first : stop - first, :]
            if copies_rows:
                blocks_copies = copies[:, :, start - first : stop - first, :]
                accumulate_scaled_rows(target, blocks_copies, tile, k_heights, start * PARTITIONS, p > 0)
            else:
                add_block_products(
                    target,
                    x[:, k_first:k_end, :],
                    tile[:, :, start * PARTITIONS : min(width, stop * PARTITIONS)],
                    k_heights,
                    scales[:, :, start - first : stop - first],
                    p > 0,
                )
    return sums


def multiply_columns(x, columns, first, end, hidden, layer):
    """Return x times blocks first … end - 1 of `columns`, plus their bias: [f in block, block, row] float32 @ PSUM.

    Args:
        x: transposed rows [h in run, block, row] @ SBUF, see `multiply_gate_and_up`.
        columns: `ChunkColumns` of gate or of up.
        hidden: H.
        layer: `ExpertLayer`; if it is not `in_runs`, partition p of block c of x has element 128 * c + p.
    """
    width = columns.end - columns.first
    bank = nl.ndarray((min(PARTITIONS, width), end - first, x.shape[2]), dtype=nl.float32, buffer=nl.psum)
    biased = begin_with_bias(bank, columns, first, width)
    # Pieces come outermost, so that each one makes room for later weights after its last product.
    for piece in columns.pieces:
        tile = take_tile(layer, columns, piece)
        for k in range(tile.shape[1]):  # k: block of H
            block = piece.first_block + k
            used = count_block_partitions(hidden, block, layer.in_runs)
            for i in range(first, end):  # i: block of F
                start, stop = i * PARTITIONS, min(width, (i + 1) * PARTITIONS)
                nisa.nc_matmul(
                    dst=bank[0 : stop - start, i - first, :],
                    stationary=tile[0:used, k, start:stop],
                    moving=x[0:used, block, :],
                    accumulate=biased or block > 0,
                )
    return bank


def begin_with_bias(bank, columns, first, width):
    """Write the bias of each column, and the 1 of up + 1, to `bank`, a PSUM tile [f in block, block, row].

    Return whether anything was written; if not, `columns.ones` is None, and the products overwrite the bank.

    Args:
        columns: `ChunkColumns` of gate or of up.
        first: index in the chunk of the block of 128 columns that is `bank[:, 0, :]`.
        width: columns of the chunk.
    """
    ones = columns.ones
    if ones is None:
        return False
    for i in range(bank.shape[1]):  # i: block of F
        start, end = (first + i) * PARTITIONS, min(width, (first + i + 1) * PARTITIONS)
        # Without a bias the one row of ones is that of a block of 128.
        stationary = ones[0:1, 0 : end - start] if columns.bias is None else columns.bias[:, start:end]
        moving = ones[0 : stationary.shape[0], 0 : bank.shape[2]]
        # The bias is a row and F lies on the partitions: a product with ones adds it without a transpose.
        nisa.nc_matmul(
            dst=bank[0 : end - start, i, :], stationary=stationary, moving=moving, accumulate=False
        )
    return True


def activate(intermediate, sums, chunk, layer, row_weights):
    """Write the blocks of a chunk's intermediate whose `sums` are passed.

    Args:
        intermediate: [f in block, block, row] @ SBUF, with all blocks of the chunk.
        sums: `GatedSums`.
        layer: `ExpertLayer`.
        row_weights: `RowWeights` that multiply the rows, or None.
    """
    first = sums.first_block
    factors = load_column_factors(chunk, layer)
    # Partitions beyond a short last block are undefined, so that block is activated apart.
    for start, end, height in split_by_height(count_columns(chunk), first, sums.end_block):
        gate = sums.gate[0:height, start - first : end - first, :]
        up = sums.up[0:height, start - first : end - first, :]
        if factors is not None:
            gate = factors.apply(gate, 0, start, end)
            up = factors.apply(up, 1, start, end)
        left, right = activate_pair(gate, up, layer.activation)
        target = intermediate[0:height, start:end, :]
        if row_weights is None:
            multiply_pair(target, left, right, layer.activation)
        else:
            multiply_weighted_pair(target, left, right, layer.activation, row_weights)


def load_column_factors(chunk, layer):
    """Return the `ColumnFactors` of a chunk's gate and up sums; None for weights without scales. layer: `ExpertLayer`.

    The 1 of up + 1, which the activation "swigluoai" takes, joins the biases of up.
    """
    if chunk.factors is None:
        return None
    weights = layer.weights
    indices, count = [], 0
    for array in (weights.w_gate.scales, weights.w_up.scales, weights.b_gate, weights.b_up):
        indices.append(None if array is None else count)
        count += 0 if array is None else 1
    offset = 1.0 if layer.activation == "swigluoai" else 0.0
    return ColumnFactors(chunk.factors.transpose(), indices[0:2], indices[2:4], offset)


def split_by_height(width, first, end):
    """Return ranges (start, end, height) of blocks first … end - 1 of a chunk of `width` columns.

    All full blocks are one range; a short last block is another.
    """
    height = min(PARTITIONS, width)
    full = min(end, width // height)
    result = []
    if full > first:
        result.append((first, full, height))
    if end > full:
        result.append((full, end, width - full * height))
    return result


def add_down(result, total, gated, first_row, scales=None):
    """Write (`total` + the down product of a chunk) * `scales` to `result`, both [row, H] @ SBUF.

    Args:
        total: float32, or None for 0. It may be `result` if there are no scales. With scales it is overwritten.
        gated: `GatedChunk`.
        first_row: row of the intermediate that is row 0 of `result`.
        scales: float32 [row, H] @ SBUF that multiply the columns, equal rows; None to multiply nothing.
    """
    rows, hidden = result.shape
    down = gated.weights.down
    panels = ranges(0, hidden, BANK)
    for n in range(len(panels)):  # n: panel of columns of H
        start, end = panels[n]
        # A PSUM bank holds 512 float32 columns, so H passes in panels.
        bank = nl.ndarray((rows, end - start), dtype=nl.float32, buffer=nl.psum)
        for k in range(len(down)):  # k: block of F
            # The intermediate is stationary, so that the result has its rows on the partitions, like y.
            nisa.nc_matmul(
                dst=bank,
                stationary=gated.intermediate[0 : down[k].shape[0], k, first_row : first_row + rows],
                moving=down[k][:, start:end],
                accumulate=k > 0,
            )
        column_scales = None if scales is None else scales[0:rows, start:end]
        if total is None:
            # The Scalar and the Vector engine evict panels in turn.
            copy_bank(result[:, start:end], bank, n + 1, 2, None, column_scales)
        elif scales is not None:
            summed = total[:, start:end]
            nisa.tensor_tensor(dst=summed, data1=summed, data2=bank, op=nl.add)
            nisa.tensor_tensor(dst=result[:, start:end], data1=summed, data2=column_scales, op=nl.multiply)
        else:
            nisa.tensor_tensor(dst=result[:, start:end], data1=total[:, start:end], data2=bank, op=nl.add)
