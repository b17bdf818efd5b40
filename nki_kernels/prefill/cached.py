"""Cached positions that the queries of attention_prefill see, and the way of new keys and values to and from caches.

Of `prefix` positions the first ones are valid; how many is read at run time. The others may hold anything, NaN too. A
select, not a product, replaces them: values by 0, also in the column of ones, so they add nothing; keys by the first
new key, so that they change no maximum.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, SCALAR, transfer
from nki_kernels.prefill.keys import LOADED_BLOCKS, place_keys, row_range
from nki_kernels.tiles import PARTITIONS, blocks, cast, load_repeated

COUNTED = 1024
"""Positions whose predicate one instruction computes."""


class Cached(nl.NKIObject):
    """The cached positions of a sequence: how many are valid [128, 1], which are, and where a paged cache has them."""

    def __init__(self, case, sequence):
        first = sequence * case.queries
        self.count = cast(load_repeated(case.positions[first : first + 1, :], PARTITIONS), nl.float32)
        self.keys = nl.ndarray((PARTITIONS, case.prefix), dtype=nl.uint8, buffer=nl.sbuf)
        for start in range(0, case.prefix, COUNTED):
            end = min(case.prefix, start + COUNTED)
            less(self.keys[:, start:end], [[1, end - start]], start, 0, self.count)
        count = case.prefix // PARTITIONS
        self.values = nl.ndarray((PARTITIONS, count), dtype=nl.uint8, buffer=nl.sbuf)
        less(self.values, [[PARTITIONS, count]], 0, 1, self.count)
        self.rows = None
        if case.block_tables is not None:
            self.rows = rows_of_pages(case, case.block_tables[sequence : sequence + 1, :])


def less(result, pattern, offset, multiplier, limit):
    """result = 1 where the affine value of iota is below a limit [128, 1], else 0."""
    numbers = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=pattern, offset=offset, channel_multiplier=multiplier)
    nisa.tensor_scalar(dst=result, data=numbers, op0=nl.less, operand0=limit)


def rows_of_pages(case, table):
    """Row numbers [position in block, block] of a sequence's cached positions, in caches seen as [P * page, Hk * D]."""
    page = case.k_cache.shape[1]
    count = case.prefix // PARTITIONS
    per_block = PARTITIONS // page
    pages = nl.ndarray((PARTITIONS, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=pages, value=0)
    for block in range(count):
        first = block * per_block
        used = min(per_block, blocks(case.cached, page) - first)
        source = table.ap(pattern=[[1, used], [0, page], [1, 1]], offset=first)
        nisa.dma_copy(dst=pages[0 : used * page, block : block + 1], src=source)
    inside = nl.ndarray((PARTITIONS, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=inside, pattern=[[0, count]], channel_multiplier=1)
    nisa.tensor_scalar(dst=inside, data=inside, op0=nl.bitwise_and, operand0=page - 1)
    size = nl.ndarray((PARTITIONS, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=size, value=page)
    # On GpSimd 32-bit integers are exact.
    nisa.tensor_tensor(dst=pages, data1=pages, data2=size, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=pages, data1=pages, data2=inside, op=nl.add, engine=nisa.engine.gpsimd)
    return pages


def load_cached(case, head, cached, first):
    """Load up to LOADED_BLOCKS blocks of cached keys and values, from block `first` on; the first new key is there."""
    end = min(case.cached, (first + LOADED_BLOCKS) * PARTITIONS)
    last = blocks(end)
    new = case.prefix // PARTITIONS
    for part in range(case.parts):
        height = case.heights[part]
        key = head.keys[0:height, new, part, 0:1].reshape((height, 1, 1))
        nisa.tensor_copy(
            dst=head.keys[0:height, first:last, part, :],
            src=key.broadcast(1, last - first).broadcast(2, PARTITIONS),
            engine=nisa.engine.gpsimd,
        )
    nisa.memset(dst=head.values[:, first:last, :], value=0.0)
    nisa.tensor_copy(
        dst=head.values[:, first:last, case.value_depth],
        src=cached.values[:, first:last],
        engine=nisa.engine.gpsimd,
    )
    split = end // PARTITIONS
    if split > first:
        load_piece(case, head, cached, first, split, PARTITIONS)
    if last > split:
        load_piece(case, head, cached, split, last, end - split * PARTITIONS)


def load_piece(case, head, cached, first, last, used):
    """Load blocks first … last of cached keys and values, `used` positions of each."""
    count = last - first
    shape = (case.part_depth, count, case.parts, used)
    keys = nl.ndarray(shape, dtype=case.k_cache.dtype, buffer=nl.sbuf)
    values = nl.ndarray((used, count, case.value_depth), dtype=case.v_cache.dtype, buffer=nl.sbuf)
    if cached.rows is None:
        copy_positions(case, head, keys, values, first * PARTITIONS)
    else:
        gather_pages(case, head, cached.rows[0:used, first:last], keys, values)
    values = cast(values, case.dtype)
    valid = cached.keys[:, first * PARTITIONS : last * PARTITIONS]
    valid = valid.reshape_dim(1, (count, PARTITIONS))[:, :, 0:used]
    for start, end, height in case.pieces:
        piece = cast(keys[0:height, :, start:end, :], case.dtype)
        for part in range(start, end):
            nisa.tensor_copy_predicated(
                dst=head.keys[0:height, first:last, part, 0:used],
                src=piece[:, :, part - start, :],
                predicate=valid[0:height],
            )
    valid = cached.values[0:used, first:last].reshape((used, count, 1)).broadcast(2, case.value_depth)
    nisa.tensor_copy_predicated(
        dst=head.values[0:used, first:last, 0 : case.value_depth], src=values, predicate=valid
    )


def copy_positions(case, head, keys, values, start):
    """Fill tiles of keys and values from a contiguous cache, from a position on."""
    used, count, _ = values.shape
    end = start + used * count
    for part in range(case.parts):
        height = case.heights[part]
        row = part * case.part_depth
        rows = case.k_cache[head.sequence, head.number, row : row + height]
        nisa.dma_copy(dst=keys[0:height, :, part, :], src=rows[:, start:end].reshape_dim(1, (count, used)))
    rows = case.v_cache[head.sequence, head.number, start:end]
    nisa.dma_copy(dst=values, src=rows.reshape_dim(0, (count, used)).permute((1, 0, 2)))


def gather_pages(case, head, rows, keys, values):
    """Fill tiles of keys and values from the rows [position in block, block] of a paged cache, block by block."""
    used, count, _ = values.shape
    width = case.kv_heads * case.depth
    for i in range(count):
        place = rows[:, i : i + 1]
        pattern = [[width, used], [1, case.depth]]
        offset = head.number * case.depth
        by_position = nl.ndarray((used, case.depth), dtype=keys.dtype, buffer=nl.sbuf)
        source = case.k_cache.reshape((-1, width)).ap(pattern=pattern, offset=offset, vector_offset=place)
        nisa.dma_copy(dst=by_position, src=source)
        place_keys(case, keys[:, i : i + 1], by_position.reshape_dim(1, (1, case.depth)))
        source = case.v_cache.reshape((-1, width)).ap(pattern=pattern, offset=offset, vector_offset=place)
        nisa.dma_copy(dst=values[:, i, :], src=source)


def load_stored(case, head):
    """Load the new keys, and behind them the new values, which a launch before wrote to the caches; DMA casts them.

    The Scalar engine triggers these loads: the transposes of weights in the queue of the others need not wait for them.
    """
    steps = (load_stored_keys, load_stored_values) if case.slots is None else (gather_stored,)
    for step in steps:
        for first in range(0, blocks(case.new_keys), LOADED_BLOCKS):
            start, end = row_range(case, first)
            split = end // PARTITIONS * PARTITIONS
            if split > start:
                step(case, head, start, (split - start) // PARTITIONS, PARTITIONS)
            if end > split:
                step(case, head, split, 1, end - split)


def load_stored_keys(case, head, start, count, used):
    """Load `used` keys of each of some blocks, from where `store_new` writes them."""
    at = (case.prefix + start) // PARTITIONS
    for piece in case.pieces:
        part, end, height = piece
        transfer(
            head.keys[0:height, at : at + count, part:end, 0:used],
            key_places(case, head, piece, start, count, used),
            SCALAR,
        )


def load_stored_values(case, head, start, count, used):
    """Load `used` values of each of some blocks, from where `store_new` writes them."""
    at = (case.prefix + start) // PARTITIONS
    transfer(
        head.values[0:used, at : at + count, 0 : case.value_depth],
        value_places(case, head, start, count, used),
        SCALAR,
    )


def gather_stored(case, head, start, count, used):
    """Load `used` keys and values of each of some blocks from their slots of a paged cache."""
    at = (case.prefix + start) // PARTITIONS
    rows = nl.ndarray((used, count), dtype=nl.int32, buffer=nl.sbuf)
    first = head.sequence * case.new_keys + start
    slots = case.slots[first : first + count * used, :].reshape((count, used)).permute((1, 0))
    nisa.dma_copy(dst=rows, src=slots)
    keys = head.keys[:, at : at + count, :, 0:used]
    gather_pages(case, head, rows, keys, head.values[0:used, at : at + count, 0 : case.value_depth])


def store_new(case, head, first, end):
    """Write new keys and values, from block `first` of them up to a row, to the caches."""
    start = first * PARTITIONS
    split = end // PARTITIONS * PARTITIONS
    if case.slots is not None:
        for row in range(start, end, PARTITIONS):
            scatter_rows(case, head, row, min(end, row + PARTITIONS))
        return
    if split > start:
        store_piece(case, head, start, (split - start) // PARTITIONS, PARTITIONS)
    if end > split:
        store_piece(case, head, split, 1, end - split)


def store_piece(case, head, start, count, used):
    """Write `used` keys and values of each of some blocks to a contiguous cache, behind its valid positions."""
    at = (case.prefix + start) // PARTITIONS
    for piece in case.pieces:
        part, end, height = piece
        keys = key_places(case, head, piece, start, count, used)
        own = head.keys[0:height, at : at + count, part:end, 0:used]
        transfer(keys, own, COMPILER)
    values = value_places(case, head, start, count, used)
    transfer(values, head.values[0:used, at : at + count, 0 : case.value_depth], COMPILER)


def key_places(case, head, piece, start, count, used):
    """Where a contiguous cache has a piece of new keys: [part of D, block, part, key], `used` keys of each block."""
    part, end, height = piece
    capacity = case.k_cache.shape[3]
    row = first_row(case, head) * case.depth + part * case.part_depth
    return case.k_cache.ap(
        pattern=[[capacity, height], [used, count], [case.part_depth * capacity, end - part], [1, used]],
        offset=row * capacity + start,
        scalar_offset=place_at_run_time(case, head),
        indirect_dim=3 if case.cache_rows is None else 0,
    )


def value_places(case, head, start, count, used):
    """Where a contiguous cache has new values: [value, block, D], `used` values of each block."""
    row = first_row(case, head) * case.k_cache.shape[3] + start
    return case.v_cache.ap(
        pattern=[[case.value_depth, used], [used * case.value_depth, count], [1, case.value_depth]],
        offset=row * case.value_depth,
        scalar_offset=place_at_run_time(case, head),
        indirect_dim=2 if case.cache_rows is None else 0,
    )


def first_row(case, head):
    """The number of a head among those of all sequences, or of its own where `cache_rows` name the sequence."""
    return head.number if case.cache_rows is not None else head.sequence * case.kv_heads + head.number


def place_at_run_time(case, head):
    """The row of the caches that takes a head's sequence, or how many of its cached positions are valid, [1, 1] in HBM;
    None where rows are in order and nothing is cached.
    """
    if case.cache_rows is not None:
        return case.cache_rows[head.sequence : head.sequence + 1, :]
    if case.prefix == 0:
        return None
    first = head.sequence * case.queries
    return case.positions[first : first + 1, :]


def scatter_rows(case, head, start, end):
    """Write new keys and values start … end of a sequence to their slots of a paged cache, from the arguments."""
    width = case.kv_heads * case.depth
    first = head.sequence * case.new_keys
    slots = nl.ndarray((end - start, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=slots, src=case.slots[first + start : first + end, :])
    columns = [head.number * case.depth, (head.number + 1) * case.depth]
    for new, cache in ((case.k, case.k_cache), (case.v, case.v_cache)):
        rows = nl.ndarray((end - start, case.depth), dtype=case.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=new[first + start : first + end, columns[0] : columns[1]])
        target = cache.reshape((-1, width)).ap(
            pattern=[[width, end - start], [1, case.depth]], offset=columns[0], vector_offset=slots
        )
        nisa.dma_copy(dst=target, src=cast(rows, cache.dtype))
