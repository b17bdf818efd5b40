"""Pieces of new keys and values: whole blocks of 128 positions together, and a last short block."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.prefill.keys import LOADED_BLOCKS, row_range
from nki_kernels.tiles import PARTITIONS, blocks


@dataclass
class Piece(nl.NKIObject):
    """`count` blocks of new positions from position `start` on, which have `used` positions each."""

    start: int
    count: int
    used: int


def pieces_of(start, end):
    """Return the pieces of the new positions start … end."""
    split = end // PARTITIONS * PARTITIONS
    pieces = []
    if split > start:
        pieces.append(Piece(start, (split - start) // PARTITIONS, PARTITIONS))
    if end > split:
        pieces.append(Piece(split, 1, end - split))
    return pieces


def new_pieces(case):
    """Return the pieces of all new positions, in the order in which they are loaded."""
    result = []
    for first in range(0, blocks(case.new_keys), LOADED_BLOCKS):
        start, end = row_range(case, first)
        result.extend(pieces_of(start, end))
    return result


def new_keys(case, head, part, piece):
    """Return the tile of a piece of new keys of some parts of D: [part of D, block, part, key]."""
    first_part, end, height = part
    block = (case.prefix + piece.start) // PARTITIONS
    return head.keys[0:height, block : block + piece.count, first_part:end, 0 : piece.used]


def new_values(case, head, piece):
    """Return the tile of a piece of new values: [value, block, D]."""
    block = (case.prefix + piece.start) // PARTITIONS
    return head.values[0 : piece.used, block : block + piece.count, 0 : case.value_depth]
