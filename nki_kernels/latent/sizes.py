"""What shapes the loops of latent attention in a decode step: sizes, and the pieces of a sequence."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, PARTITIONS, blocks

PIECE_BYTES = 9216
"""Bytes per partition of the rows of a piece: 8 chunks of 576 elements in bfloat16."""

LOADED_AHEAD = 2
"""Pieces that are loaded before the one whose rows are transposed."""

FEW_CHUNKS = 8
"""Chunks of a piece below which its exponentials take longer than the products of one other piece hide."""


class Sizes(nl.NKIObject):
    """The dimensions of a launch, and the tile sizes that follow from them."""

    def __init__(self, q, cache, w_uk, w_uv):
        self.tokens, self.dtype = q.shape[0], q.dtype
        self.sequences, self.capacity = cache.sequences, cache.capacity
        self.rank, self.width = w_uk.shape[1], cache.width
        self.rope = self.width - self.rank
        self.heads = (q.shape[1] - w_uk.shape[0]) // self.rope
        self.plain = w_uk.shape[0] // self.heads
        self.value = w_uv.shape[1] // self.heads
        self.new = self.tokens // self.sequences
        self.queries = self.new * self.heads
        self.latent_tiles = blocks(self.rank)
        # What is scored beside the latent: the rotated key, and the mask of each new token.
        self.score_rows = self.rope + self.new
        # Chunks of a power of two queries do not straddle PSUM banks.
        self.stride = 1
        while self.stride < self.queries:
            self.stride = 2 * self.stride
        size = 4 if self.dtype == nl.float32 else 2
        row_bytes = self.width * size
        self.query_bytes = self.latent_tiles * self.tokens * self.heads * size
        self.most = 1
        while 2 * self.most * self.stride <= BANK and 2 * self.most * row_bytes <= PIECE_BYTES:
            self.most = 2 * self.most
        self.pieces = divide_into_pieces(self.capacity, self.most)
        self.most = self.pieces[0][1]
        self.behind = 2 if self.most >= FEW_CHUNKS else 3
        self.ahead = LOADED_AHEAD
        self.buffers = self.ahead + self.behind + 1


def divide_into_pieces(capacity, most):
    """Return the pieces (first position, chunks, positions of a chunk) of a sequence.

    Partition p of a piece holds so many consecutive positions as it has chunks, a power of two of them; what is left
    of the capacity is a chunk of its own.
    """
    result = []
    first = 0
    chunks = most
    while chunks > 0:
        while capacity - first >= chunks * PARTITIONS:
            result.append((first, chunks, PARTITIONS))
            first += chunks * PARTITIONS
        chunks = chunks // 2
    if capacity > first:
        result.append((first, 1, capacity - first))
    return result


def list_tile_ranges(rank):
    """Return ranges of tiles of the latent with equal heights: (first tile, end, height)."""
    full = rank // PARTITIONS
    result = []
    if full > 0:
        result.append((0, full, PARTITIONS))
    if rank > full * PARTITIONS:
        result.append((full, full + 1, rank - full * PARTITIONS))
    return result


def generate_key_positions(sizes):
    """Return the position of the row on each partition of each chunk of all pieces: [128, chunks] float32."""
    count = 0
    for _, chunks, _ in sizes.pieces:
        count += chunks
    result = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
    chunk = 0
    for first, chunks, _ in sizes.pieces:
        nisa.iota(
            dst=result[:, chunk : chunk + chunks],
            pattern=[[1, chunks]],
            offset=first,
            channel_multiplier=chunks,
        )
        chunk += chunks
    return result
