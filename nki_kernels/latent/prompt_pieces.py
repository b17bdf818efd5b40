"""Pieces of a sequence on their way from rows to latents: loaded, normalised, written to the cache, transposed.

A piece is up to 512 positions. Partition p holds as many neighbouring ones as the piece has chunks of 128, so what is
loaded or stored of a partition lies together in HBM.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.latent import load_by_partition
from nki_kernels.latent.sizes import divide_into_pieces, list_tile_ranges
from nki_kernels.norms.norm import inverse_root
from nki_kernels.norms.row_tiles import sum_rows
from nki_kernels.tiles import PARTITIONS

CHUNKS = 4
"""Chunks of 128 positions in a piece: keys of a piece fill a PSUM bank."""

VECTOR_COST, SCALAR_COST = 5, 4
"""Of an element, in comparison: the Scalar engine is a quarter faster."""


class EngineBalance(nl.NKIObject):
    """Elements that the Vector and the Scalar engine have worked on so far."""

    def __init__(self):
        self.by_vector, self.by_scalar = 0, 0

    def count_vector(self, elements):
        """Count elements of a partition that the Vector engine works on."""
        self.by_vector += elements

    def count_scalar(self, elements):
        """Count elements of a partition that the Scalar engine works on."""
        self.by_scalar += elements

    def copy(self, target, bank):
        """Copy a PSUM tile to SBUF: on that of the two engines which is behind in work."""
        elements = 1
        for size in target.shape[1:]:
            elements = elements * size
        if self.by_vector * VECTOR_COST <= self.by_scalar * SCALAR_COST:
            nisa.tensor_copy(dst=target, src=bank, engine=nisa.engine.vector)
            self.count_vector(elements)
        else:
            nisa.activation(dst=target, op=nl.copy, data=bank)
            self.count_scalar(elements)


class Piece(nl.NKIObject):
    """Positions first … end of a sequence, with tiles for them; a new one comes from kv, another from the cache.

    rows, cache_rows: [partition, chunk, W], as they come and as the cache has them; None behind the end of the cache.
    squares, scale: of new rows, the sum of the squares of each, and 1 / rms. latents: [latent in tile, tile, partition,
    chunk], and turned, the rotated keys: [R, partition, chunk], from `bank`; both in the order of positions.
    """

    def __init__(self, expansion, sequence, first, chunks, height, new):
        self.sequence, self.first, self.chunks, self.height = sequence, first, chunks, height
        self.end = first + chunks * height
        self.new = new
        self.angles = []
        shape = (height, chunks, expansion.width)
        self.rows, self.cache_rows, self.squares, self.scale = None, None, None, None
        if new or first < expansion.cache.capacity:
            self.rows = nl.ndarray(shape, dtype=expansion.dtype, buffer=nl.sbuf)
            self.cache_rows = self.rows
        if new:
            self.cache_rows = nl.ndarray(shape, dtype=expansion.dtype, buffer=nl.sbuf)
            self.squares = nl.ndarray((height, chunks), dtype=nl.float32, buffer=nl.sbuf)
            self.scale = nl.ndarray((height, chunks), dtype=nl.float32, buffer=nl.sbuf)
            for table in expansion.tables:
                shape = (height, chunks, table.shape[1])
                self.angles.append(nl.ndarray(shape, dtype=table.dtype, buffer=nl.sbuf))
        shape = (min(expansion.rank, PARTITIONS), expansion.latent_tiles, height, chunks)
        self.latents = nl.ndarray(shape, dtype=expansion.dtype, buffer=nl.sbuf)
        self.turned = nl.ndarray((expansion.rope, height, chunks), dtype=expansion.dtype, buffer=nl.sbuf)
        self.bank = nl.ndarray((expansion.rope, chunks, height), dtype=expansion.dtype, buffer=nl.psum)


def create_pieces(expansion, sequence, first, end, new):
    """Return the pieces of positions first … end of a sequence."""
    result = []
    for start, chunks, height in divide_into_pieces(end - first, CHUNKS):
        result.append(Piece(expansion, sequence, first + start, chunks, height, new))
    return result


def view_by_partition(rows, piece):
    """Return rows [position, .] of HBM that a piece is made of, as [partition, chunk, .]."""
    return rows.reshape_dim(0, (piece.height, piece.chunks))


def load_piece(expansion, piece):
    """Load the rows of a piece, and of a new one the angles; behind the cache there are none."""
    if not piece.new:
        if piece.rows is not None:
            expansion.cache.load_cached(expansion, piece)
        return
    first = piece.sequence * expansion.new + piece.first
    tokens = (first, first + piece.end - piece.first)
    nisa.dma_copy(dst=piece.rows, src=view_by_partition(expansion.kv[tokens[0] : tokens[1], :], piece))
    numbers = None
    for i in range(len(expansion.tables)):
        table, angles = expansion.tables[i], piece.angles[i]
        # Without a prefix positions count from 0, so angles are consecutive rows of the table, which no indices name.
        if expansion.prefix == 0 and expansion.new <= table.shape[0]:
            nisa.dma_copy(dst=angles, src=view_by_partition(table[piece.first : piece.end, :], piece))
        else:
            if numbers is None:
                numbers = load_by_partition(expansion.positions, piece, tokens)
            half = table.shape[1]
            for chunk in range(piece.chunks):
                pattern = [[half, piece.height], [1, half]]
                source = table.ap(pattern=pattern, vector_offset=numbers[:, chunk : chunk + 1])
                nisa.dma_copy(dst=angles[:, chunk, :], src=source)


def measure(expansion, piece, chunk):
    """Sum the squares of a chunk of a new piece; behind the last one find the inverse root mean squares of all."""
    if not piece.new or chunk >= piece.chunks:
        return
    rank = expansion.rank
    squared = nl.ndarray((piece.height, rank), dtype=expansion.dtype, buffer=nl.sbuf)
    sum_rows(piece.squares[:, chunk : chunk + 1], nl.square, piece.rows[:, chunk, 0:rank], None, squared)
    expansion.balance.count_scalar(rank)
    if chunk + 1 == piece.chunks:
        inverse_root(piece.squares, 1.0 / rank, expansion.eps_column, piece.scale)


def normalise(expansion, piece, chunk):
    """Scale the latents of a chunk of a new piece; behind the last one rotate its keys, and write all to the cache."""
    if not piece.new or chunk >= piece.chunks:
        return
    rank = expansion.rank
    nisa.scalar_tensor_tensor(
        dst=piece.cache_rows[:, chunk, 0:rank],
        data=piece.rows[:, chunk, 0:rank],
        op0=nl.multiply,
        operand0=piece.scale[:, chunk : chunk + 1],
        op1=nl.multiply,
        operand1=expansion.norm_row[0 : piece.height, :],
    )
    expansion.balance.count_vector(rank)
    if chunk + 1 == piece.chunks:
        rotate_keys(
            piece.cache_rows[:, :, rank : expansion.width],
            piece.rows[:, :, rank : expansion.width],
            piece.angles,
        )
        expansion.balance.count_vector(3 * piece.chunks * expansion.rope)
        write(expansion, piece)


def rotate_keys(result, tile, angles):
    """Rotate keys [partition, chunk, R] by angles (cos, sin) [partition, chunk, R/2]."""
    height, chunks, rope = tile.shape
    half = rope // 2
    halves = tile.reshape_dim(2, (2, half))
    turned = []
    for table in angles:
        product = nl.ndarray((height, chunks, 2, half), dtype=nl.float32, buffer=nl.sbuf)
        for_both = table.expand_dim(2).broadcast(2, 2)
        nisa.tensor_tensor(dst=product, data1=halves, data2=for_both, op=nl.multiply)
        turned.append(product)
    by_cos, by_sin = turned
    nisa.tensor_tensor(
        dst=result[:, :, 0:half], data1=by_cos[:, :, 0, :], data2=by_sin[:, :, 1, :], op=nl.subtract
    )
    nisa.tensor_tensor(
        dst=result[:, :, half:rope], data1=by_cos[:, :, 1, :], data2=by_sin[:, :, 0, :], op=nl.add
    )


def write(expansion, piece):
    """Write the rows of a piece to the cache: where slots say, or by sequence and position.

    Without a prefix a sequence begins at position 0, so neighbours that share a page lie together in it.
    """
    first = piece.sequence * expansion.new + piece.first
    rows = expansion.cache.rows
    run = min(piece.chunks, expansion.cache.block) if expansion.prefix == 0 else 1
    numbers = expansion.cache.compute_piece_addresses(
        expansion, piece, (first, first + piece.end - piece.first), run
    )
    flat = rows.reshape((rows.shape[0] * rows.shape[1], expansion.width))
    for chunk in range(0, piece.chunks, run):
        target = flat.ap(
            pattern=[[expansion.width, piece.height], [expansion.width, run], [1, expansion.width]],
            vector_offset=numbers[:, chunk : chunk + 1],
        )
        nisa.dma_copy(dst=target, src=piece.cache_rows[:, chunk : chunk + run, :])


def transpose(expansion, piece, chunk):
    """Transpose a chunk of a piece; zeros behind the end of a cache."""
    if chunk >= piece.chunks:
        return
    height, chunks = piece.height, piece.chunks
    if piece.rows is None:
        if chunk == 0:
            nisa.memset(dst=piece.latents, value=0.0)
            nisa.memset(dst=piece.turned, value=0.0)
        return
    rows = piece.cache_rows[:, chunk, :]
    for start, end, tile_height in list_tile_ranges(expansion.rank):
        bank = nl.ndarray((tile_height, end - start, height), dtype=expansion.dtype, buffer=nl.psum)
        for tile in range(start, end):
            column = tile * PARTITIONS
            nisa.nc_transpose(dst=bank[:, tile - start, :], data=rows[:, column : column + tile_height])
        expansion.balance.copy(piece.latents[0:tile_height, start:end, :, chunk], bank)
    # The keys of all chunks share a PSUM tile, so that one copy evicts them.
    nisa.nc_transpose(dst=piece.bank[:, chunk, :], data=rows[:, expansion.rank : expansion.width])
    if chunk + 1 == chunks:
        expansion.balance.copy(piece.turned, piece.bank.permute((0, 2, 1)))
