"""The product of rows and a weight, plus a residual if any, summed over ranks: how output_projection and mlp both end.

    y[first …] = residual[first …] + sum over ranks of x @ weight

Rows of the product may be multiplied by factors before the residual is added.
With y cut over ranks (sequence parallelism) each has its own rows of y and of the residual: a row tile of x @ weight
holds the same own rows of every rank, [rank, row], and a reduce-scatter takes the place of the all-reduce.

x lies in SBUF as blocks [k in block, block, row]; the weight streams through, or stays in SBUF. A chunk of columns
accumulates in half of the PSUM banks, while the chunk before is read out of the others. Over several ranks a chunk is
rounded to y's dtype and summed from SBUF to SBUF, under the products of the next chunks; then the residual is added.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC
from nki_kernels.projection.block_loads import load_cast, load_cast_into, store_rows_from
from nki_kernels.projection.normalised_rows import to_sbuf
from nki_kernels.projection.row_groups import own_height
from nki_kernels.projection.sums import load_residual, prepare_sum, start_sum, store_sum, sum_of_banks
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks

PIECE_ELEMENTS = 1024
"""Elements per partition of one loaded piece of the weight: 256 KiB in bfloat16.

Larger pieces are no faster where 16 of them are under way, and the products with the last one end later.
"""

VECTOR_SHARE = 2
"""The Vector engine reads out one of so many PSUM banks from gen3 on; 0: none."""


def chunk_width(rows, ranks=1):
    """Columns of a chunk, so that all rows of a group accumulate in ACCUMULATOR_BANKS banks."""
    return BANK * max(1, ACCUMULATOR_BANKS // blocks(rows, ranks * own_height(ranks)))


def residual_product(y, residual, weights, bias, replica_group, ranks=1, held=None, paired=False, ahead=1):
    """What the chunks of one product share; `product_chunk` takes it.

    residual: [T, H] in HBM, or None. weights: the parts of the weight, each some of its rows; one if it is `held`.
    bias: [128, H] in SBUF, or None. ranks: over which the rows of y are cut. held: a list, empty at first, if the
    weight is to stay in SBUF, else None. paired: see `accumulate`.
    ahead: chunks, at least one, whose sums over the ranks may be under way before the first is stored. The entry
    "kept" may be set to the residual in SBUF, as [row, 1, H], and "factors" to a list with a column for each row tile,
    [rows, 1] float32, that multiplies its rows.
    """
    return {
        "y": y,
        "residual": residual,
        "weights": weights,
        "bias": bias,
        "replica_group": replica_group,
        "ranks": ranks,
        "ahead": ahead,
        "held": held,
        "kept": None,
        "factors": None,
        "paired": paired,
        "sums": [],
        "unstarted": None,
    }


def product_chunk(job, parts, first, column):
    """One chunk of columns, from `column` on, of rows first … of y, or of these rows of every rank.

    parts: for each part of the weight what it is multiplied with, as [k in block, block, row].
    """
    y, replica_group = job["y"], job["replica_group"]
    rows = parts[0].shape[2]
    last = min(y.shape[1], column + chunk_width(rows, job["ranks"]))
    width = last - column
    ranks = job["ranks"]
    end = first + rows // ranks
    target = y[first:end, column:last]
    height = ranks * own_height(ranks)
    sums = banks_of(rows, width, height)
    before = None if job["kept"] is None else job["kept"][:, :, column:last]
    for number in range(len(parts)):
        x, weight = parts[number], job["weights"][number]
        depth = weight.shape[0]
        per_piece = blocks(depth) if job["held"] is not None else max(1, PIECE_ELEMENTS // width)
        for block in range(0, blocks(depth), per_piece):
            last_row = min(depth, (block + per_piece) * PARTITIONS)
            if job["held"] is None:
                pieces = [load_piece(weight[:, column:last], block, last_row, x, job["paired"])]
            else:
                pieces = held_columns(job["held"], weight, column, last, x.dtype)
            if before is None and job["residual"] is not None and replica_group is None:
                before = load_residual(job, first, end, column, last)
            rows_left = last_row - block * PARTITIONS
            accumulate(sums, x, pieces, block, rows_left, number > 0, job["paired"], height)
    bias = None if job["bias"] is None else job["bias"][:, column:last]
    factors = None if job["factors"] is None else job["factors"][first // own_height(ranks) :]
    if replica_group is None:
        result = nl.ndarray((min(rows, PARTITIONS), blocks(rows), width), dtype=y.dtype, buffer=nl.sbuf)
        plus_residual(result, sums, before, bias, factors)
        store_rows_from(target, result, COMPILER)
        return
    shape = (height, blocks(rows, height), width)
    partial, total = sum_of_banks(sums, shape, y.dtype, ranks, factors)
    start_sum(job)
    job["unstarted"] = partial, total, rows
    job["sums"].append([total, before, bias, target, (first, end, column, last)])
    prepare_sum(job, len(job["sums"]) - job["ahead"])
    store_sum(job, len(job["sums"]) - 1 - job["ahead"])


def load_piece(weight, block, end, x, paired):
    """Rows of a weight [K, columns], from block `block` to row `end`, as blocks in x's dtype."""
    depth, width = weight.shape
    start = block * PARTITIONS
    count = blocks(end - start)
    piece = nl.ndarray((x.shape[0], count, width), dtype=x.dtype, buffer=nl.sbuf)
    load_cast_into(piece, weight[start:end], STATIC)
    if paired and end == depth:
        half = PARTITIONS // 2
        load_cast_into(piece[half:PARTITIONS, count - 1 :, :], weight[end - half : end], STATIC)
    return piece


def banks_of(rows, width, height):
    """(PSUM tile of up to `height` rows and 512 columns, row tile, first column) for each bank of a chunk."""
    banks = []
    for tile in range(blocks(rows, height)):
        count = min(height, rows - tile * height)
        for start in range(0, width, BANK):
            shape = (count, min(BANK, width - start))
            banks.append((nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum), tile, start))
    return banks


def held_columns(held, weight, column, last, dtype):
    """The tiles with columns column … last of a weight; missing tiles are loaded and appended to `held`."""
    depth = weight.shape[0]
    width = BANK * max(1, min(ACCUMULATOR_BANKS, PIECE_ELEMENTS // (BANK * blocks(depth))))
    for first in range(len(held) * width, last, width):
        end = min(weight.shape[1], first + width)
        held.append(load_cast(weight[:, first:end], dtype, STATIC))
    return held[column // width : blocks(last, width)]


def accumulate(sums, x, pieces, first_block, depth, begun, paired, height):
    """Add the product of `depth` rows of the weight, those from `first_block` on, to all banks of a chunk.

    begun: whether the banks hold the products of another part. paired: a last block of 64 rows lies in both halves of
    the partitions, so that the array takes it for two banks at once, each in half of its rows.
    """
    each = pieces[0].shape[2]
    half = PARTITIONS // 2
    full = depth // PARTITIONS
    short = depth - full * PARTITIONS
    for number in range(len(sums)):
        bank, tile, first_column = sums[number]
        count, columns = bank.shape
        row = tile * height
        piece = pieces[first_column // each]
        start = first_column % each
        for block in range(full):
            nisa.nc_matmul(
                dst=bank,
                stationary=x[:, first_block + block, row : row + count],
                moving=piece[:, block, start : start + columns],
                accumulate=begun or first_block + block > 0,
            )
        last_block = first_block + full
        if short > 0 and not paired:
            nisa.nc_matmul(
                dst=bank,
                stationary=x[0:short, last_block, row : row + count],
                moving=piece[0:short, full, start : start + columns],
                accumulate=begun or last_block > 0,
            )
        if short > 0 and paired and (number % 2 == 1 or number + 1 == len(sums)):
            for other in range(number - number % 2, number + 1):
                bank, tile, first_column = sums[other]
                count, columns = bank.shape
                row = tile * height
                start = first_column % each
                at = half * (other % 2)
                nisa.nc_matmul(
                    dst=bank,
                    stationary=x[at : at + half, last_block, row : row + count],
                    moving=piece[at : at + half, full, start : start + columns],
                    accumulate=begun or last_block > 0,
                    tile_position=(at, 0),
                    tile_size=(half, PARTITIONS),
                )


def plus_residual(result, sums, before, bias, factors):
    """The banks of a chunk plus the residual and the bias, where there are any: [row in block, block, column].

    factors: see `sum_of_banks`.

    The Vector engine adds one of VECTOR_SHARE banks, the last one included; the Scalar engine copies the others to SBUF
    and GpSimd adds them. On gen2 these engines wait for each other at their ports, so the Vector engine adds all.
    """
    share = 1 if nisa.get_nc_version() == nisa.nc_version.gen2 else VECTOR_SHARE
    for number in range(len(sums)):
        bank, tile, start = sums[number]
        count, columns = bank.shape
        into = result[0:count, tile, start : start + columns]
        factor = None if factors is None else factors[tile]
        if before is None and bias is None:
            to_sbuf(into, bank, len(sums) - 1 - number, share, factor)
            continue
        own = bias[0:count, start : start + columns] if bias is not None else None
        if before is not None:
            residual = before[0:count, tile, start : start + columns]
            if bias is not None:
                nisa.tensor_tensor(dst=residual, data1=residual, data2=own, op=nl.add)
            own = residual
        if (len(sums) - 1 - number) % share != 0:
            copied = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
            to_sbuf(copied, bank, number, 0, factor)
            nisa.tensor_tensor(dst=into, data1=copied, data2=own, op=nl.add, engine=nisa.engine.gpsimd)
        elif factor is None:
            nisa.tensor_tensor(dst=into, data1=bank, data2=own, op=nl.add)
        else:
            nisa.scalar_tensor_tensor(
                dst=into, data=bank, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=own
            )
