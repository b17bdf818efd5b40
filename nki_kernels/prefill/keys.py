"""Keys and values of one key/value head of one sequence in SBUF, as attention_prefill multiplies them.

Keys lie [d, block, tile of d, key]: a head of more than 128 dims is contracted in two to four tiles. Values lie [key,
block, Dv + 1]: the last column holds ones, so that the product with the weights of a softmax has their sum beside it.
Blocks have 128 keys. Blocks of cached positions come first, padded to full ones, then those of the new tokens. A *load*
brings LOADED_BLOCKS blocks of new keys or values by DMA.

Keys and values of padded tokens may be NaN or infinite. *Cleaning* sets those elements to 0, since a weight of 0 does
not keep them out of a product. The caches get what the products take.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.nibble_pages import compute_scales, invert_scales, round_to_steps
from nki_kernels.cache.scales import round_to_cache
from nki_kernels.prefill.key_blocks import (
    LOADED_BLOCKS,
    list_loaded_pieces,
    list_pieces,
    view_new_keys,
    view_new_rows,
    view_new_values,
)
from nki_kernels.tiles import PARTITIONS, blocks


class Head(nl.NKIObject):
    """Keys and values of a key/value head of a sequence in SBUF, allocated here and loaded by other functions.

    `keys` are [D in tile, block, tile of D, 128], `values` [128, block, Dv + 1]. The last column of values is set to
    ones here, and the values of a gap between streams to 0. `number` is the index of the key/value head, and `first`
    the index of the first tile of queries that uses it. `cached` is None until `take_cached`. `lengths` are the
    `KeyLengths` of the sequence, or None. `window` are the terms of the head's biases, see `PositionBias`, or None
    until `take_window`.
    """

    def __init__(self, prompts, sequence, number, first, lengths=None):
        self.sequence, self.number, self.first = sequence, number, first
        self.cached, self.lengths, self.window = None, lengths, None
        count = blocks(prompts.keys)
        shape = (prompts.tile_depth, count, prompts.depth_tiles, PARTITIONS)
        self.keys = nl.ndarray(shape, dtype=prompts.dtype, buffer=nl.sbuf)
        shape = (PARTITIONS, count, prompts.value_depth + 1)
        self.values = nl.ndarray(shape, dtype=prompts.dtype, buffer=nl.sbuf)
        ones = self.values[:, :, prompts.value_depth : prompts.value_depth + 1]
        nisa.memset(dst=ones, value=1.0, engine=nisa.engine.gpsimd)
        used = prompts.keys % PARTITIONS
        if prompts.step.bounded and used > 0:
            # One matmul and one exp take the whole last block; products leave out what follows its keys.
            nisa.memset(dst=self.keys[:, count - 1, :, used:], value=0.0, engine=nisa.engine.gpsimd)
        if prompts.gap > 0:
            block = prompts.new_keys // PARTITIONS
            nisa.memset(dst=self.values[:, block, :], value=0.0)
            nisa.memset(dst=ones[0 : PARTITIONS - prompts.gap, block, :], value=1.0)

    def take_cached(self, cached):
        """Set `cached`, the valid cached positions of the head's sequence."""
        self.cached = cached

    def take_window(self, window):
        """Set `window`, the terms of the head's biases by relative position."""
        self.window = window


@dataclass
class BlockLoad(nl.NKIObject):
    """New keys and values of a head that one DMA load brings: up to LOADED_BLOCKS blocks, from new block `first` on."""

    head: Head
    first: int


def transpose_into_blocks(prompts, keys, source, factor=None):
    """Transpose rows `source` [key, block, D] @ HBM by DMA into `keys` [D in tile, block, tile of D, key] @ SBUF.

    If a factor [128, 1] float32 is passed, `keys` are then multiplied by it.
    """
    # One DMA transposes tiles of D of one height, so a shorter last tile takes a DMA of its own.
    for first, end, height in prompts.depth_ranges:
        start = first * prompts.tile_depth
        columns = source[:, :, start : start + (end - first) * height]
        tile = keys[0:height, :, first:end, :]
        nisa.dma_transpose(dst=tile, src=columns.reshape_dim(2, (end - first, height)))
        if factor is not None:
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor[0:height])


def load_new_keys(prompts, head):
    """Load all new keys of a `Head` from k of each stream @ HBM into `head.keys` @ SBUF, transposed by DMA."""
    for stream in prompts.streams:
        columns = stream.k[:, head.number * prompts.depth : (head.number + 1) * prompts.depth]
        for piece in list_pieces(stream.new_keys):
            block = (prompts.prefix + stream.first_key + piece.start) // PARTITIONS
            keys = head.keys[:, block : block + piece.count, :, 0 : piece.used]
            transpose_into_blocks(
                prompts, keys, view_new_rows(columns, head.sequence * stream.new_keys, piece)
            )


def load_new_values(prompts, head):
    """Load all new values of a `Head` from v of each stream @ HBM into `head.values` @ SBUF; its last column stays."""
    depth = prompts.value_depth
    for stream in prompts.streams:
        columns = stream.v[:, head.number * depth : (head.number + 1) * depth]
        for piece in list_pieces(stream.new_keys):
            block = (prompts.prefix + stream.first_key + piece.start) // PARTITIONS
            values = head.values[0 : piece.used, block : block + piece.count, 0:depth]
            rows = view_new_rows(columns, head.sequence * stream.new_keys, piece)
            nisa.dma_copy(dst=values, src=rows)


def fill_gap(prompts, head):
    """Write the first key to the keys that pad the first stream of a `Head`, in `head.keys` @ SBUF.

    They change no maximum then, and `Head` has 0 for their values.
    """
    used = PARTITIONS - prompts.gap
    block = prompts.new_keys // PARTITIONS
    for tile in range(prompts.depth_tiles):
        height = prompts.heights[tile]
        # GpSimd fills the keys, because the Vector engine passes over every score of other tiles.
        nisa.tensor_copy(
            dst=head.keys[0:height, block, tile, used:PARTITIONS],
            src=head.keys[0:height, 0, tile, 0:1].broadcast(1, prompts.gap),
            engine=nisa.engine.gpsimd,
        )


def clean_new_keys(prompts, head, engine):
    """Set NaN and infinite elements of all new keys in `head.keys` to 0, in place.

    If the cache has scales and the launch writes it, the keys are rounded as the cache rounds them. For `engine` see
    `clean_tile`.
    """
    inverses = None if prompts.scales is None else prompts.scales.inverse_keys
    for first in range(0, blocks(prompts.new_keys), LOADED_BLOCKS):
        for depth_range in prompts.depth_ranges:
            for piece in list_loaded_pieces(prompts, first):
                tile = view_new_keys(prompts, head, depth_range, piece)
                clean_tile(prompts, tile, head, inverses, engine)
                if prompts.rounded_keys > 0:
                    round_new_keys(prompts, head, tile[:, :, 0, :], piece)


def clean_new_values(launch, load):
    """Set NaN and infinite elements of the new values of one `BlockLoad` in `head.values` to 0, in place.

    If the cache has scales and the launch writes it, the values are rounded as the cache rounds them. The agenda calls
    it with the launch and the load.
    """
    prompts, head = launch.prompts, load.head
    inverses = None if prompts.scales is None else prompts.scales.inverse_values
    for piece in list_loaded_pieces(prompts, load.first):
        tile = view_new_values(prompts, head, piece)
        clean_tile(prompts, tile, head, inverses, nisa.engine.gpsimd)
        if prompts.rounded_keys > 0:
            round_new_values(prompts, head, tile, piece)


def round_new_keys(prompts, head, tile, piece):
    """Write the new keys of a `Piece`, as full pages of 4 bits store them, to the rounded keys in `head.keys`.

    Keys of a page that is not full are left out, because no later token reads them.

    Args:
        tile: the new keys, [D, block, position] in SBUF.
    """
    page = prompts.page
    used = piece.used // page * page
    if used == 0:
        return
    pages = (used // page, page)
    groups = tile[:, :, 0:used].reshape_dim(2, pages)
    block = (prompts.cached_keys + piece.start) // PARTITIONS
    target = head.keys[0 : tile.shape[0], block : block + piece.count, 0, 0:used].reshape_dim(2, pages)
    write_rounded(target, groups, compute_scales(groups, nl.bfloat16), page)


def round_new_values(prompts, head, tile, piece):
    """Write the new values of a `Piece`, as full pages of 4 bits store them, to the rounded values in `head.values`.

    Args:
        tile: the new values, [position, block, D] in SBUF.
    """
    block = (prompts.cached_keys + piece.start) // PARTITIONS
    depth = prompts.value_depth
    target = head.values[0 : tile.shape[0], block : block + piece.count, 0:depth]
    write_rounded(target, tile, compute_scales(tile, nl.float32), depth)


def write_rounded(target, groups, scales, size):
    """Write numbers rounded to 4 bits, times their scales, to `target` in SBUF.

    Args:
        target: tile of the shape of `groups`.
        groups: numbers in SBUF, whose last axis has the `size` numbers of a group.
        scales: scale of each group, in SBUF.
    """
    axis = len(groups.shape) - 1
    steps = round_to_steps(groups, invert_scales(scales).expand_dim(axis).broadcast(axis, size))
    nisa.tensor_tensor(
        dst=target, data1=steps, data2=scales.expand_dim(axis).broadcast(axis, size), op=nl.multiply
    )


def clean_tile(prompts, tile, head, inverses, engine):
    """Set NaN and infinite elements of a tile of new keys or values of `head` to 0, in place.

    Args:
        inverses: 1 / scale of each head, [128, Hk] float32, or None. With them elements are rounded to what the cache
            stores, unless it holds the new keys and values already.
        engine: see `zero_not_finite`.
    """
    zero_not_finite(tile, engine)
    if inverses is not None and not prompts.stored:
        column = inverses[0 : tile.shape[0], head.number : head.number + 1]
        round_to_cache(tile, column, prompts.scales.dtype)


def zero_not_finite(tile, engine):
    """Set NaN and infinite elements of a tile in SBUF to 0, in place.

    0 * x == 0 tells finite elements. The bits of the tile, as integers, are multiplied by that 0 or 1: a product with
    the element itself would keep a NaN. 16-bit integers are exact in the float32 of the engines, 32-bit ones on GpSimd.

    Args:
        engine: multiplies the bits of a bfloat16 tile; GpSimd multiplies those of a float32 tile.
    """
    integer = nl.int16 if tile.dtype == nl.bfloat16 else nl.int32
    finite = nl.ndarray(tile.shape, dtype=integer, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=finite, data=tile, op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0)
    bits = tile.view(integer)
    engine = engine if integer == nl.int16 else nisa.engine.gpsimd
    nisa.tensor_tensor(dst=bits, data1=bits, data2=finite, op=nl.multiply, engine=engine)
