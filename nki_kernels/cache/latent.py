"""Caches of latent attention: a row [latent | key] for each position, contiguous or in pages.

Partition p of a tile of rows holds as many neighbouring positions as the tile has chunks of 128. From pages it gets
them in *runs*, as many positions as a page and a partition have in common.
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
    """Return the cache of a launch; refuse arguments that do not fit together."""
    assert (slots is None) == (block_tables is None), "slots and block_tables come together"
    if block_tables is None:
        expect_dims(3, rows, "cache [B, S, W]")
        return ContiguousLatents(rows)
    expect_dims(3, rows, "cache [pages, block, W]")
    expect_dims(2, block_tables, "block_tables [B, N]")
    return PagedLatents(rows, slots, block_tables)


class ContiguousLatents(nl.NKIObject):
    """Rows [B, S, W]: row b holds sequence b. Positions that follow each other are written together."""

    def __init__(self, rows):
        self.rows = rows
        self.sequences, self.capacity, self.width = rows.shape
        self.block = self.capacity

    def check(self, tokens):
        """Refuse nothing: any number of tokens may be new."""

    def check_decode(self):
        """Refuse nothing: a decode step takes any number of positions."""

    def load_addresses(self, sizes):
        """Do nothing: addresses are known before the launch."""

    def load_item(self, item, piece):
        """Load the rows of an item of a decode step: a piece (first position, chunks, positions of a chunk)."""
        first, chunks, height = piece
        rows = self.rows[item.sequence, first : first + height * chunks, :].reshape_dim(0, (height, chunks))
        for start, end in ranges(0, chunks, LOADED_TOGETHER):
            nisa.dma_copy(dst=item.rows[:, start:end, :], src=rows[:, start:end, :])

    def load_cached(self, case, piece):
        """Load the rows of a piece of a prefix."""
        source = self.rows[piece.sequence, piece.first : piece.end, :]
        nisa.dma_copy(dst=piece.rows, src=source.reshape_dim(0, (piece.height, piece.chunks)))

    def compute_new_addresses(self, positions):
        """Return the rows of the cache that take the new tokens, [T, 1] int32: sequence * capacity + position."""
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

    def compute_piece_addresses(self, case, piece, tokens, run):
        """Return the rows of the cache that take the new tokens of a piece, [partition, chunk] int32.

        tokens: the first one and the end. A run of neighbours is written together, so it begins before the capacity.
        """
        numbers = load_by_partition(case.positions, piece, tokens)
        last, start = float(self.capacity - run), float(piece.sequence * self.capacity)
        nisa.tensor_scalar(
            dst=numbers, data=numbers, op0=nl.minimum, operand0=last, op1=nl.add, operand1=start
        )
        return numbers


class PagedLatents(nl.NKIObject):
    """Rows [P, block, W] in pages, with the slots [T, 1] of new tokens and the pages [B, N] of each sequence."""

    def __init__(self, rows, slots, block_tables):
        self.rows, self.slots, self.block_tables = rows, slots, block_tables
        self.block, self.width = rows.shape[1], rows.shape[2]
        self.sequences, self.capacity = block_tables.shape[0], block_tables.shape[1] * self.block
        self.runs = []
        self.run_in_page = {}

    def check(self, tokens):
        """Refuse slots of another number of tokens, and pages that do not divide a chunk of 128 positions."""
        assert self.slots.shape == (tokens, 1), f"slots are [{tokens}, 1], not {self.slots.shape}"
        assert PARTITIONS % self.block == 0, f"a page has 1, 2, 4 … {PARTITIONS} positions, not {self.block}"

    def check_decode(self):
        """Refuse pages that do not fill whole chunks of 128 positions."""
        assert self.capacity % PARTITIONS == 0, (
            f"the pages of a sequence hold a multiple of {PARTITIONS} positions, not {self.capacity}"
        )

    def load_addresses(self, sizes):
        """Find where the runs of each piece are in the cache, counted in runs: [128, runs, sequence] int32."""
        for first, chunks, _ in sizes.pieces:
            start, run = first // self.block, min(chunks, self.block)
            tables = self.block_tables[:, start : start + chunks * PARTITIONS // self.block]
            self.runs.append(load_run_numbers(tables, self.block, run, chunks // run, COMPILER))

    def load_item(self, item, piece):
        """Load the rows of an item of a decode step, one run of each partition by one DMA."""
        numbers = self.runs[item.piece]
        run = min(item.rows.shape[1], self.block)
        row = run * self.width
        flat = self.rows.reshape((self.rows.shape[0] * self.block // run, row))
        for i in range(numbers.shape[1]):
            source = flat.ap(
                pattern=[[row, PARTITIONS], [self.width, run], [1, self.width]],
                vector_offset=numbers[:, i, item.sequence : item.sequence + 1],
            )
            nisa.dma_copy(dst=item.rows[:, i * run : (i + 1) * run, :], src=source)

    def load_cached(self, case, piece):
        """Load the rows of a piece of a prefix, one run of each partition by one DMA."""
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
            nisa.dma_copy(dst=piece.rows[:, i * run : (i + 1) * run, :], src=source)

    def find_runs_in_pages(self, repeats):
        """Return which run of its page is on each partition, where so many share a page: [128, 1] int32."""
        if repeats not in self.run_in_page:
            tile = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.iota(dst=tile, pattern=[[0, 1]], channel_multiplier=1)
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=repeats - 1)
            self.run_in_page[repeats] = tile
        return self.run_in_page[repeats]

    def compute_new_addresses(self, positions):
        """Return the rows of the cache that take the new tokens, [T, 1] int32: their slots."""
        return load(self.slots, nl.int32)

    def compute_piece_addresses(self, case, piece, tokens, run):
        """Return the rows of the cache that take the new tokens of a piece, [partition, chunk] int32: their slots."""
        return load_by_partition(self.slots, piece, tokens)


def load_by_partition(column, piece, tokens):
    """Load the numbers [T, 1] of the tokens of a piece that begin a partition: [partition, chunk] int32."""
    numbers = column[tokens[0] : tokens[1], :].reshape_dim(0, (piece.height, piece.chunks))
    return load(numbers[:, :, 0], nl.int32)
