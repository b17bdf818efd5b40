"""Paged caches of a decode step: keys and values of a sequence lie in pages that a table names at run time.

A page [block, Hk, D] holds `block` positions of all kv heads. Partition p of a tile holds S // 128 consecutive
positions, as from a contiguous cache. It gets them in *runs*, as many positions as pages and partitions have in common:
one DMA with run-time row numbers brings a run to each partition. Keys come with D along the free dim and are transposed
on chip.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.cache import row_shape
from nki_kernels.decode.sizes import units_in
from nki_kernels.dma import COMPILER, STATIC, transfer
from nki_kernels.tiles import PARTITIONS

TRANSPOSES_TOGETHER = 4
"""Transposed chunks that one copy moves to SBUF."""


def run_length(sizes):
    """Positions of a run: the greatest common divisor of those of a page and those of a partition."""
    first, second = sizes.block, sizes.full
    while second > 0:
        first, second = second, first % second
    return first


def run_numbers(block_tables, sizes):
    """Where the runs of each partition are in a cache, counted in runs: [128, runs, sequence] int32.

    float32 holds the numbers exactly, see the limits.
    """
    runs_per_page = sizes.block // run_length(sizes)
    runs = sizes.full // run_length(sizes)
    shape = (PARTITIONS, runs, sizes.sequences)
    pages = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    repeated = block_tables.permute((1, 0)).expand_dim(1).broadcast(1, runs_per_page)
    transfer(pages, repeated, STATIC)
    if runs_per_page == 1:
        return pages
    row = nl.ndarray((1, sizes.blocks, runs_per_page), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[0, sizes.blocks], [1, runs_per_page]])
    within = nl.ndarray((PARTITIONS, runs), dtype=nl.float32, buffer=nl.sbuf)
    transfer(within, row, COMPILER)
    result = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=result,
        data=pages,
        op0=nl.multiply,
        operand0=float(runs_per_page),
        op1=nl.add,
        operand1=within.expand_dim(2).broadcast(2, sizes.sequences),
    )
    return result


def row_tiles(sizes):
    """Tiles for gathered rows of keys, one for each group whose loads are under way."""
    result = []
    for _ in range(sizes.key_buffers):
        result.append(nl.ndarray(row_shape(sizes), dtype=sizes.dtype, buffer=nl.sbuf))
    return result


def gather(tile, cache, first_head, numbers, box, sizes):
    """Bring the rows of a group of units to `tile` [128, sequence, chunk, kv head, D]; the box counts heads from
    `first_head` of the cache on.
    """
    first, end, head, last = box
    length = run_length(sizes)
    rows = cache.shape[0] * sizes.block // length
    pitch = cache.shape[2] * sizes.depth
    row = length * pitch
    flat = cache.reshape((rows, row))
    heads = last - head
    pattern = [[row, PARTITIONS], [pitch, length], [1, heads * sizes.depth]]
    for sequence in range(first, end):
        for run in range(numbers.shape[1]):
            source = flat.ap(
                pattern=pattern,
                offset=(first_head + head) * sizes.depth,
                vector_offset=numbers[:, run, sequence : sequence + 1],
            )
            at = run * length
            target = tile[:, sequence - first, at : at + length, 0:heads, :]
            nisa.dma_copy(dst=target, src=source)


def by_unit(tile, box):
    """A tile [128, sequence, chunk, kv head, D] as [128, unit, chunk, D]; with several heads there is one sequence."""
    if box[3] - box[2] == 1:
        return tile[:, 0 : box[1] - box[0], :, 0, :]
    return tile[:, 0, :, 0 : box[3] - box[2], :].permute((0, 2, 1, 3))


def transpose_keys(tile, rows, box, first_chunk, last_chunk, sizes):
    """Keys of a group of units [128, unit, chunk, D] to `tile` [D in part, part, unit, S], position by position."""
    for unit in range(units_in(box)):
        for part in range(sizes.parts):
            start, stop = part * PARTITIONS, min(sizes.depth, (part + 1) * PARTITIONS)
            height = stop - start
            columns = (
                tile[0:height, part, unit, :].reshape((height, PARTITIONS, sizes.full)).permute((0, 2, 1))
            )
            for first in range(first_chunk, last_chunk, TRANSPOSES_TOGETHER):
                count = min(TRANSPOSES_TOGETHER, last_chunk - first)
                bank = nl.ndarray((height, count, PARTITIONS), dtype=rows.dtype, buffer=nl.psum)
                for i in range(count):
                    nisa.nc_transpose(dst=bank[:, i, :], data=rows[:, unit, first + i, start:stop])
                nisa.activation(dst=columns[:, first : first + count, :], op=nl.copy, data=bank)
