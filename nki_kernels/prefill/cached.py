"""Cached positions that the queries of attention_prefill see.

Of `prefix` positions the first ones are valid; how many is read at run time. The others may hold anything, NaN too. A
select, not a product, replaces them: values by 0, also in the column of ones, so they add nothing; keys by the first
new key, so that they change no maximum.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.key_blocks import LOADED_BLOCKS, pieces_of
from nki_kernels.tiles import PARTITIONS, blocks, cast, load_repeated

COUNTED = 1024
"""Positions whose predicate one instruction computes."""


class Cached(nl.NKIObject):
    """The cached positions of a sequence: how many are valid [128, 1], which are, and where a paged cache has them."""

    def __init__(self, prompts, sequence):
        first = sequence * prompts.queries
        self.count = cast(load_repeated(prompts.positions[first : first + 1, :], PARTITIONS), nl.float32)
        # Positions of keys lie along the free dimension, so each partition holds the whole predicate.
        self.keys = nl.ndarray((PARTITIONS, prompts.prefix), dtype=nl.uint8, buffer=nl.sbuf)
        for start in range(0, prompts.prefix, COUNTED):
            end = min(prompts.prefix, start + COUNTED)
            less(self.keys[:, start:end], [[1, end - start]], start, 0, self.count)
        count = prompts.prefix // PARTITIONS
        # Positions of values lie on the partitions, so their predicate is one column for each block.
        self.values = nl.ndarray((PARTITIONS, count), dtype=nl.uint8, buffer=nl.sbuf)
        less(self.values, [[PARTITIONS, count]], 0, 1, self.count)
        self.rows = prompts.cache.find_prefix(prompts, sequence)


def less(result, pattern, offset, multiplier, limit):
    """Write 1 to `result` where the affine value of iota is below a limit [128, 1], else 0."""
    numbers = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=pattern, offset=offset, channel_multiplier=multiplier)
    nisa.tensor_scalar(dst=result, data=numbers, op0=nl.less, operand0=limit)


def load_cached(prompts, head, first):
    """Load up to LOADED_BLOCKS blocks of cached keys and values, from block `first` on; the first new key is there."""
    end = min(prompts.cached, (first + LOADED_BLOCKS) * PARTITIONS)
    last = blocks(end)
    new = prompts.prefix // PARTITIONS
    for tile in range(prompts.depth_tiles):
        height = prompts.heights[tile]
        key = head.keys[0:height, new, tile, 0:1].reshape((height, 1, 1))
        # GpSimd fills the keys, because the Vector engine passes over every score of other tiles.
        nisa.tensor_copy(
            dst=head.keys[0:height, first:last, tile, :],
            src=key.broadcast(1, last - first).broadcast(2, PARTITIONS),
            engine=nisa.engine.gpsimd,
        )
    nisa.memset(dst=head.values[:, first:last, :], value=0.0)
    nisa.tensor_copy(
        dst=head.values[:, first:last, prompts.value_depth],
        src=head.cached.values[:, first:last],
        engine=nisa.engine.gpsimd,
    )
    for piece in pieces_of(first * PARTITIONS, end):
        load_piece(prompts, head, piece)


def load_piece(prompts, head, piece):
    """Load the valid ones of a piece of cached keys and values."""
    first, count, used = piece.start // PARTITIONS, piece.count, piece.used
    last = first + count
    cache, cached = prompts.cache, head.cached
    shape = (prompts.tile_depth, count, prompts.depth_tiles, used)
    k_dtype, v_dtype = cache.k_cache.dtype, cache.v_cache.dtype
    if prompts.scales is not None:
        # DMA casts bytes, which it does not transpose.
        k_dtype, v_dtype = prompts.dtype, prompts.dtype
    keys = nl.ndarray(shape, dtype=k_dtype, buffer=nl.sbuf)
    values = nl.ndarray((used, count, prompts.value_depth), dtype=v_dtype, buffer=nl.sbuf)
    cache.load_prefix(prompts, head, first, keys, values)
    values = cast(values, prompts.dtype)
    valid = cached.keys[:, first * PARTITIONS : last * PARTITIONS]
    valid = valid.reshape_dim(1, (count, PARTITIONS))[:, :, 0:used]
    for start, end, height in prompts.depth_ranges:
        loaded = cast(keys[0:height, :, start:end, :], prompts.dtype)
        for tile in range(start, end):
            nisa.tensor_copy_predicated(
                dst=head.keys[0:height, first:last, tile, 0:used],
                src=loaded[:, :, tile - start, :],
                predicate=valid[0:height],
            )
    valid = cached.values[0:used, first:last].reshape((used, count, 1)).broadcast(2, prompts.value_depth)
    nisa.tensor_copy_predicated(
        dst=head.values[0:used, first:last, 0 : prompts.value_depth], src=values, predicate=valid
    )


def store_new(launch, load):
    """Write new keys and values that one DMA brings to the cache; an agenda's step."""
    prompts, first = launch.prompts, load.first
    end = min(prompts.new_keys, (first + LOADED_BLOCKS) * PARTITIONS)
    prompts.cache.store_prompt(prompts, load.head, first, end)
