"""Cached positions that the queries of attention_prefill see.

Of `prefix` positions the first ones are valid; how many is read at run time. The others may hold anything, NaN too. A
select, not a product, replaces them: values by 0, also in the column of ones, so they add nothing; keys by the first
new key, so that they change no maximum.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.keys import LOADED_BLOCKS
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
        self.rows = case.cache.find_prefix(case, sequence)


def less(result, pattern, offset, multiplier, limit):
    """result = 1 where the affine value of iota is below a limit [128, 1], else 0."""
    numbers = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=pattern, offset=offset, channel_multiplier=multiplier)
    nisa.tensor_scalar(dst=result, data=numbers, op0=nl.less, operand0=limit)


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
    k_dtype, v_dtype = case.cache.k_cache.dtype, case.cache.v_cache.dtype
    if case.scales is not None:
        # DMA casts bytes, which it does not transpose.
        k_dtype, v_dtype = case.dtype, case.dtype
    keys = nl.ndarray(shape, dtype=k_dtype, buffer=nl.sbuf)
    values = nl.ndarray((used, count, case.value_depth), dtype=v_dtype, buffer=nl.sbuf)
    case.cache.load_prefix(case, head, first, keys, values)
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


def store_new(case, head, first, end):
    """Write new keys and values, from block `first` of them up to row `end`, to the cache; an agenda's step."""
    case.cache.store_prompt(case, head, first, end)
