"""Keys and values of every head from the latents of pieces: two products, and the order in which all is issued.

Each engine works in program order. So while a piece is multiplied, the next one is transposed, the one behind it
normalised, and so on, a chunk of each in turn: no engine waits for a step that another one has just been given.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.latent.output import load_columns
from nki_kernels.latent.pieces import CHUNKS, bring, empty, measure, normalise, pieces_between, transpose
from nki_kernels.latent.sizes import heights
from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, ranges

GROUP_BYTES = 16384
"""Bytes per partition of one projection of a group of heads."""

TOGETHER = 4
"""Heads whose key projection one DMA loads, or whose keys one DMA stores."""

LOADED_AHEAD, MEASURED_AHEAD, NORMALISED_AHEAD = 4, 3, 2
"""How many pieces before its products one is loaded, measured and normalised; it is transposed one before."""


class Expansion(nl.NKIObject):
    """The arguments and sizes of a launch; `count` positions of each sequence are expanded."""

    def __init__(self, kv, cache, positions, tables, projections, heads, prefix):
        self.kv, self.cache, self.positions, self.tables = kv, cache, positions, tables
        self.w_uk, self.w_uv = projections
        self.heads, self.prefix = heads, prefix
        self.norm = None
        self.sequences, self.width = cache.sequences, cache.width
        self.dtype = kv.dtype
        self.item_bytes = 4 if self.dtype == nl.float32 else 2
        self.new = kv.shape[0] // self.sequences
        self.count = prefix + self.new
        self.rank = self.w_uk.shape[1]
        self.rope = self.width - self.rank
        self.plain, self.value = self.w_uk.shape[0] // heads, self.w_uv.shape[1] // heads
        self.depth = self.rope + self.plain
        self.parts = blocks(self.rank)
        each = self.parts * max(self.plain, self.value) * self.item_bytes
        self.groups = ranges(0, heads, max(1, min(heads, GROUP_BYTES // each)))
        self.by_vector, self.by_scalar = 0, 0


class Product(nl.NKIObject):
    """A piece times the projections of some heads: where its keys and values go, and tiles on their way there."""

    def __init__(self, case, piece, group, keys, values):
        self.piece = piece
        self.heads = group[1] - group[0]
        own = keys[piece.sequence, group[0] : group[1], :, piece.first : piece.end]
        self.keys = own.permute((1, 0, 2))
        own = values[piece.sequence, group[0] : group[1], piece.first : piece.end, :]
        self.values = own.reshape_dim(1, (piece.height, piece.chunks)).permute((1, 0, 2, 3))
        self.plain, self.rows = None, None


def expand(case, keys, values):
    """Write the new rows of all sequences, and store keys [B, Hq, D, M] and values [B, Hq, M, V]."""
    if case.prefix > 0:
        write_new(case)
    pieces, products = [], []
    for sequence in range(case.sequences):
        own = pieces_between(sequence, 0, min(case.count, case.cache.capacity), case.prefix == 0)
        for behind in pieces_between(sequence, case.cache.capacity, case.count, False):
            own.append(behind)
        for group in case.groups:
            for piece in own:
                products.append((group, Product(case, piece, group, keys, values)))
        for piece in own:
            pieces.append(piece)
    weights, loaded = None, None
    for step in range(-LOADED_AHEAD, 0):
        prepare(case, pieces, step)
        if weights is None:
            weights, loaded = load_projections(case, case.groups[0]), case.groups[0]
        for chunk in range(CHUNKS):
            prepare_chunk(case, pieces, step, chunk)
    step = 0
    for group, product in products:
        if group != loaded:
            weights, loaded = load_projections(case, group), group
        first = group[0] == 0
        if first:
            prepare(case, pieces, step)
        for chunk in range(CHUNKS):
            if first:
                prepare_chunk(case, pieces, step, chunk)
            multiply_keys(case, product, weights[0], chunk)
            multiply_values(case, product, weights[1], chunk)
        if first:
            step += 1


def prepare(case, pieces, step):
    """Load the piece that is multiplied some steps later."""
    if step + LOADED_AHEAD < len(pieces):
        bring(case, pieces[step + LOADED_AHEAD])


def prepare_chunk(case, pieces, step, chunk):
    """Measure, normalise and transpose a chunk of the pieces that are multiplied in the next steps."""
    if 0 <= step + MEASURED_AHEAD < len(pieces):
        measure(case, pieces[step + MEASURED_AHEAD], chunk)
    if 0 <= step + NORMALISED_AHEAD < len(pieces):
        normalise(case, pieces[step + NORMALISED_AHEAD], chunk)
    if 0 <= step + 1 < len(pieces):
        transpose(case, pieces[step + 1], chunk)


def write_new(case):
    """Write the rows of the new tokens of all sequences to the cache."""
    pieces = []
    for sequence in range(case.sequences):
        for piece in pieces_between(sequence, 0, case.new, True):
            pieces.append(piece)
    for number in range(len(pieces) + LOADED_AHEAD):
        if number < len(pieces):
            bring(case, pieces[number])
        if number >= LOADED_AHEAD:
            for chunk in range(CHUNKS):
                measure(case, pieces[number - LOADED_AHEAD], chunk)
            for chunk in range(CHUNKS):
                normalise(case, pieces[number - LOADED_AHEAD], chunk)


def load_projections(case, group):
    """Both projections of some heads with latents on the partitions: [latent in part, part, column]."""
    first, last = group
    shape = (min(case.rank, PARTITIONS), case.parts, last - first, case.plain)
    keys = nl.ndarray(shape, dtype=case.dtype, buffer=nl.sbuf)
    rows = case.w_uk.reshape((case.heads, case.plain, case.rank))
    loaded = []
    for start, end in ranges(first, last, TOGETHER):
        tile = nl.ndarray((case.plain, end - start, case.rank), dtype=case.w_uk.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=rows[start:end].permute((1, 0, 2)))
        loaded.append(tile)
    values = load_columns(case.w_uv, first * case.value, last * case.value, case)
    for number in range(len(loaded)):
        tile = cast(loaded[number], case.dtype)
        for at in range(tile.shape[1]):
            for begin, stop, height in heights(case.rank):
                bank = nl.ndarray((height, stop - begin, case.plain), dtype=case.dtype, buffer=nl.psum)
                for part in range(begin, stop):
                    column = part * PARTITIONS
                    nisa.nc_transpose(
                        dst=bank[:, part - begin, :], data=tile[:, at, column : column + height]
                    )
                empty(case, keys[0:height, begin:stop, number * TOGETHER + at, :], bank)
    return keys, values


def multiply_keys(case, product, weights, turn):
    """Store a share of the keys [D, head, position]: the rotated part first, then the plain one of some heads."""
    piece, heads = product.piece, product.heads
    count = piece.end - piece.first
    if turn == 0:
        rotated = piece.turned.reshape((case.rope, 1, count)).broadcast(1, heads)
        nisa.dma_copy(dst=product.keys[0 : case.rope], src=rotated)
    for head in range(heads * turn // CHUNKS, heads * (turn + 1) // CHUNKS):
        first = head // TOGETHER * TOGETHER
        last = min(heads, first + TOGETHER)
        if head == first:
            product.plain = nl.ndarray((case.plain, last - first, count), dtype=case.dtype, buffer=nl.sbuf)
        bank = nl.ndarray((case.plain, count), dtype=nl.float32, buffer=nl.psum)
        for begin, stop, height in heights(case.rank):
            for part in range(begin, stop):
                nisa.nc_matmul(
                    dst=bank,
                    stationary=weights[0:height, part, head, :],
                    moving=piece.latents[0:height, part, :, :],
                    accumulate=part > 0,
                )
        empty(case, product.plain[:, head - first, :], bank)
        if head + 1 == last:
            nisa.dma_copy(dst=product.keys[case.rope : case.depth, first:last, :], src=product.plain)


def multiply_values(case, product, weights, chunk):
    """The values of a chunk [partition, head, chunk, V]; those of the whole piece are stored behind the last one."""
    piece, heads = product.piece, product.heads
    height, chunks = piece.height, piece.chunks
    if chunk >= chunks:
        return
    if chunk == 0:
        shape = (height, heads, chunks, case.value)
        product.rows = nl.ndarray(shape, dtype=case.dtype, buffer=nl.sbuf)
    for first, last in ranges(0, heads, max(1, BANK // case.value)):
        bank = nl.ndarray((height, last - first, case.value), dtype=nl.float32, buffer=nl.psum)
        for begin, stop, part_height in heights(case.rank):
            for part in range(begin, stop):
                nisa.nc_matmul(
                    dst=bank,
                    stationary=piece.latents[0:part_height, part, :, chunk],
                    moving=weights[0:part_height, part, first * case.value : last * case.value],
                    accumulate=part > 0,
                )
        empty(case, product.rows[:, first:last, chunk, :], bank)
        if chunk + 1 == chunks:
            nisa.dma_copy(dst=product.values[:, first:last], src=product.rows[:, first:last])
