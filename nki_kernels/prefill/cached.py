"""Cached positions that the queries of attention_prefill see: which are valid, and their keys and values in SBUF.

`prefix` positions are read, a number known at compile time. Only the first ones are valid; how many is read at run
time. The others may hold anything, NaN too. A select, not a product, replaces them: values by 0, also in the column of
ones, so they add nothing; keys by the first new key, so that they change no maximum. `attention_prefill` makes a
`Cached` for each sequence, and calls `load_cached` for each head after its new keys are loaded.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.key_blocks import LOADED_BLOCKS, split_into_pieces
from nki_kernels.tiles import PARTITIONS, blocks, cast, load_repeated

COUNTED = 1024
"""Positions whose predicate one instruction computes."""


class Cached(nl.NKIObject):
    """Valid cached positions of one sequence, shared by its key/value heads.

    `count` is the number of valid positions, [128, 1] float32 @ SBUF, the same on every partition. Two uint8 predicates
    in SBUF are 1 for valid positions: `keys` [128, cached_keys], every partition with all positions, and `values`
    [position in block, block]. `rows` are the row numbers of the positions in a paged cache, [position in block,
    block]; None if the cache is contiguous.
    """

    def __init__(self, prompts, sequence):
        first = sequence * prompts.queries
        self.count = cast(load_repeated(prompts.positions[first : first + 1, :], PARTITIONS), nl.float32)
        # Positions of keys lie along the free dimension, so each partition holds the whole predicate.
        self.keys = nl.ndarray((PARTITIONS, prompts.cached_keys), dtype=nl.uint8, buffer=nl.sbuf)
        for start in range(0, prompts.cached_keys, COUNTED):
            end = min(prompts.cached_keys, start + COUNTED)
            mark_compared_positions(
                self.keys[:, start:end], [[1, end - start]], start, 0, nl.less, self.count
            )
        count = prompts.cached_keys // PARTITIONS
        # Positions of values lie on the partitions, so their predicate is one column for each block.
        self.values = nl.ndarray((PARTITIONS, count), dtype=nl.uint8, buffer=nl.sbuf)
        mark_compared_positions(self.values, [[PARTITIONS, count]], 0, 1, nl.less, self.count)
        self.rows = prompts.cache.find_prefix(prompts, sequence)


def mark_compared_positions(result, pattern, offset, multiplier, op, limit):
    """Write 1 to `result` where a position compares true with `limit`, else 0.

    The position is offset + pattern . index + multiplier * partition, and `op` compares, such as `nl.less`. `result` is
    a uint8 tile of 128 partitions in SBUF, `pattern` is that of `nisa.iota`, and `limit` is [128, 1] float32.
    """
    numbers = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=pattern, offset=offset, channel_multiplier=multiplier)
    nisa.tensor_scalar(dst=result, data=numbers, op0=op, operand0=limit)


def load_cached(prompts, head, first):
    """Load cached keys and values into `head.keys` and `head.values`, up to LOADED_BLOCKS blocks of 128 positions.

    The blocks begin at block `first` of the prefix. Keys of positions that are not valid become the first new key,
    which `head.keys` holds already. Their values become 0, and so does the last column of `head.values`, which is 1 for
    valid positions. Positions that pad the prefix to whole blocks count as not valid.
    """
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
    for piece in split_into_pieces(first * PARTITIONS, end):
        load_cached_piece(prompts, head, piece)


def load_cached_piece(prompts, head, piece):
    """Load a `Piece` of cached positions from HBM, and copy the valid ones to `head.keys` and `head.values` @ SBUF.

    A piece is a run of blocks of 128 positions, or one short block. Positions that are not valid keep what
    `load_cached` wrote there.
    """
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
    """Write new keys and values of a `BlockLoad` to the caches: blocks of `load.head` from new block `load.first` on.

    They are up to LOADED_BLOCKS blocks of 128 positions. The agenda calls it with the launch and the load.
    """
    prompts, first = launch.prompts, load.first
    end = min(prompts.new_keys, (first + LOADED_BLOCKS) * PARTITIONS)
    prompts.cache.store_prompt(prompts, load.head, first, end)
