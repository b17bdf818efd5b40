"""Keys and values of every head from the latents of pieces: two products, and the order in which all is issued.

`latent_keys_values` makes an `Expansion` and calls `expand`. A *piece* is up to 512 positions of a sequence in chunks
of 128, see `latent.prompt_pieces`.

Each engine works in program order. So while a piece is multiplied, the next one is transposed, the one after that
normalised, and so on, a chunk of each in turn. No engine waits for a step that another one has just been given.
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
from nki_kernels.tiles import BANK, PARTITIONS, blocks, broadcast_row, cast, filled, load, ranges

GROUP_BYTES = 16384
"""Bytes per partition of one projection of a group of heads."""

TOGETHER = 4
"""Heads whose key projection one DMA loads, or whose keys one DMA stores."""

LOADED_AHEAD, MEASURED_AHEAD, NORMALISED_AHEAD = 4, 3, 2
"""How many pieces before its products one is loaded, measured and normalised; it is transposed one piece before."""


class Expansion(nl.NKIObject):
    """The arguments and sizes of a launch of latent_keys_values; `count` positions of each sequence are expanded.

    `new`: new tokens of a sequence. `rank`, `rope`, `plain`, `value`: L, R, P and V, sizes of a latent, of a key's
    rotated and plain elements, and of a value. `groups`: ranges (first head, end) whose projections are in SBUF
    together. `balance`: work of the Vector and Scalar engines so far. norm_row, eps_column: the norm's weight and eps
    on partitions, None before `load_norm`. `scales`: `RowScales` of the cache, or None.
    """

    def __init__(self, kv, cache, positions, tables, projections, heads, prefix):
        self.kv, self.cache, self.positions, self.tables = kv, cache, positions, tables
        self.w_uk, self.w_uv = projections
        self.heads, self.prefix = heads, prefix
        self.norm_row, self.eps_column = None, None
        self.scales = None
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
        """Load the norm's weight and eps into SBUF, as `norm_row` [rows, L] and `eps_column` [rows, 1].

        `rows` is the number of partitions that a piece of new tokens takes, at most 128.
        """
        rows = min(self.new, PARTITIONS)
        self.eps_column = filled((rows, 1), norm.eps)
        self.norm_row = broadcast_row(norm.weight, rows, self.dtype, 0.0)

    def view_latent_scale(self, bank):
        """Return the scale of latents on the partitions of `bank`, [partitions, 1] in SBUF; None without scales."""
        return None if self.scales is None else self.scales.latent[0 : bank.shape[0], :]


class Product(nl.NKIObject):
    """A piece times the projections of a group of heads: where its keys and values go, and the SBUF tiles for them.

    keys: [D, head, position], values: [partition, head, chunk, V], views of HBM. plain: plain elements of the keys of
    up to TOGETHER heads, [P, head, position]. value_rows: values of the group [partition, head, chunk, V].
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
        """Compute and store in HBM the elements that are not rotated, of the keys of 1 / CHUNKS of the group's heads.

        They are stored after every TOGETHER-th head and after the last one. Turn 0 also stores the rotated elements,
        which all heads share.

        Args:
            weights: key projection of the group, [latent in tile, tile, head, P] in SBUF.
            turn: 0 … CHUNKS - 1, which heads.
        """
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
            expansion.balance.copy(self.plain[:, head - first, :], bank, expansion.view_latent_scale(bank))
            if head + 1 == last:
                nisa.dma_copy(dst=self.keys[expansion.rope : expansion.depth, first:last, :], src=self.plain)

    def multiply_values(self, weights, chunk):
        """Compute the values of one chunk of the piece for all heads of the group; do nothing beyond its last chunk.

        After the last chunk it stores the values of all chunks in HBM. A chunk is 128 positions.

        Args:
            weights: value projection of the group, [latent in tile, tile, head * V] in SBUF.
            chunk: number of the chunk.
        """
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
            rows = self.value_rows[:, first:last, chunk, :]
            expansion.balance.copy(rows, bank, expansion.view_latent_scale(bank))
            if chunk + 1 == chunks:
                nisa.dma_copy(dst=self.values[:, first:last], src=self.value_rows[:, first:last])


def expand(expansion, keys, values):
    """Write the new tokens' rows to the cache, and keys [B, Hq, D, M] and values [B, Hq, M, V] to HBM.

    With a prefix all new rows are written first, because the pieces are then loaded from the cache.

    Args:
        expansion: `Expansion`.
    """
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
    """Begin to load the piece that is multiplied LOADED_AHEAD steps after `step`, if there is one.

    Args:
        pieces: all pieces in the order of their products.
        step: index of the piece that is multiplied now; negative before the first.
    """
    if step + LOADED_AHEAD < len(pieces):
        load_piece(expansion, pieces[step + LOADED_AHEAD])


def prepare_chunk(expansion, pieces, step, chunk):
    """Do one chunk of the stages of the next pieces: sums of squares, normalisation, and transpose, one piece each.

    Pieces MEASURED_AHEAD, NORMALISED_AHEAD and 1 after `step` take part, if they exist. A chunk is 128 positions.

    Args:
        pieces: all pieces in the order of their products.
        step: index of the piece that is multiplied now; negative before the first.
        chunk: number of the chunk, 0 … CHUNKS - 1.
    """
    if 0 <= step + MEASURED_AHEAD < len(pieces):
        measure(expansion, pieces[step + MEASURED_AHEAD], chunk)
    if 0 <= step + NORMALISED_AHEAD < len(pieces):
        normalise(expansion, pieces[step + NORMALISED_AHEAD], chunk)
    if 0 <= step + 1 < len(pieces):
        transpose(expansion, pieces[step + 1], chunk)


def write_new(expansion):
    """Load the rows of all sequences' new tokens, normalise and rotate them, and write them to the cache in HBM."""
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
    """Load both projections of a group of heads into SBUF with latents on the partitions, in the activations' dtype.

    Returns:
        The key projection [latent in tile, tile, head, P], transposed on chip, and the value projection [latent in
        tile, tile, head * V].

    Args:
        expansion: `Expansion`.
        group: (first head, end).
    """
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
