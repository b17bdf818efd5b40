"""Keys and values of one key/value head of one sequence in SBUF, as attention_prefill multiplies them.

Keys lie [d, block, tile of d, key]: a head of more than 128 dims is contracted in two to four tiles. Values lie
[key, block, Dv + 1]: the last column holds ones, so that the product with the weights of a softmax has their sum beside
it. Blocks have 128 keys. Blocks of cached positions come first, padded to full ones, then those of the new tokens.

Keys and values of padded tokens may be NaN or infinite. Those elements become 0, since a weight of 0 does not keep
them out of a product. The caches get what the products take.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import round_to_cache
from nki_kernels.prefill.key_blocks import (
    LOADED_BLOCKS,
    loaded_pieces,
    new_keys,
    new_pieces,
    new_rows,
    new_values,
)
from nki_kernels.tiles import PARTITIONS, blocks


class Head(nl.NKIObject):
    """A key/value head of a sequence with its tiles: keys [D in tile, block, tile, 128], values [128, block, Dv + 1].

    `first` is its first tile of queries. `cached` are the cached positions of its sequence, once they are found.
    """

    def __init__(self, prompts, sequence, number, first):
        self.sequence, self.number, self.first = sequence, number, first
        self.cached = None
        count = blocks(prompts.keys)
        shape = (prompts.tile_depth, count, prompts.depth_tiles, PARTITIONS)
        self.keys = nl.ndarray(shape, dtype=prompts.dtype, buffer=nl.sbuf)
        shape = (PARTITIONS, count, prompts.value_depth + 1)
        self.values = nl.ndarray(shape, dtype=prompts.dtype, buffer=nl.sbuf)
        nisa.memset(dst=self.values[:, :, prompts.value_depth : prompts.value_depth + 1], value=1.0)

    def take_cached(self, cached):
        """Take the cached positions of the head's sequence."""
        self.cached = cached


@dataclass
class BlockLoad(nl.NKIObject):
    """New keys and values of a head that one DMA brings, from block `first` of them on."""

    head: Head
    first: int


def place_keys(prompts, keys, source, factor=None):
    """Transpose keys [key, block, D] by DMA into [D in tile, block, tile, key], times a factor [128, 1] if any."""
    # One DMA transposes tiles of D of one height, so a shorter last tile takes a DMA of its own.
    for first, end, height in prompts.depth_ranges:
        start = first * prompts.tile_depth
        columns = source[:, :, start : start + (end - first) * height]
        tile = keys[0:height, :, first:end, :]
        nisa.dma_transpose(dst=tile, src=columns.reshape_dim(2, (end - first, height)))
        if factor is not None:
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor[0:height])


def load_new_keys(prompts, head):
    """Load the new keys of a head, LOADED_BLOCKS blocks at a time, transposed by DMA."""
    columns = prompts.k[:, head.number * prompts.depth : (head.number + 1) * prompts.depth]
    for piece in new_pieces(prompts):
        block = (prompts.prefix + piece.start) // PARTITIONS
        keys = head.keys[:, block : block + piece.count, :, 0 : piece.used]
        place_keys(prompts, keys, new_rows(columns, head.sequence * prompts.new_keys, piece))


def load_new_values(prompts, head):
    """Load the new values of a head, LOADED_BLOCKS blocks at a time."""
    columns = prompts.v[:, head.number * prompts.value_depth : (head.number + 1) * prompts.value_depth]
    for piece in new_pieces(prompts):
        rows = new_rows(columns, head.sequence * prompts.new_keys, piece)
        nisa.dma_copy(dst=new_values(prompts, head, piece), src=rows)


def clean_new_keys(prompts, head, engine):
    """Zero undefined rows of a head's new keys, one DMA load at a time, and round keys for a cache with scales."""
    inverses = None if prompts.scales is None else prompts.scales.inverse_keys
    for first in range(0, blocks(prompts.new_keys), LOADED_BLOCKS):
        for depth_range in prompts.depth_ranges:
            for piece in loaded_pieces(prompts, first):
                clean_new(prompts, new_keys(prompts, head, depth_range, piece), head, inverses, engine)


def clean_new_values(launch, load):
    """Zero undefined rows of one DMA load of values, and round them for a cache with scales; an agenda's step."""
    prompts, head = launch.prompts, load.head
    inverses = None if prompts.scales is None else prompts.scales.inverse_values
    for piece in loaded_pieces(prompts, load.first):
        clean_new(prompts, new_values(prompts, head, piece), head, inverses, nisa.engine.gpsimd)


def clean_new(prompts, tile, head, inverses, engine):
    """Set elements that are NaN or infinite to 0, and round new ones to a cache whose scales have `inverses` [128, Hk].

    0 * x == 0 tells finite elements. The bits of the tile, as integers, are multiplied by that 0 or 1: a product with
    the element itself would keep a NaN. 16-bit integers are exact in the float32 of the engines, 32-bit ones on GpSimd.
    `engine` multiplies those of 16 bits.
    """
    integer = nl.int16 if tile.dtype == nl.bfloat16 else nl.int32
    finite = nl.ndarray(tile.shape, dtype=integer, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=finite, data=tile, op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0)
    bits = tile.view(integer)
    engine = engine if integer == nl.int16 else nisa.engine.gpsimd
    nisa.tensor_tensor(dst=bits, data1=bits, data2=finite, op=nl.multiply, engine=engine)
    if inverses is not None and not prompts.stored:
        column = inverses[0 : tile.shape[0], head.number : head.number + 1]
        round_to_cache(tile, column, prompts.scales.dtype)
