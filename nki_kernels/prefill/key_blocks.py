"""Blocks of new keys and values: whole blocks of 128 positions together, and a last short block.

A *piece* is a run of blocks of equal length, as one instruction takes them: whole blocks, or the one short block behind
them. `prefill.keys` and the caches load and store new keys and values piece by piece. Positions of new tokens count
from the first new token of a sequence; blocks in SBUF count from the first cached position, so new ones follow the
prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.tiles import PARTITIONS, ranges

LOADED_BLOCKS = 8
"""Blocks of keys or values that one DMA brings: 256 KiB of a head of 128 dims in bfloat16."""


@dataclass
class Piece(nl.NKIObject):
    """`count` consecutive blocks of positions from position `start` on, a multiple of 128; each has `used` positions.

    `used` is 128 for a piece of whole blocks, or less for a piece of one short block, the last one of a sequence.
    """

    start: int
    count: int
    used: int


def split_into_pieces(start, end):
    """Return positions start … end - 1 as a list of `Piece`: one of all whole blocks, then one of a short last block.

    Blocks have 128 positions, and `start` is a multiple of 128. Either piece is missing if it is empty.
    """
    split = end // PARTITIONS * PARTITIONS
    pieces = []
    if split > start:
        pieces.append(Piece(start, (split - start) // PARTITIONS, PARTITIONS))
    if end > split:
        pieces.append(Piece(split, 1, end - split))
    return pieces


def list_loaded_pieces(prompts, first):
    """Return the `Piece` list of one DMA load: up to LOADED_BLOCKS blocks of new positions from block `first` on.

    `first` counts blocks of 128 positions from the first new token of a sequence.
    """
    start = first * PARTITIONS
    return split_into_pieces(start, min(prompts.new_keys, start + LOADED_BLOCKS * PARTITIONS))


def list_new_pieces(prompts):
    """Return all new positions of a sequence as a list of `Piece`, ascending, LOADED_BLOCKS blocks of 128 at a time."""
    return list_pieces(prompts.new_keys)


def list_pieces(positions):
    """Return `positions` positions from 0 on as a list of `Piece`, ascending, LOADED_BLOCKS blocks of 128 at a time."""
    pieces = []
    for start, end in ranges(0, positions, LOADED_BLOCKS * PARTITIONS):
        pieces.extend(split_into_pieces(start, end))
    return pieces


def view_new_keys(prompts, head, depth_range, piece):
    """View the new keys of a `Piece` in `head.keys`: [D in tile, block, tile of D, key] @ SBUF.

    `depth_range` is (first, end, height): the tiles first … end - 1 of D, which have `height` elements each.
    """
    first, end, height = depth_range
    block = (prompts.prefix + piece.start) // PARTITIONS
    return head.keys[0:height, block : block + piece.count, first:end, 0 : piece.used]


def view_new_values(prompts, head, piece):
    """View the new values of a `Piece` in `head.values` @ SBUF: [position in block, block, Dv], without the ones."""
    block = (prompts.prefix + piece.start) // PARTITIONS
    return head.values[0 : piece.used, block : block + piece.count, 0 : prompts.value_depth]


def view_new_rows(tensor, first_row, piece):
    """View the rows of a `Piece` in a tensor [T, columns] @ HBM as [position in block, block, column].

    `first_row` is the row of the sequence's first new token.
    """
    first = first_row + piece.start
    rows = tensor[first : first + piece.count * piece.used]
    return rows.reshape_dim(0, (piece.count, piece.used)).permute((1, 0, 2))
