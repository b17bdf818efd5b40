"""Pieces of a sequence on their way from rows to latents: loaded, normalised, written to the cache, transposed.

A piece is up to 512 positions. Partition p holds as many neighbouring ones as the piece has chunks of 128, so what is
loaded or stored of a partition lies together in HBM.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.latent import load_by_partition
from nki_kernels.latent.sizes import heights, pieces_of
from nki_kernels.tiles import PARTITIONS

CHUNKS = 4
"""Chunks of 128 positions in a piece: keys of a piece fill a PSUM bank."""

VECTOR_COST, SCALAR_COST = 5, 4
"""Of an element, in comparison: the Scalar engine is a quarter faster."""


class Piece(nl.NKIObject):
    """Positions first … end of a sequence, and their tiles; a new one comes from kv, another from the cache."""

    def __init__(self, sequence, first, chunks, height, new):
        self.sequence, self.first, self.chunks, self.height = sequence, first, chunks, height
        self.end = first + chunks * height
        self.new = new
        self.rows, self.angles, self.squares, self.scale, self.normalised = None, None, None, None, None
        self.bank, self.latents, self.turned = None, None, None


def pieces_between(sequence, first, end, new):
    """The pieces of positions first … end of a sequence."""
    result = []
    for start, chunks, height in pieces_of(end - first, CHUNKS):
        result.append(Piece(sequence, first + start, chunks, height, new))
    return result


def by_partition(rows, piece):
    """Rows [position, .] of HBM that a piece is made of, as [partition, chunk, .]."""
    return rows.reshape_dim(0, (piece.height, piece.chunks))


def bring(case, piece):
    """Load the rows of a piece [partition, chunk, W], and of a new one the angles; behind the cache there are none."""
    if not piece.new and piece.first >= case.cache.capacity:
        return
    piece.rows = nl.ndarray((piece.height, piece.chunks, case.width), dtype=case.dtype, buffer=nl.sbuf)
    if not piece.new:
        case.cache.load_cached(case, piece)
        return
    first = piece.sequence * case.new + piece.first
    tokens = (first, first + piece.end - piece.first)
    nisa.dma_copy(dst=piece.rows, src=by_partition(case.kv[tokens[0] : tokens[1], :], piece))
    piece.angles = []
    numbers = None
    for table in case.tables:
        shape = (piece.height, piece.chunks, table.shape[1])
        if case.prefix == 0 and case.new <= table.shape[0]:
            tile = nl.ndarray(shape, dtype=table.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=tile, src=by_partition(table[piece.first : piece.end, :], piece))
        else:
            if numbers is None:
                numbers = load_by_partition(case.positions, piece, tokens)
            tile = nl.ndarray(shape, dtype=table.dtype, buffer=nl.sbuf)
            for chunk in range(piece.chunks):
                gather_into(tile[:, chunk, :], table, numbers[:, chunk : chunk + 1])
        piece.angles.append(tile)


def gather_into(tile, table, numbers):
    """Rows of a table [S, half] in HBM by number: [rows, half]."""
    rows, half = tile.shape
    nisa.dma_copy(dst=tile, src=table.ap(pattern=[[half, rows], [1, half]], vector_offset=numbers))


def measure(case, piece, chunk):
    """The squares of a chunk of a new piece, summed; behind the last one the inverse root mean squares of all."""
    if not piece.new or chunk >= piece.chunks:
        return
    rank = case.rank
    if chunk == 0:
        piece.squares = nl.ndarray((piece.height, piece.chunks), dtype=nl.float32, buffer=nl.sbuf)
    squared = nl.ndarray((piece.height, rank), dtype=case.dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=squared,
        op=nl.square,
        data=piece.rows[:, chunk, 0:rank],
        reduce_op=nl.add,
        reduce_res=piece.squares[:, chunk : chunk + 1],
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    case.by_scalar += rank
    if chunk + 1 == piece.chunks:
        eps = case.norm[1][0 : piece.height, :]
        piece.scale = nl.ndarray(piece.squares.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=piece.scale, op=nl.rsqrt, data=piece.squares, scale=1.0 / rank, bias=eps)


def normalise(case, piece, chunk):
    """Scale the latents of a chunk of a new piece; behind the last one rotate its keys, and write all to the cache."""
    if not piece.new or chunk >= piece.chunks:
        return
    rank = case.rank
    if chunk == 0:
        piece.normalised = nl.ndarray(piece.rows.shape, dtype=case.dtype, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=piece.normalised[:, chunk, 0:rank],
        data=piece.rows[:, chunk, 0:rank],
        op0=nl.multiply,
        operand0=piece.scale[:, chunk : chunk + 1],
        op1=nl.multiply,
        operand1=case.norm[0][0 : piece.height, :],
    )
    case.by_vector += rank
    if chunk + 1 == piece.chunks:
        keys = piece.rows[:, :, rank : case.width]
        turn(piece.normalised[:, :, rank : case.width], keys, piece.angles)
        case.by_vector += 3 * piece.chunks * case.rope
        piece.rows = piece.normalised
        write(case, piece)


def turn(result, tile, angles):
    """Rotate keys [partition, chunk, R] by angles (cos, sin) [partition, chunk, R/2]."""
    height, chunks, rope = tile.shape
    half = rope // 2
    halves = tile.reshape_dim(2, (2, half))
    turned = []
    for each in angles:
        product = nl.ndarray((height, chunks, 2, half), dtype=nl.float32, buffer=nl.sbuf)
        for_both = each.expand_dim(2).broadcast(2, 2)
        nisa.tensor_tensor(dst=product, data1=halves, data2=for_both, op=nl.multiply)
        turned.append(product)
    by_cos, by_sin = turned
    nisa.tensor_tensor(
        dst=result[:, :, 0:half], data1=by_cos[:, :, 0, :], data2=by_sin[:, :, 1, :], op=nl.subtract
    )
    nisa.tensor_tensor(
        dst=result[:, :, half:rope], data1=by_cos[:, :, 1, :], data2=by_sin[:, :, 0, :], op=nl.add
    )


def write(case, piece):
    """Write the rows of a piece to the cache: where slots say, or by sequence and position.

    Without a prefix a sequence begins at position 0, so neighbours that share a page lie together in it.
    """
    first = piece.sequence * case.new + piece.first
    rows = case.cache.rows
    run = min(piece.chunks, case.cache.block) if case.prefix == 0 else 1
    numbers = case.cache.piece_addresses(case, piece, (first, first + piece.end - piece.first), run)
    flat = rows.reshape((rows.shape[0] * rows.shape[1], case.width))
    for chunk in range(0, piece.chunks, run):
        target = flat.ap(
            pattern=[[case.width, piece.height], [case.width, run], [1, case.width]],
            vector_offset=numbers[:, chunk : chunk + 1],
        )
        nisa.dma_copy(dst=target, src=piece.rows[:, chunk : chunk + run, :])


def transpose(case, piece, chunk):
    """Transpose a chunk of a piece, whose tiles are then in the order of positions; zeros behind the end of a cache.

    latents: [latent in part, part, partition, chunk]; turned, the rotated keys: [R, partition, chunk].
    """
    if chunk >= piece.chunks:
        return
    height, chunks = piece.height, piece.chunks
    if chunk == 0:
        shape = (min(case.rank, PARTITIONS), case.parts, height, chunks)
        piece.latents = nl.ndarray(shape, dtype=case.dtype, buffer=nl.sbuf)
        piece.turned = nl.ndarray((case.rope, height, chunks), dtype=case.dtype, buffer=nl.sbuf)
        piece.bank = nl.ndarray((case.rope, chunks, height), dtype=case.dtype, buffer=nl.psum)
        if piece.rows is None:
            nisa.memset(dst=piece.latents, value=0.0)
            nisa.memset(dst=piece.turned, value=0.0)
    if piece.rows is None:
        return
    for start, end, part_height in heights(case.rank):
        bank = nl.ndarray((part_height, end - start, height), dtype=case.dtype, buffer=nl.psum)
        for part in range(start, end):
            column = part * PARTITIONS
            rows = piece.rows[:, chunk, column : column + part_height]
            nisa.nc_transpose(dst=bank[:, part - start, :], data=rows)
        empty(case, piece.latents[0:part_height, start:end, :, chunk], bank)
    nisa.nc_transpose(dst=piece.bank[:, chunk, :], data=piece.rows[:, chunk, case.rank : case.width])
    if chunk + 1 == chunks:
        empty(case, piece.turned, piece.bank.permute((0, 2, 1)))


def empty(case, target, bank):
    """Copy a PSUM tile to SBUF: on that of the Vector and the Scalar engine which is behind in work."""
    elements = 1
    for size in target.shape[1:]:
        elements = elements * size
    if case.by_vector * VECTOR_COST <= case.by_scalar * SCALAR_COST:
        nisa.tensor_copy(dst=target, src=bank, engine=nisa.engine.vector)
        case.by_vector += elements
    else:
        nisa.activation(dst=target, op=nl.copy, data=bank)
        case.by_scalar += elements
