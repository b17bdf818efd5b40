"""Blocks of new keys and values: whole blocks of 128 positions together, and a last short block."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.tiles import PARTITIONS, blocks

LOADED_BLOCKS = 8
"""Blocks of keys or values that one DMA brings: 256 KiB of a head of 128 dims in bfloat16."""


@dataclass
class Piece(nl.NKIObject):
    """`count` blocks of new positions from position `start` on, which have `used` positions each."""

    start: int
    count: int
    used: int


def pieces_of(start, end):
    """Return the pieces of the new positions start … end, of which `start` begins a block."""
    split = end // PARTITIONS * PARTITIONS
    pieces = []
    if split > start:
        pieces.append(Piece(start, (split - start) // PARTITIONS, PARTITIONS))
    if end > split:
        pieces.append(Piece(split, 1, end - split))
    return pieces


def loaded_pieces(prompts, first):
    """Return the pieces that one DMA brings, from block `first` on."""
    start = first * PARTITIONS
    return pieces_of(start, min(prompts.new_keys, start + LOADED_BLOCKS * PARTITIONS))


def new_pieces(prompts):
    """Return the pieces of all new positions, in the order in which they are loaded."""
    result = []
    for first in range(0, blocks(prompts.new_keys), LOADED_BLOCKS):
        result.extend(loaded_pieces(prompts, first))
    return result


def new_keys(prompts, head, depth_range, piece):
    """Return the tile of a piece of new keys of some tiles of D: [D in tile, block, tile, key]."""
    first, end, height = depth_range
    block = (prompts.prefix + piece.start) // PARTITIONS
    return head.keys[0:height, block : block + piece.count, first:end, 0 : piece.used]


def new_values(prompts, head, piece):
    """Return the tile of a piece of new values: [value, block, D]."""
    block = (prompts.prefix + piece.start) // PARTITIONS
    return head.values[0 : piece.used, block : block + piece.count, 0 : prompts.value_depth]


def new_rows(tensor, sequence, piece):
    """Return a piece's rows of new tokens [T, columns] in HBM: [position in block, block, column]."""
    first = sequence + piece.start
    rows = tensor[first : first + piece.count * piece.used]
    return rows.reshape_dim(0, (piece.count, piece.used)).permute((1, 0, 2))
