"""Keys and values of every head from the latents of pieces: two products, and the order in which all is issued.

Each engine works in program order. So while a piece is multiplied, the next one is transposed, the one behind it
normalised, and so on, a chunk of each in turn: no engine waits for a step that another one has just been given.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.latent.output import load_columns
from nki_kernels.latent.prompt_pieces import (
    CHUNKS,
    EngineBalance,
    create_pieces,
    load_piece,
    measure,
    normalise,
    transpose,
)
from nki_kernels.latent.sizes import list_tile_ranges
from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, filled, load, on_every_row, ranges

GROUP_BYTES = 16384
"""Bytes per partition of one projection of a group of heads."""

TOGETHER = 4
"""Heads whose key projection one DMA loads, or whose keys one DMA stores."""

LOADED_AHEAD, MEASURED_AHEAD, NORMALISED_AHEAD = 4, 3, 2
"""How many pieces before its products one is loaded, measured and normalised; it is transposed one before."""


class Expansion(nl.NKIObject):
    """The arguments and sizes of a launch; `count` positions of each sequence are expanded.

    norm_row, eps_column: the norm's weight and eps on partitions, once they are loaded.
    """

    def __init__(self, kv, cache, positions, tables, projections, heads, prefix):
        self.kv, self.cache, self.positions, self.tables = kv, cache, positions, tables
        self.w_uk, self.w_uv = projections
        self.heads, self.prefix = heads, prefix
        self.norm_row, self.eps_column = None, None
        self.balance = EngineBalance()
        self.sequences, self.width = cache.sequences, cache.width
        self.dtype = kv.dtype
        self.item_bytes = 4 if self.dtype == nl.float32 else 2
        self.new = kv.shape[0] // self.sequences
        self.count = prefix + self.new
        self.rank = self.w_uk.shape[1]
        self.rope = self.width - self.rank
        self.plain, self.value = self.w_uk.shape[0] // heads, self.w_uv.shape[1] // heads
        self.depth = self.rope + self.plain
        self.latent_tiles = blocks(self.rank)
        head_bytes = self.latent_tiles * max(self.plain, self.value) * self.item_bytes
        self.groups = ranges(0, heads, max(1, min(heads, GROUP_BYTES // head_bytes)))

    def load_norm(self, norm):
        """Load the norm's weight and eps on as many partitions as a piece of new rows takes."""
        rows = min(self.new, PARTITIONS)
        self.eps_column = filled((rows, 1), norm.eps)
        self.norm_row = on_every_row(norm.weight, rows, self.dtype, 0.0)


class Product(nl.NKIObject):
    """A piece times the projections of some heads: where its keys and values go, and tiles on their way there.

    keys: [D, head, position], values: [partition, head, chunk, V] in HBM. plain: the plain elements of the keys of the
    heads at hand; value_rows: the values [partition, head, chunk, V].
    """

    def __init__(self, expansion, piece, group, keys, values):
        self.expansion, self.piece = expansion, piece
        self.heads = group[1] - group[0]
        self.keys = keys[piece.sequence, group[0] : group[1], :, piece.first : piece.end].permute((1, 0, 2))
        rows = values[piece.sequence, group[0] : group[1], piece.first : piece.end, :]
        self.values = rows.reshape_dim(1, (piece.height, piece.chunks)).permute((1, 0, 2, 3))
        self.plain = None
        shape = (piece.height, self.heads, piece.chunks, expansion.value)
        self.value_rows = nl.ndarray(shape, dtype=expansion.dtype, buffer=nl.sbuf)

    def multiply_keys(self, weights, turn):
        """Store a share of the keys: the rotated elements first, then the plain ones of some heads."""
        expansion, piece, heads = self.expansion, self.piece, self.heads
        count = piece.end - piece.first
        if turn == 0:
            rotated = piece.turned.reshape((expansion.rope, 1, count)).broadcast(1, heads)
            # All heads share the rotated elements, so one DMA repeats them for each head.
            nisa.dma_copy(dst=self.keys[0 : expansion.rope], src=rotated)
        for head in range(heads * turn // CHUNKS, heads * (turn + 1) // CHUNKS):
            first = head // TOGETHER * TOGETHER
            last = min(heads, first + TOGETHER)
            if head == first:
                shape = (expansion.plain, last - first, count)
                self.plain = nl.ndarray(shape, dtype=expansion.dtype, buffer=nl.sbuf)
            bank = nl.ndarray((expansion.plain, count), dtype=nl.float32, buffer=nl.psum)
            for begin, stop, height in list_tile_ranges(expansion.rank):
                for tile in range(begin, stop):
                    # Weights are stationary, so keys come as [element, position], as attention takes them.
                    nisa.nc_matmul(
                        dst=bank,
                        stationary=weights[0:height, tile, head, :],
                        moving=piece.latents[0:height, tile, :, :],
                        accumulate=tile > 0,
                    )
            expansion.balance.copy(self.plain[:, head - first, :], bank)
            if head + 1 == last:
                nisa.dma_copy(dst=self.keys[expansion.rope : expansion.depth, first:last, :], src=self.plain)

    def multiply_values(self, weights, chunk):
        """Compute the values of a chunk; those of all chunks are stored behind the last one."""
        expansion, piece = self.expansion, self.piece
        height, chunks = piece.height, piece.chunks
        if chunk >= chunks:
            return
        for first, last in ranges(0, self.heads, max(1, BANK // expansion.value)):
            bank = nl.ndarray((height, last - first, expansion.value), dtype=nl.float32, buffer=nl.psum)
            for begin, stop, tile_height in list_tile_ranges(expansion.rank):
                for tile in range(begin, stop):
                    # Latents are stationary, so values come with positions on the partitions, as rows of HBM.
                    nisa.nc_matmul(
                        dst=bank,
                        stationary=piece.latents[0:tile_height, tile, :, chunk],
                        moving=weights[0:tile_height, tile, first * expansion.value : last * expansion.value],
                        accumulate=tile > 0,
                    )
            expansion.balance.copy(self.value_rows[:, first:last, chunk, :], bank)
            if chunk + 1 == chunks:
                nisa.dma_copy(dst=self.values[:, first:last], src=self.value_rows[:, first:last])


def expand(expansion, keys, values):
    """Write the new rows of all sequences, and store keys [B, Hq, D, M] and values [B, Hq, M, V]."""
    if expansion.prefix > 0:
        write_new(expansion)
    pieces, products = [], []
    for sequence in range(expansion.sequences):
        capacity = expansion.cache.capacity
        sequence_pieces = create_pieces(
            expansion, sequence, 0, min(expansion.count, capacity), expansion.prefix == 0
        )
        sequence_pieces.extend(create_pieces(expansion, sequence, capacity, expansion.count, False))
        for group in expansion.groups:
            for piece in sequence_pieces:
                products.append((group, Product(expansion, piece, group, keys, values)))
        pieces.extend(sequence_pieces)
    weights, loaded = None, None
    for step in range(-LOADED_AHEAD, 0):
        prepare(expansion, pieces, step)
        if weights is None:
            # The first piece is loaded before the projections, as it is normalised and transposed before any product.
            weights, loaded = load_projections(expansion, expansion.groups[0]), expansion.groups[0]
        for chunk in range(CHUNKS):
            prepare_chunk(expansion, pieces, step, chunk)
    step = 0
    for group, product in products:
        if group != loaded:
            weights, loaded = load_projections(expansion, group), group
        first = group[0] == 0
        # Later groups of heads find the transposed latents of their pieces in SBUF.
        if first:
            prepare(expansion, pieces, step)
        for chunk in range(CHUNKS):
            if first:
                prepare_chunk(expansion, pieces, step, chunk)
            product.multiply_keys(weights[0], chunk)
            product.multiply_values(weights[1], chunk)
        if first:
            step += 1


def prepare(expansion, pieces, step):
    """Load the piece that is multiplied some steps later."""
    if step + LOADED_AHEAD < len(pieces):
        load_piece(expansion, pieces[step + LOADED_AHEAD])


def prepare_chunk(expansion, pieces, step, chunk):
    """Compute statistics of a chunk's pieces, normalise and transpose them for the products of the next steps."""
    if 0 <= step + MEASURED_AHEAD < len(pieces):
        measure(expansion, pieces[step + MEASURED_AHEAD], chunk)
    if 0 <= step + NORMALISED_AHEAD < len(pieces):
        normalise(expansion, pieces[step + NORMALISED_AHEAD], chunk)
    if 0 <= step + 1 < len(pieces):
        transpose(expansion, pieces[step + 1], chunk)


def write_new(expansion):
    """Write the rows of the new tokens of all sequences to the cache."""
    pieces = []
    for sequence in range(expansion.sequences):
        pieces.extend(create_pieces(expansion, sequence, 0, expansion.new, True))
    for index in range(len(pieces) + LOADED_AHEAD):
        if index < len(pieces):
            load_piece(expansion, pieces[index])
        if index >= LOADED_AHEAD:
            for chunk in range(CHUNKS):
                measure(expansion, pieces[index - LOADED_AHEAD], chunk)
            for chunk in range(CHUNKS):
                normalise(expansion, pieces[index - LOADED_AHEAD], chunk)


def load_projections(expansion, group):
    """Load both projections of some heads with latents on the partitions: [latent in tile, tile, column]."""
    first, last = group
    shape = (min(expansion.rank, PARTITIONS), expansion.latent_tiles, last - first, expansion.plain)
    keys = nl.ndarray(shape, dtype=expansion.dtype, buffer=nl.sbuf)
    rows = expansion.w_uk.reshape((expansion.heads, expansion.plain, expansion.rank))
    loaded = []
    for start, end in ranges(first, last, TOGETHER):
        tile = load(rows[start:end].permute((1, 0, 2)), expansion.w_uk.dtype)
        loaded.append(tile)
    values = load_columns(expansion.w_uv, first * expansion.value, last * expansion.value, expansion)
    for index in range(len(loaded)):
        tile = cast(loaded[index], expansion.dtype)
        for head in range(tile.shape[1]):
            for begin, stop, height in list_tile_ranges(expansion.rank):
                bank = nl.ndarray(
                    (height, stop - begin, expansion.plain), dtype=expansion.dtype, buffer=nl.psum
                )
                for d in range(begin, stop):
                    column = d * PARTITIONS
                    nisa.nc_transpose(dst=bank[:, d - begin, :], data=tile[:, head, column : column + height])
                expansion.balance.copy(keys[0:height, begin:stop, index * TOGETHER + head, :], bank)
    return keys, values
