"""First pieces of chunks of a ResidualProduct whose weight the Vector engine unpacks or scales, loaded ahead."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.projection.residual_product import (
    ResidualProduct,
    WeightPiece,
    count_chunk_columns,
    count_piece_blocks,
    load_piece,
)
from nki_kernels.weights import occupies_vector

MOST_STARTS_BYTES = 32768
"""Bytes per partition of first pieces of chunks that are loaded together."""


@dataclass
class ChunkStart(nl.NKIObject):
    """The first piece of a chunk, to be loaded ahead, because the Vector engine works on it, see `occupies_vector`.

    product: ResidualProduct. x_parts: its rows, see `compute_chunk`. first_column: the chunk's. piece: WeightPiece once
    `load` has run, else None.
    """

    product: ResidualProduct
    x_parts: list
    first_column: int
    piece: WeightPiece | None = None

    def load(self):
        """Load the piece, unless that is done."""
        if self.piece is None:
            weight, x = self.product.weight, self.x_parts[0]
            ranks = self.product.rank_sum.sequence_ranks
            end = self.first_column + count_chunk_columns(x.shape[2], ranks)
            columns = (self.first_column, min(self.product.y.shape[1], end))
            count = count_piece_blocks(weight, 0, columns[1] - columns[0], x)
            self.piece = load_piece(weight.matrices[0], weight, 0, count, columns, x)


@dataclass
class ChunkStarts(nl.NKIObject):
    """First pieces of several chunks that are loaded together, as far as MOST_STARTS_BYTES allow.

    starts: list of ChunkStart.
    """

    starts: list

    def load(self):
        """Load and unpack the pieces."""
        loaded_bytes = 0
        for start in self.starts:
            start.load()
            tile = start.piece.tiles[0]
            loaded_bytes += tile.shape[1] * tile.shape[2]
            if 2 * loaded_bytes > MOST_STARTS_BYTES:
                return


def plan_chunk_start(product, x_parts, first_column):
    """Return the ChunkStart of a chunk of a ResidualProduct; None if its weight is resident or needs no work ahead."""
    weight = product.weight
    if not occupies_vector(weight.matrices[0]) or weight.resident_tiles is not None:
        return None
    return ChunkStart(product, x_parts, first_column)
