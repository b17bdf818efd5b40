"""The product of rows and a weight, plus a residual, summed over ranks: how output_projection and mlp both end.

    y[first …] = residual[first …] + sum over ranks of x @ weight

x lies in SBUF as blocks [k in block, block, row]; the weight streams through, or stays in SBUF. A chunk of columns
accumulates in half of the PSUM banks, while the chunk before is read out of the others. Over several ranks a chunk is
rounded to y's dtype and summed from SBUF to SBUF, under the products of the next chunks; then the residual is added.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import to_sbuf
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks

PIECE_ELEMENTS = 1024
"""Elements per partition of one loaded piece of the weight: 256 KiB in bfloat16.

Larger pieces are no faster where 16 of them are under way, and the products with the last one end later.
"""

VECTOR_SHARE = 2
"""The Vector engine reads out one of so many PSUM banks from gen3 on; 0: none."""

COLLECTIVES_AHEAD = 2
"""Chunks whose sums over the ranks may be under way before the first of them is stored."""


def load_cast(matrix, dtype, engine):
    """A matrix [K, columns] of HBM as blocks [k in block, block, columns], cast on chip if need be."""
    depth, columns = matrix.shape
    shape = (min(PARTITIONS, depth), blocks(depth), columns)
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    load_cast_into(result, matrix, engine)
    return result


def load_cast_into(tile, matrix, engine):
    """A matrix [K, columns] of HBM into blocks [k in block, block, columns], cast on chip if need be."""
    if matrix.dtype == tile.dtype:
        load_rows_into(tile, matrix, engine)
        return
    depth = matrix.shape[0]
    raw = nl.ndarray(tile.shape, dtype=matrix.dtype, buffer=nl.sbuf)
    load_rows_into(raw, matrix, engine)
    full = depth // PARTITIONS
    if full > 0:
        nisa.tensor_copy(dst=tile[:, 0:full, :], src=raw[:, 0:full, :])
    short = depth - full * PARTITIONS
    if short > 0:
        nisa.tensor_copy(dst=tile[0:short, full, :], src=raw[0:short, full, :])


def load_rows_into(tile, matrix, engine):
    """Rows of HBM into a tile [row in block, block, columns]: one DMA for the full blocks, one for the short one."""
    depth = matrix.shape[0]
    full = depth // PARTITIONS
    if full > 0:
        source = matrix[0 : full * PARTITIONS].reshape_dim(0, (full, PARTITIONS)).permute((1, 0, 2))
        nisa.dma_copy(dst=tile[:, 0:full, :], src=source, engine=engine)
    short = depth - full * PARTITIONS
    if short > 0:
        nisa.dma_copy(dst=tile[0:short, full, :], src=matrix[full * PARTITIONS : depth], engine=engine)


def store_rows_from(matrix, tile, engine):
    """A tile [row in block, block, columns] to rows of HBM, as load_rows_into."""
    depth = matrix.shape[0]
    full = depth // PARTITIONS
    if full > 0:
        target = matrix[0 : full * PARTITIONS].reshape_dim(0, (full, PARTITIONS)).permute((1, 0, 2))
        nisa.dma_copy(dst=target, src=tile[:, 0:full, :], engine=engine)
    short = depth - full * PARTITIONS
    if short > 0:
        nisa.dma_copy(dst=matrix[full * PARTITIONS : depth], src=tile[0:short, full, :], engine=engine)


def load_engine(replica_group, exchanges=False):
    """Who triggers loads: where Sync triggers collectives or exchanges of cores GpSimd, so that no load waits."""
    return nisa.engine.sync if replica_group is None and not exchanges else nisa.engine.gpsimd


def store_engine(loads):
    """Who triggers stores: the engine that triggers no loads."""
    return nisa.engine.gpsimd if loads == nisa.engine.sync else nisa.engine.sync


def chunk_width(rows):
    """Columns of a chunk, so that all rows of a group accumulate in ACCUMULATOR_BANKS banks."""
    return BANK * max(1, ACCUMULATOR_BANKS // blocks(rows))


def residual_product(y, residual, weights, bias, replica_group, held=None, paired=False, exchanges=False):
    """What the chunks of one product share; `product_chunk` takes it.

    weights: the parts of the weight, each some of its rows; one if it is `held`. bias: [128, H] in SBUF, or None. held:
    a list, empty at first, if the weight is to stay in SBUF, else None. paired: see `accumulate`. exchanges: whether
    cores exchange tiles meanwhile. The entry "kept" may be set to the residual in SBUF, as [row, 1, H].
    """
    return {
        "y": y,
        "residual": residual,
        "weights": weights,
        "bias": bias,
        "replica_group": replica_group,
        "loads": load_engine(replica_group, exchanges),
        "held": held,
        "kept": None,
        "paired": paired,
        "sums": [],
    }


def product_chunk(job, parts, first, column):
    """One chunk of columns, from `column` on, of rows first … of y.

    parts: for each part of the weight what it is multiplied with, as [k in block, block, row].
    """
    y, replica_group, loads = job["y"], job["replica_group"], job["loads"]
    rows = parts[0].shape[2]
    last = min(y.shape[1], column + chunk_width(rows))
    width = last - column
    target = y[first : first + rows, column:last]
    sums = banks_of(rows, width)
    before = None if job["kept"] is None else job["kept"][:, :, column:last]
    for number in range(len(parts)):
        x, weight = parts[number], job["weights"][number]
        depth = weight.shape[0]
        per_piece = blocks(depth) if job["held"] is not None else max(1, PIECE_ELEMENTS // width)
        for block in range(0, blocks(depth), per_piece):
            end = min(depth, (block + per_piece) * PARTITIONS)
            if job["held"] is None:
                pieces = [load_piece(weight[:, column:last], block, end, x, job["paired"], loads)]
            else:
                pieces = held_columns(job["held"], weight, column, last, x.dtype, loads)
            if before is None:
                shape = (min(rows, PARTITIONS), blocks(rows), width)
                before = nl.ndarray(shape, dtype=y.dtype, buffer=nl.sbuf)
                load_rows_into(before, job["residual"][first : first + rows, column:last], loads)
            accumulate(sums, x, pieces, block, end - block * PARTITIONS, number > 0, job["paired"])
    bias = None if job["bias"] is None else job["bias"][:, column:last]
    if replica_group is None:
        store_rows_from(target, plus_residual(sums, before, bias, loads), store_engine(loads))
        return
    total = sum_over_ranks(sums, before, replica_group)
    job["sums"].append((total, before, bias, target))
    if len(job["sums"]) > COLLECTIVES_AHEAD:
        store_sum(job["sums"][len(job["sums"]) - 1 - COLLECTIVES_AHEAD])


def store_last_sums(job):
    """Store the chunks whose sums over ranks are still under way."""
    sums = job["sums"]
    for number in range(max(0, len(sums) - COLLECTIVES_AHEAD), len(sums)):
        store_sum(sums[number])


def load_piece(weight, block, end, x, paired, engine):
    """Rows of a weight [K, columns], from block `block` to row `end`, as blocks in x's dtype."""
    depth, width = weight.shape
    start = block * PARTITIONS
    count = blocks(end - start)
    piece = nl.ndarray((x.shape[0], count, width), dtype=x.dtype, buffer=nl.sbuf)
    load_cast_into(piece, weight[start:end], engine)
    if paired and end == depth:
        half = PARTITIONS // 2
        load_cast_into(piece[half:PARTITIONS, count - 1 :, :], weight[end - half : end], engine)
    return piece


def banks_of(rows, width):
    """(PSUM tile of up to 128 rows and 512 columns, row tile, first column) for each bank of a chunk."""
    banks = []
    for tile in range(blocks(rows)):
        count = min(PARTITIONS, rows - tile * PARTITIONS)
        for start in range(0, width, BANK):
            shape = (count, min(BANK, width - start))
            banks.append((nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum), tile, start))
    return banks


def held_columns(held, weight, column, last, dtype, engine):
    """The tiles that hold the columns column … last of a weight; `held` gets those that are not in SBUF yet."""
    depth = weight.shape[0]
    width = BANK * max(1, min(ACCUMULATOR_BANKS, PIECE_ELEMENTS // (BANK * blocks(depth))))
    for first in range(len(held) * width, last, width):
        end = min(weight.shape[1], first + width)
        held.append(load_cast(weight[:, first:end], dtype, engine))
    return held[column // width : blocks(last, width)]


def accumulate(sums, x, pieces, first_block, depth, begun, paired):
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
        row = tile * PARTITIONS
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
                row = tile * PARTITIONS
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


def plus_residual(sums, before, bias, loads):
    """The banks of a chunk plus the residual and the bias, as a tile [row in block, block, column] of its dtype.

    The Vector engine adds one of VECTOR_SHARE banks, the last one included; the Scalar engine copies the others to SBUF
    and GpSimd adds them, unless it triggers loads, which would wait. On gen2 these engines wait for each other at their
    ports, so the Vector engine adds all.
    """
    alone = loads != nisa.engine.sync or nisa.get_nc_version() == nisa.nc_version.gen2
    share = 1 if alone else VECTOR_SHARE
    result = nl.ndarray(before.shape, dtype=before.dtype, buffer=nl.sbuf)
    for number in range(len(sums)):
        bank, tile, start = sums[number]
        count, columns = bank.shape
        own = before[0:count, tile, start : start + columns]
        into = result[0:count, tile, start : start + columns]
        if bias is not None:
            nisa.tensor_tensor(dst=own, data1=own, data2=bias[0:count, start : start + columns], op=nl.add)
        if (len(sums) - 1 - number) % share == 0:
            nisa.tensor_tensor(dst=into, data1=bank, data2=own, op=nl.add)
        else:
            copied = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=copied, op=nl.copy, data=bank)
            nisa.tensor_tensor(dst=into, data1=copied, data2=own, op=nl.add, engine=nisa.engine.gpsimd)
    return result


def sum_over_ranks(sums, before, replica_group):
    """The banks of a chunk summed over the ranks, as a tile like `before`; a short row tile has its own collective."""
    partial = nl.ndarray(before.shape, dtype=before.dtype, buffer=nl.sbuf)
    total = nl.ndarray(before.shape, dtype=before.dtype, buffer=nl.sbuf)
    full = 0
    for number in range(len(sums)):
        bank, tile, start = sums[number]
        count, columns = bank.shape
        to_sbuf(partial[0:count, tile, start : start + columns], bank, number, VECTOR_SHARE)
        full = tile + 1 if count == PARTITIONS else full
    tiles, width = before.shape[1], before.shape[2]
    if full > 0:
        flat = (PARTITIONS, full * width)
        ncc.all_reduce(
            srcs=[partial[:, 0:full, :].reshape(flat)],
            dsts=[total[:, 0:full, :].reshape(flat)],
            replica_group=replica_group,
            op=nl.add,
        )
    if full < tiles:
        count = sums[len(sums) - 1][0].shape[0]
        ncc.all_reduce(
            srcs=[partial[0:count, full, :]],
            dsts=[total[0:count, full, :]],
            replica_group=replica_group,
            op=nl.add,
        )
    return total


def store_sum(chunk):
    """Add the residual and the bias to a chunk that was summed over the ranks, and store it."""
    total, before, bias, target = chunk
    rows = target.shape[0]
    for tile in range(total.shape[1]):
        count = min(PARTITIONS, rows - tile * PARTITIONS)
        own = total[0:count, tile, :]
        if bias is not None:
            nisa.tensor_tensor(dst=own, data1=own, data2=bias[0:count, :], op=nl.add)
        nisa.tensor_tensor(dst=own, data1=own, data2=before[0:count, tile, :], op=nl.add)
    store_rows_from(target, total, nisa.engine.sync)
