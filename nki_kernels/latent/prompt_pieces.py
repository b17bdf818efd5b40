"""Pieces of a sequence of latent_keys_values in SBUF: loaded, normalised, written to the cache, transposed.

`latent.expansion` calls these stages. A piece is up to 512 positions of one sequence, in chunks of 128. Partition p
holds as many neighbouring positions as the piece has chunks, so that what is loaded or stored of a partition is
contiguous in HBM.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.latent import load_by_partition
from nki_kernels.latent.sizes import divide_into_pieces, list_tile_ranges
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.norms.row_tiles import sum_rows
from nki_kernels.tiles import PARTITIONS, cast

CHUNKS = 4
"""Chunks of 128 positions in a piece: keys of a piece fill a PSUM bank."""

VECTOR_COST, SCALAR_COST = 5, 4
"""Relative costs of an element on the Vector and the Scalar engine: the Scalar engine is a quarter faster."""


class EngineBalance(nl.NKIObject):
    """Numbers of elements per partition that the Vector and the Scalar engine have worked on so far."""

    def __init__(self):
        self.by_vector, self.by_scalar = 0, 0

    def count_vector(self, elements):
        """Add `elements`, a number of elements per partition, to the work of the Vector engine."""
        self.by_vector += elements

    def count_scalar(self, elements):
        """Add `elements`, a number of elements per partition, to the work of the Scalar engine."""
        self.by_scalar += elements

    def copy(self, target, bank, scale=None):
        """Copy a tile in PSUM or SBUF to `target` in SBUF on the engine with less work so far, and count it.

        Args:
            target: SBUF tile.
            bank: the tile that is copied.
            scale: [partitions, 1] float32 in SBUF, which multiplies each element, or None.
        """
        elements = 1
        for size in target.shape[1:]:
            elements = elements * size
        if self.by_vector * VECTOR_COST <= self.by_scalar * SCALAR_COST:
            if scale is None:
                nisa.tensor_copy(dst=target, src=bank, engine=nisa.engine.vector)
            else:
                nisa.tensor_scalar(
                    dst=target, data=bank, op0=nl.multiply, operand0=scale, engine=nisa.engine.vector
                )
            self.count_vector(elements)
        else:
            nisa.activation(dst=target, op=nl.copy, data=bank, scale=1.0 if scale is None else scale)
            self.count_scalar(elements)


class Piece(nl.NKIObject):
    """Positions `first` … `end` - 1 of a sequence, with SBUF tiles; a new piece comes from kv, others from the cache.

    rows, cache_rows: [partition, chunk, W], as loaded and as the cache has them; None beyond the end of the cache.
    stored: of cached rows, in the dtype of the cache.
    angles: of new rows, cosines and sines [partition, chunk, R/2]. squares, scale: of new rows, sums of squares and 1
    / rms, [partition, chunk] float32.

    latents: transposed, [latent in tile, tile, partition, chunk]. turned: transposed rotated keys, [R, partition,
    chunk], copied from the PSUM tile `bank`. Both are in the order of positions.
    """

    def __init__(self, expansion, sequence, first, chunks, height, new):
        self.sequence, self.first, self.chunks, self.height = sequence, first, chunks, height
        self.end = first + chunks * height
        self.new = new
        self.angles = []
        shape = (height, chunks, expansion.width)
        self.rows, self.cache_rows, self.squares, self.scale, self.stored = None, None, None, None, None
        if new or first < expansion.cache.capacity:
            self.rows = nl.ndarray(shape, dtype=expansion.dtype, buffer=nl.sbuf)
            self.cache_rows = self.rows
            self.stored = self.rows
            if not new and expansion.cache.rows.dtype != expansion.dtype:
                self.stored = nl.ndarray(shape, dtype=expansion.cache.rows.dtype, buffer=nl.sbuf)
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
    """Return the `Piece`s that cover positions `first` … `end` - 1 of a sequence, with their tiles.

    Args:
        new: whether the rows are those of new tokens.
    """
    result = []
    for start, chunks, height in divide_into_pieces(end - first, CHUNKS):
        result.append(Piece(expansion, sequence, first + start, chunks, height, new))
    return result


def view_by_partition(rows, piece):
    """Return a view [partition, chunk, .] of a piece's rows [position, .] in HBM.

    A chunk is 128 positions.
    """
    return rows.reshape_dim(0, (piece.height, piece.chunks))


def load_piece(expansion, piece):
    """Load the rows of a piece into `piece.rows`, and the angles of a new piece into `piece.angles`.

    Does nothing for a piece beyond the end of the cache.
    """
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
    """Write the sums of squares of one chunk's latents to `piece.squares`, in SBUF.

    After the last chunk it also writes 1 / rms of all rows to `piece.scale`. Does nothing for a piece that is not
    new, or beyond its last chunk. A chunk is 128 positions.
    """
    if not piece.new or chunk >= piece.chunks:
        return
    rank = expansion.rank
    squared = nl.ndarray((piece.height, rank), dtype=expansion.dtype, buffer=nl.sbuf)
    sum_rows(piece.squares[:, chunk : chunk + 1], nl.square, piece.rows[:, chunk, 0:rank], None, squared)
    expansion.balance.count_scalar(rank)
    if chunk + 1 == piece.chunks:
        compute_inverse_root(piece.squares, 1.0 / rank, expansion.eps_column, piece.scale)


def normalise(expansion, piece, chunk):
    """Write the normalised latents of one chunk to `piece.cache_rows`.

    After the last chunk it also rotates the keys of all chunks and writes the piece to the cache in HBM. Does nothing
    for a piece that is not new, or beyond its last chunk. A chunk is 128 positions.
    """
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
    if expansion.scales is not None:
        expansion.scales.round_latents(piece.cache_rows[:, chunk, 0:rank])
        expansion.balance.count_vector(3 * rank)
    if chunk + 1 == piece.chunks:
        rotate_keys(
            piece.cache_rows[:, :, rank : expansion.width],
            piece.rows[:, :, rank : expansion.width],
            piece.angles,
        )
        expansion.balance.count_vector(3 * piece.chunks * expansion.rope)
        if expansion.scales is not None:
            expansion.scales.round_keys(piece.cache_rows[:, :, rank : expansion.width])
            expansion.balance.count_vector(3 * piece.chunks * expansion.rope)
        write(expansion, piece)


def rotate_keys(result, tile, angles):
    """Write keys `tile` [partition, chunk, R], rotated half-split by `angles`, to `result` of the same shape, in SBUF.

    A chunk is 128 positions.

    Args:
        angles: cosines and sines, [partition, chunk, R/2] each.
    """
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
    """Write `piece.cache_rows` to the cache in HBM, at the addresses of `compute_piece_addresses` of the cache.

    Without a prefix a sequence begins at position 0. So neighbours that share a page, or the cache of a sequence, are
    written together.
    """
    first = piece.sequence * expansion.new + piece.first
    rows = expansion.cache.rows
    run = min(piece.chunks, expansion.cache.block) if expansion.prefix == 0 else 1
    numbers = expansion.cache.compute_piece_addresses(
        expansion, piece, (first, first + piece.end - piece.first), run
    )
    flat = rows.reshape((rows.shape[0] * rows.shape[1], expansion.width))
    written = cast(piece.cache_rows, rows.dtype)
    for chunk in range(0, piece.chunks, run):
        target = flat.ap(
            pattern=[[expansion.width, piece.height], [expansion.width, run], [1, expansion.width]],
            vector_offset=numbers[:, chunk : chunk + 1],
        )
        nisa.dma_copy(dst=target, src=written[:, chunk : chunk + run, :])


def transpose(expansion, piece, chunk):
    """Transpose one chunk's latents to `piece.latents`, and after the last chunk all keys to `piece.turned`, in SBUF.

    A piece beyond the end of the cache gets zeros. Does nothing beyond the last chunk. A chunk is 128 positions.
    """
    if chunk >= piece.chunks:
        return
    height, chunks = piece.height, piece.chunks
    if piece.rows is None:
        if chunk == 0:
            nisa.memset(dst=piece.latents, value=0.0)
            nisa.memset(dst=piece.turned, value=0.0)
        return
    rows = piece.cache_rows[:, chunk, :]
    if not piece.new and piece.stored.dtype != rows.dtype:
        expansion.balance.copy(rows, piece.stored[:, chunk, :])
    for start, end, tile_height in list_tile_ranges(expansion.rank):
        bank = nl.ndarray((tile_height, end - start, height), dtype=expansion.dtype, buffer=nl.psum)
        for tile in range(start, end):
            column = tile * PARTITIONS
            nisa.nc_transpose(dst=bank[:, tile - start, :], data=rows[:, column : column + tile_height])
        expansion.balance.copy(piece.latents[0:tile_height, start:end, :, chunk], bank)
    # The keys of all chunks share a PSUM tile, so that one copy evicts them.
    nisa.nc_transpose(dst=piece.bank[:, chunk, :], data=rows[:, expansion.rank : expansion.width])
    if chunk + 1 == chunks:
        scale = None if expansion.scales is None else expansion.scales.key[0 : expansion.rope, :]
        expansion.balance.copy(piece.turned, piece.bank.permute((0, 2, 1)), scale)
