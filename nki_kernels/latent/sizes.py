"""Sizes of latent attention in a decode step, and the pieces into which a sequence is divided.

`latent_attention_decode` makes a `Sizes`. `latent.expansion` divides its sequences with the functions below too. A
*chunk* is 128 positions; a *piece* is some chunks of a sequence that are loaded and scored together.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import choose_cache_operand
from nki_kernels.tiles import BANK, PARTITIONS, blocks

PIECE_BYTES = 9216
"""Bytes per partition that the rows of a piece may take: 8 chunks of 576 elements in bfloat16."""

LOADED_AHEAD = 2
"""Number of pieces that are loaded before the one whose rows are transposed."""

FEW_CHUNKS = 8
"""Number of chunks in a piece below which the products of one other piece do not hide its exponentials."""


class Sizes(nl.NKIObject):
    """Dimensions of a launch of latent_attention_decode, and the tile sizes that follow from them.

    `rank`, `rope`, `plain`, `value`: L, R, P and V. `new`: new tokens of a sequence; `queries`: new * heads.
    `score_rows`: elements that are scored beside the latent, R and a mask for each new token. `stride`: queries
    padded to a power of two. `stored`: dtype of the cache; `operand`: in which products take its rows. `pieces`: see
    `divide_into_pieces`; `most`: chunks of the longest. `ahead`, `behind`: steps by which loads precede the transposes
    of an item, and products follow them.
    """

    def __init__(self, q, cache, w_uk, w_uv):
        self.tokens, self.dtype = q.shape[0], q.dtype
        self.stored = cache.rows.dtype
        self.operand = choose_cache_operand(self.stored, self.dtype)
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
    """Return the pieces (first position, chunks, positions of a chunk) of a sequence of `capacity` positions, in order.

    A piece has a power of two of chunks, at most `most`. What remains below 128 positions is a piece of one shorter
    chunk. Partition p of a piece holds as many consecutive positions as the piece has chunks.
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
    """Return ranges of the tiles of a latent with equal heights: (first tile, end, height).

    All tiles of 128 elements make one range; what remains of `rank` elements is a tile of its own.
    """
    full = rank // PARTITIONS
    result = []
    if full > 0:
        result.append((0, full, PARTITIONS))
    if rank > full * PARTITIONS:
        result.append((full, full + 1, rank - full * PARTITIONS))
    return result


def generate_key_positions(sizes):
    """Return the position of the row on each partition of each chunk: [128, chunks of all pieces] float32 in SBUF.

    In a piece that begins at position f and has n chunks, partition p of chunk c has position f + p * n + c. A chunk
    is 128 positions.
    """
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
