"""Caches of latent attention: a row [latent | key] for each position, contiguous or in pages.

`latent_attention_decode` and `latent_keys_values` make one with `create_latent_cache`.

A sequence is loaded in *pieces* of some chunks of 128 positions. In the SBUF tile of a piece, partition p holds as
many neighbouring positions as the piece has chunks. From pages a partition gets them in *runs*: a run is as many
positions as a page and a partition have in common. W is the width of a row.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.pages import load_run_numbers
from nki_kernels.dma import COMPILER
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims, load, ranges

LOADED_TOGETHER = 2
"""Chunks that one DMA loads from a contiguous cache: transposes begin before all rows of an item are there."""


def create_latent_cache(rows, slots, block_tables):
    """Return `PagedLatents` if there are block_tables, else `ContiguousLatents`.

    Raises:
        AssertionError: only one of slots and block_tables is given, or a tensor has another number of axes.
    """
    assert (slots is None) == (block_tables is None), (
        "slots and block_tables come together: pass both for a paged cache, neither for a contiguous one"
    )
    if block_tables is None:
        expect_dims(3, rows, "cache [B, S, W]")
        return ContiguousLatents(rows)
    expect_dims(3, rows, "cache [pages, block, W]")
    expect_dims(2, block_tables, "block_tables [B, N]")
    return PagedLatents(rows, slots, block_tables)


class ContiguousLatents(nl.NKIObject):
    """Rows [B, S, W] in HBM, row b for sequence b. New positions that follow one another are written together.

    `block` is S, the number of positions that are neighbours in HBM.
    """

    def __init__(self, rows):
        self.rows = rows
        self.sequences, self.capacity, self.width = rows.shape
        self.block = self.capacity

    def check(self, tokens):
        """Do nothing: any number of tokens may be new."""

    def check_decode(self):
        """Do nothing: a decode step takes any number of positions."""

    def load_addresses(self, sizes):
        """Do nothing: addresses are known before the launch."""

    def load_item(self, item, piece):
        """Load a piece of a sequence from HBM into `item.stored` [partition, chunk, W] in SBUF, for a decode step.

        A chunk is 128 positions.

        Args:
            item: an `Item` of `latent.decode_items`.
            piece: (first position, chunks, positions of a chunk).
        """
        first, chunks, height = piece
        rows = self.rows[item.sequence, first : first + height * chunks, :].reshape_dim(0, (height, chunks))
        for start, end in ranges(0, chunks, LOADED_TOGETHER):
            nisa.dma_copy(dst=item.stored[:, start:end, :], src=rows[:, start:end, :])

    def load_cached(self, expansion, piece):
        """Load cached positions before a prompt from HBM into `piece.stored` [partition, chunk, W] in SBUF.

        A chunk is 128 positions.

        Args:
            expansion: the launch of latent_keys_values; it is not used here.
            piece: a `Piece` of `latent.prompt_pieces`.
        """
        source = self.rows[piece.sequence, piece.first : piece.end, :]
        nisa.dma_copy(dst=piece.stored, src=source.reshape_dim(0, (piece.height, piece.chunks)))

    def compute_new_addresses(self, positions):
        """Return the index of each new token's row in the cache, sequence * S + position: [T, 1] int32 in SBUF.

        Args:
            positions: [T, 1] int32 in HBM.
        """
        tokens, sequences = positions.shape[0], self.sequences
        if sequences == 1:
            return load(positions, nl.int32)
        row = nl.ndarray((1, sequences, tokens // sequences), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(dst=row, pattern=[[self.capacity, sequences], [0, tokens // sequences]])
        starts = nl.ndarray((tokens, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=starts, src=row)
        result = nl.ndarray((tokens, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=load(positions, nl.int32), data2=starts, op=nl.add)
        return result

    def compute_piece_addresses(self, expansion, piece, tokens, run):
        """Return the index in the cache of each row of a piece of new tokens, sequence * S + position.

        The result is [partition, chunk] int32 in SBUF. If `run` neighbours are written together, the columns at
        multiples of `run` are their first rows. A run must end within the capacity S, so positions beyond S - `run`
        are lowered to it. A chunk is 128 positions.

        Args:
            expansion: the launch of latent_keys_values.
            piece: a `Piece` of new tokens.
            tokens: (first, end) of the piece's tokens among all.
            run: number of neighbouring positions that are written together.
        """
        numbers = load_by_partition(expansion.positions, piece, tokens)
        last, start = float(self.capacity - run), float(piece.sequence * self.capacity)
        nisa.tensor_scalar(
            dst=numbers, data=numbers, op0=nl.minimum, operand0=last, op1=nl.add, operand1=start
        )
        return numbers


class PagedLatents(nl.NKIObject):
    """Rows in pages [P, block, W] in HBM, with slots [T, 1] of new tokens and page numbers [B, N] of the sequences.

    `block` is the number of positions of a page. `runs`: for each piece, see `load_addresses`.
    """

    def __init__(self, rows, slots, block_tables):
        self.rows, self.slots, self.block_tables = rows, slots, block_tables
        self.block, self.width = rows.shape[1], rows.shape[2]
        self.sequences, self.capacity = block_tables.shape[0], block_tables.shape[1] * self.block
        self.runs = []
        self.run_in_page = {}

    def check(self, tokens):
        """Raise AssertionError unless slots are [tokens, 1] and the positions of a page divide 128."""
        assert self.slots.shape == (tokens, 1), f"slots are [{tokens}, 1], not {self.slots.shape}"
        assert PARTITIONS % self.block == 0, (
            f"a page has 1, 2, 4 … {PARTITIONS} positions, not {self.block}; choose a divisor of {PARTITIONS}"
        )

    def check_decode(self):
        """Raise AssertionError unless the pages of a sequence hold a multiple of 128 positions."""
        assert self.capacity % PARTITIONS == 0, (
            f"the pages of a sequence hold a multiple of {PARTITIONS} positions, not {self.capacity}; "
            "widen block_tables"
        )

    def load_addresses(self, sizes):
        """Compute where the runs of each piece are in the cache and append a tile for each piece to `self.runs`.

        A tile is [128, run of the partition, sequence] int32 in SBUF. Its numbers count runs from the start of the
        cache. A run is neighbouring positions of one page that belong on one partition.

        Args:
            sizes: `Sizes` of `latent.sizes`, with the pieces.
        """
        for first, chunks, _ in sizes.pieces:
            start, run = first // self.block, min(chunks, self.block)
            tables = self.block_tables[:, start : start + chunks * PARTITIONS // self.block]
            self.runs.append(load_run_numbers(tables, self.block, run, chunks // run, COMPILER))

    def load_item(self, item, piece):
        """Load a piece of a sequence from pages in HBM into `item.stored` [partition, chunk, W] in SBUF.

        Each DMA brings one run of positions to every partition. Needs `load_addresses` before. A chunk is 128
        positions.

        Args:
            item: an `Item` of `latent.decode_items`.
            piece: not used here.
        """
        numbers = self.runs[item.piece]
        run = min(item.rows.shape[1], self.block)
        row = run * self.width
        flat = self.rows.reshape((self.rows.shape[0] * self.block // run, row))
        for i in range(numbers.shape[1]):
            source = flat.ap(
                pattern=[[row, PARTITIONS], [self.width, run], [1, self.width]],
                vector_offset=numbers[:, i, item.sequence : item.sequence + 1],
            )
            nisa.dma_copy(dst=item.stored[:, i * run : (i + 1) * run, :], src=source)

    def load_cached(self, expansion, piece):
        """Load cached positions before a prompt from pages into `piece.stored` [partition, chunk, W] in SBUF.

        Each DMA brings one run of positions to every partition. The addresses of the runs are computed here from the
        block table. A chunk is 128 positions.

        Args:
            expansion: the launch of latent_keys_values; it is not used here.
            piece: a `Piece` of `latent.prompt_pieces`.
        """
        run = min(piece.chunks, self.block)
        repeats = self.block // run
        first = piece.first // self.block
        used = blocks(piece.end - piece.first, self.block)
        table = self.block_tables[piece.sequence : piece.sequence + 1, :]
        pages = nl.ndarray((PARTITIONS, piece.chunks // run), dtype=nl.int32, buffer=nl.sbuf)
        if repeats > 1:
            source = table.ap(pattern=[[1, used], [0, repeats], [1, 1]], offset=first)
            nisa.dma_copy(dst=pages[0 : used * repeats, :], src=source)
            numbers = nl.ndarray((piece.height, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.scalar_tensor_tensor(
                dst=numbers,
                data=pages[0 : piece.height, :],
                op0=nl.multiply,
                operand0=float(repeats),
                op1=nl.add,
                operand1=self.find_runs_in_pages(repeats)[0 : piece.height, :],
            )
        else:
            numbers = pages[0 : piece.height, :]
            source = table[0, first : first + used].reshape_dim(0, (piece.height, used // piece.height))
            nisa.dma_copy(dst=numbers, src=source)
        row = run * self.width
        flat = self.rows.reshape((self.rows.shape[0] * repeats, row))
        for i in range(piece.chunks // run):
            source = flat.ap(
                pattern=[[row, piece.height], [self.width, run], [1, self.width]],
                vector_offset=numbers[:, i : i + 1],
            )
            nisa.dma_copy(dst=piece.stored[:, i * run : (i + 1) * run, :], src=source)

    def find_runs_in_pages(self, repeats):
        """Return p % `repeats` on partition p, [128, 1] int32 in SBUF: which run of its page the partition has.

        The tile is kept and returned again for the same `repeats`.

        Args:
            repeats: number of runs in a page, a power of two.
        """
        if repeats not in self.run_in_page:
            tile = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.iota(dst=tile, pattern=[[0, 1]], channel_multiplier=1)
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=repeats - 1)
            self.run_in_page[repeats] = tile
        return self.run_in_page[repeats]

    def compute_new_addresses(self, positions):
        """Return the index of each new token's row in the cache, its slot: [T, 1] int32 in SBUF.

        A slot is page * block + offset. `positions` is not used.
        """
        return load(self.slots, nl.int32)

    def compute_piece_addresses(self, expansion, piece, tokens, run):
        """Return the index in the cache of each row of a piece of new tokens, its slot: page * block + offset.

        The result is [partition, chunk] int32 in SBUF. A chunk is 128 positions.

        Args:
            expansion: the launch of latent_keys_values; it is not used here.
            piece: a `Piece` of new tokens.
            tokens: (first, end) of the piece's tokens among all.
            run: not used here.
        """
        return load_by_partition(self.slots, piece, tokens)


def load_by_partition(column, piece, tokens):
    """Load the numbers of a piece's tokens in the piece's layout: [partition, chunk] int32 in SBUF.

    A chunk is 128 positions.

    Args:
        column: a number of each token, [T, 1] int32 in HBM.
        tokens: (first, end) of the piece's tokens among all.
    """
    numbers = column[tokens[0] : tokens[1], :].reshape_dim(0, (piece.height, piece.chunks))
    return load(numbers[:, :, 0], nl.int32)
