"""Full pages of 4 bits, and the newest page of each sequence as it is: the cache of `k_pages` and `v_pages`.

A token attends to the keys and values of its own page as they are, and to those of earlier pages as 4 bits store them
(`cache.nibble_pages`). A page is rounded when it is full, by `pack_pages`, and each later token reads that. So what a
token reads does not depend on the tokens that are computed with it.

`cache.create` makes a `PackedPages`; it has the methods of `cache.pages.PagedCache`. New keys and values are written to
the pages of `newest`. Loaded pages are widened to the dtype of the activations before they are operands.

In a decode step positions of full pages have their chunks as in `cache.pages`. The newest page is one more chunk, with
position p of the page on partition p. A *unit* is one kv head of one sequence. A *box* of units is (first sequence,
end, first kv head, end). A *group* is a box that is loaded together. A *chunk* is 128 positions. A *run* is
neighbouring positions of one page on one partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.nibble_pages import (
    MIDDLE,
    SCALE_BYTES,
    SCALE_ROWS,
    check_pages,
    unpack_nibbles,
    widen_nibbles,
)
from nki_kernels.cache.pages import (
    MAX_ROWS,
    PagedCache,
    compute_prefix_rows,
    compute_run_length,
    load_run_numbers,
    transpose_rows,
)
from nki_kernels.decode.sizes import count_units
from nki_kernels.dma import STATIC, transfer
from nki_kernels.prefill.keys import transpose_into_blocks
from nki_kernels.tiles import PARTITIONS, filled

PACKED_SHARE = 4
"""Of all tiles for keys and values, one of so many has packed bytes and scales that wait to be widened."""


@dataclass
class PageArguments(nl.NKIObject):
    """Arguments of a kernel for pages of 4 bits; all are None for other caches.

    newest_tables: [B, M] int32 in HBM, whose first column names the newest page of each sequence; None for prompts.
    """

    k_pages: object = None
    v_pages: object = None
    newest_tables: object = None

    def is_given(self):
        """Return whether there are pages of 4 bits.

        Raises AssertionError if only one of k_pages and v_pages is given, or newest_tables without them.
        """
        assert (self.k_pages is None) == (self.v_pages is None), (
            "k_pages and v_pages come together: pass both, or neither for other caches"
        )
        assert self.k_pages is not None or self.newest_tables is None, (
            "newest_tables come with k_pages and v_pages; leave them out for other caches"
        )
        return self.k_pages is not None


@dataclass
class PackedGroup(nl.NKIObject):
    """Loaded pages of a group as bytes in SBUF, before they are widened.

    nibbles: [128, sequence, run, position, kv head, D / 2], of values with the bytes of a scale behind. scales: of
    keys, [128, sequence, run, the 2 * D bytes of each kv head] uint8; of values None.
    """

    box: object
    nibbles: nl.NkiTensor
    scales: object


class PackedPages(nl.NKIObject):
    """Full pages of keys and values in 4 bits, and `newest`, the `PagedCache` of the pages that new tokens fill.

    k_pages, v_pages: see `cache.nibble_pages`. block_tables [B, N] int32: the full pages of each sequence, in the order
    of positions; what follows may name any page. `loaded_keys`, `loaded_values`: groups that are loaded and not yet
    widened or unpacked, in the order of loads. `value_scales`: scales of the values of unpacked groups, [128, unit,
    chunk] float32 in SBUF.
    """

    transposes_keys = True
    tiles_per_position = 4
    shares_pages = False
    keeps_heads_together = True

    def __init__(self, newest, k_pages, v_pages, block_tables):
        self.newest, self.k_pages, self.v_pages, self.block_tables = newest, k_pages, v_pages, block_tables
        self.k_cache, self.v_cache = newest.k_cache, newest.v_cache
        self.sequences, self.blocks = block_tables.shape
        self.block, self.kv_heads = newest.block, newest.kv_heads
        self.depth, self.value_depth = newest.depth, newest.value_depth
        self.newest_positions = self.block
        self.capacity = self.blocks * self.block + self.newest_positions
        # Cores do not divide the positions of a sequence.
        self.slots_together = self.capacity
        self.loaded_keys, self.loaded_values, self.value_scales = [], [], []
        self.minus_middle = None
        self.key_rows, self.scale_rows, self.value_rows, self.newest_rows = None, None, None, None

    def check(self, tokens):
        """Raise AssertionError unless pages, tables and slots of a decode step fit `tokens` new tokens."""
        newest = self.newest
        check_pages(self.k_pages, self.v_pages, newest)
        assert newest.v_cache.shape == newest.k_cache.shape, (
            f"k_cache is {newest.k_cache.shape}, v_cache is {newest.v_cache.shape}; pages of both have one shape"
        )
        assert newest.sequences == self.sequences, (
            f"newest_tables have {newest.sequences} rows, block_tables {self.sequences}; pass one for each sequence"
        )
        assert tokens == self.sequences, (
            f"pages of 4 bits take one new token of a sequence, not {tokens} tokens of {self.sequences} sequences"
        )
        assert newest.slots.shape == (tokens, 1), f"slots are [{tokens}, 1], not {newest.slots.shape}"
        positions = self.blocks * self.block
        assert positions % PARTITIONS == 0, (
            f"the pages of a sequence hold a multiple of {PARTITIONS} positions, not {positions}; widen block_tables"
        )
        for pages in (self.k_pages, newest.k_cache):
            rows = pages.shape[0] * pages.shape[1] * self.kv_heads
            assert rows <= MAX_ROWS, (
                f"pages have at most {MAX_ROWS} rows, one for each position and kv head, not {rows}; use fewer pages"
            )

    def select_share(self, share):
        """Return a cache of the same pages for the sequences of a `Share`, which has all kv heads and slots."""
        newest = self.newest
        local = PagedCache(
            newest.k_cache,
            newest.v_cache,
            share.select_rows(newest.slots, self.sequences),
            share.select_rows(newest.block_tables, self.sequences),
        )
        tables = share.select_rows(self.block_tables, self.sequences)
        return PackedPages(local, self.k_pages, self.v_pages, tables)

    def choose_group_units(self, sizes, room, unit_bytes, load_units):
        """Return how many units make a group, as `PagedCache` does for as many tiles as these pages take."""
        unit_bytes = unit_bytes * self.tiles_per_position // self.newest.tiles_per_position
        return self.newest.choose_group_units(sizes, room, unit_bytes, load_units)

    def divide_buffers(self, sizes, buffers, short):
        """Divide `buffers` tiles among keys, values, transposed keys, and the bytes that wait: `Buffers`."""
        return self.newest.divide_buffers(sizes, buffers - buffers // PACKED_SHARE, short)

    def compute_row_shape(self, sizes):
        """Return the shape of an SBUF tile for a group's keys or values as rows: (128, sequence, chunk, kv head, D)."""
        return self.newest.compute_row_shape(sizes)

    def view_by_unit(self, tile, box):
        """Return a view [128, unit, chunk, D] of a tile [128, sequence, chunk, kv head, D] for a box of units."""
        return self.newest.view_by_unit(tile, box)

    def clear_unfilled(self, tile, units, sizes):
        """Write 0 to a tile in SBUF if a group has only `units` units, fewer than `sizes.units`; else do nothing."""
        self.newest.clear_unfilled(tile, units, sizes)

    def load_addresses(self, sizes):
        """Compute from the tables where each partition's runs and the newest pages are, and keep that.

        `key_rows`, `scale_rows` and `value_rows` [128, run, sequence] count rows of all kv heads of a position;
        `newest_rows` [block, sequence] those of the newest pages. All are int32 in SBUF and exact in float32, because
        a cache has at most MAX_ROWS rows.
        """
        self.minus_middle = filled((PARTITIONS, 1), -MIDDLE)
        run = compute_run_length(self.block, sizes)
        numbers = load_run_numbers(self.block_tables, self.block, run, sizes.full // run, STATIC)
        pages = shift_right(numbers, (self.block // run).bit_length() - 1)
        self.value_rows = multiply(numbers, run)
        self.scale_rows = multiply(pages, self.block + SCALE_ROWS)
        self.key_rows = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=self.key_rows,
            data=pages,
            op0=nl.multiply,
            operand0=float(SCALE_ROWS),
            op1=nl.add,
            operand1=self.value_rows,
        )
        tables = nl.ndarray((self.block, self.sequences), dtype=nl.int32, buffer=nl.sbuf)
        first = self.newest.block_tables[:, 0:1].permute((1, 0)).broadcast(0, self.block)
        transfer(tables, first, STATIC)
        offsets = nl.ndarray((self.block, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=offsets, pattern=[[1, 1]], channel_multiplier=1)
        self.newest_rows = nl.ndarray(tables.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=self.newest_rows,
            data=tables,
            op0=nl.multiply,
            operand0=float(self.block),
            op1=nl.add,
            operand1=offsets,
        )

    def create_key_buffers(self, key_tiles, sizes):
        """Return uninitialised SBUF tiles for widened keys as rows, as `PagedCache.create_key_buffers` does."""
        return self.newest.create_key_buffers(key_tiles, sizes)

    def load_keys(self, tile, box, sizes):
        """Load the keys of a group: packed bytes and scales into new tiles, the newest page as rows into `tile`."""
        self.loaded_keys.append(self.load_group(self.k_pages, self.key_rows, box, sizes))
        self.gather_newest(tile, self.k_cache, box, sizes)

    def load_values(self, tile, box, sizes, queue):
        """Load the values of a group, as `load_keys` does. `queue` is not used: the compiler chooses it."""
        self.loaded_values.append(self.load_group(self.v_pages, self.value_rows, box, sizes))
        self.gather_newest(tile, self.v_cache, box, sizes)

    def load_group(self, pages, rows, box, sizes):
        """Return a new `PackedGroup`, which DMAs fill: one for each run and sequence, and of keys one for its scales.

        A run that is a whole page of all kv heads comes with the scales behind it: GpSimd takes as long to address a
        piece of 256 bytes as one of 4 KiB.

        Args:
            pages: k_pages or v_pages in HBM.
            rows: first row of each run, [128, run, sequence] int32 in SBUF.
            box: (first sequence, end, first kv head, end).
        """
        first, end, head, last = box
        count, page_rows, heads, width = pages.shape
        local, sequences, runs = last - head, end - first, rows.shape[1]
        length, pitch = compute_run_length(self.block, sizes), heads * width
        scale_bytes = (page_rows - self.block) * local * width
        together = scale_bytes > 0 and length == self.block and local == heads
        loaded_rows = page_rows if together else length
        shape = (PARTITIONS, sequences, runs, loaded_rows * local * width)
        loaded = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
        nibbles = loaded[:, :, :, 0 : length * local * width].reshape_dim(3, (length, local, width))
        group = PackedGroup(box, nibbles, None)
        if together:
            group.scales = loaded[:, :, :, length * local * width :]
        elif scale_bytes > 0:
            shape = (PARTITIONS, sequences, runs, scale_bytes)
            group.scales = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
        flat = pages.reshape((count * page_rows, pitch))
        pattern = [[pitch, PARTITIONS], [pitch, loaded_rows], [1, local * width]]
        for sequence in range(first, end):
            for run in range(runs):
                source = flat.ap(
                    pattern=pattern,
                    offset=head * width,
                    vector_offset=rows[:, run, sequence : sequence + 1],
                )
                nisa.dma_copy(dst=loaded[:, sequence - first, run, :], src=source)
                if scale_bytes > 0 and not together:
                    source = flat.ap(
                        pattern=[[pitch, PARTITIONS], [1, scale_bytes]],
                        offset=self.block * pitch + head * (page_rows - self.block) * width,
                        vector_offset=self.scale_rows[:, run, sequence : sequence + 1],
                    )
                    nisa.dma_copy(dst=group.scales[:, sequence - first, run, :], src=source)
        return group

    def gather_newest(self, tile, cache, box, sizes):
        """Load the newest page of each sequence of a group as rows into the last chunk of `tile`.

        Args:
            tile: [128, sequence, chunk, kv head, D] in SBUF.
            cache: [Q, block, Hk, D] in HBM.
            box: (first sequence, end, first kv head, end).
        """
        first, end, head, last = box
        pitch = self.kv_heads * self.depth
        flat = cache.reshape((cache.shape[0] * self.block, pitch))
        pattern = [[pitch, self.block], [1, (last - head) * self.depth]]
        for sequence in range(first, end):
            source = flat.ap(
                pattern=pattern,
                offset=head * self.depth,
                vector_offset=self.newest_rows[:, sequence : sequence + 1],
            )
            target = tile[0 : self.block, sequence - first, sizes.full, 0 : last - head, :]
            nisa.dma_copy(dst=target, src=source)

    def widen_keys(self, tile, sizes):
        """Convert the keys of the group that was loaded first to rows in `tile` [128, sequence, chunk, kv head, D]."""
        group = self.loaded_keys.pop(0)
        _, sequences, runs, length, heads, _ = group.nibbles.shape
        for sequence in range(sequences):
            scales = group.scales[:, sequence].view(nl.bfloat16).reshape_dim(2, (heads, self.depth))
            for head in range(heads):
                target = tile[:, sequence, 0 : sizes.full, head, :].reshape_dim(1, (runs, length))
                packed = group.nibbles[:, sequence, :, :, head, :]
                widen_nibbles(target, packed, scales[:, :, head, :].expand_dim(2).broadcast(2, length))

    def unpack_values(self, tile, valid, sizes):
        """Convert the values of the group that was loaded first to whole numbers -8 … 7 in rows of `tile`.

        Their scales multiply the weights of the softmax, see `scale_weights`.

        Args:
            tile: [128, sequence, chunk, kv head, D] in SBUF.
            valid: 1 for each key that the new token sees, [128, unit, chunk] uint8 in SBUF.
        """
        group = self.loaded_values.pop(0)
        half = self.depth // 2
        _, sequences, runs, length, heads, _ = group.nibbles.shape
        scales = nl.ndarray((PARTITIONS, valid.shape[1], sizes.full), dtype=nl.float32, buffer=nl.sbuf)
        # The weights of other positions are 0, but a page behind the last one may hold a scale that is not a number.
        nisa.memset(dst=scales, value=0.0)
        for sequence in range(sequences):
            for head in range(heads):
                target = tile[:, sequence, 0 : sizes.full, head, :].reshape_dim(1, (runs, length))
                rows = group.nibbles[:, sequence, :, :, head, :]
                # The Scalar engine has less to do than the Vector engine, which widens keys.
                nibbles = unpack_nibbles(rows[:, :, :, 0:half])
                nisa.activation(dst=target, op=nl.copy, data=nibbles, bias=self.minus_middle)
                stored = rows[:, :, :, half : half + SCALE_BYTES].view(nl.float32)
                unit = sequence * heads + head
                nisa.tensor_copy_predicated(
                    dst=scales[:, unit, :], src=stored, predicate=valid[:, unit, 0 : sizes.full]
                )
        self.value_scales.append(scales)

    def scale_weights(self, weights, sizes, is_last):
        """Multiply the weights of full pages in SBUF, in place, by the scales of their values.

        Args:
            weights: [128, unit, chunk, query] of the group that was unpacked first.
            is_last: whether no later weights of the group follow.
        """
        scales = self.value_scales[0]
        if is_last:
            self.value_scales.pop(0)
        pages = weights[:, :, 0 : sizes.full, :]
        factors = scales[:, 0 : weights.shape[1], :].expand_dim(3).broadcast(3, weights.shape[3])
        nisa.tensor_tensor(dst=pages, data1=pages, data2=factors, op=nl.multiply)

    def transpose_keys(self, tile, rows, box, chunks, sizes):
        """Transpose widened keys of a group as `PagedCache` does, and the newest pages with the last chunk.

        Args:
            tile: [D in tile, tile, unit, S + block] in SBUF.
            rows: [128, unit, chunk, D] in SBUF.
            box: (first sequence, end, first kv head, end) of the group.
            chunks: (first, end) of the chunks.
        """
        full = sizes.full
        self.newest.transpose_keys(tile, rows, box, (chunks[0], min(chunks[1], full)), sizes)
        if chunks[1] <= full:
            return
        for unit in range(count_units(box)):
            bank = nl.ndarray((self.depth, self.block), dtype=rows.dtype, buffer=nl.psum)
            transpose_rows(bank, rows[0 : self.block, unit, full, :], None)
            nisa.activation(dst=tile[0 : self.depth, 0, unit, full * PARTITIONS :], op=nl.copy, data=bank)

    def compute_new_addresses(self, launch, positions, heights):
        """Return the addresses of the new tokens' rows in the newest pages, as `PagedCache` does."""
        return self.newest.compute_new_addresses(launch, positions, heights)

    def store_keys(self, rows, addresses, sizes, divided):
        """Write rows (token, kv head) of new keys from SBUF to the newest pages in HBM."""
        self.newest.store_keys(rows, addresses, sizes, divided)

    def store_values(self, rows, addresses, sizes, divided):
        """Write rows (token, kv head) of new values from SBUF to the newest pages in HBM."""
        self.newest.store_values(rows, addresses, sizes, divided)

    def check_prompts(self, rows):
        """Raise AssertionError unless pages fit each other and the slots of `rows` new tokens of prompts."""
        check_pages(self.k_pages, self.v_pages, self.newest)
        self.newest.check_prompts(rows)

    def find_prefix(self, prompts, sequence):
        """Return the `PrefixRows` of a sequence's cached positions. Positions behind them name rows of page 0."""
        table = self.block_tables[sequence : sequence + 1, :]
        values = compute_prefix_rows(prompts, table, self.block)
        pages = shift_right(values, self.block.bit_length() - 1)
        # On GpSimd 32-bit integers are exact.
        keys = nl.ndarray(values.shape, dtype=nl.int32, buffer=nl.sbuf)
        scale_rows = filled(values.shape, SCALE_ROWS, nl.int32)
        nisa.tensor_tensor(dst=keys, data1=pages, data2=scale_rows, op=nl.multiply, engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(dst=keys, data1=keys, data2=values, op=nl.add, engine=nisa.engine.gpsimd)
        scales = nl.ndarray(values.shape, dtype=nl.int32, buffer=nl.sbuf)
        page_rows = filled(values.shape, self.block + SCALE_ROWS, nl.int32)
        nisa.tensor_tensor(
            dst=scales, data1=pages, data2=page_rows, op=nl.multiply, engine=nisa.engine.gpsimd
        )
        return PrefixRows(keys, scales, values)

    def load_prefix(self, prompts, head, first, keys, values):
        """Load and widen keys and values of a head from position 128 * `first` on, as many positions as the tiles hold.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence, whose `cached.rows` `find_prefix` returned.
            first: number of the first block of 128 positions.
            keys: [D, block, 1, key] in SBUF, which is written.
            values: [key, block, D] in SBUF, which is written.
        """
        used, count, _ = values.shape
        rows, half = head.cached.rows, self.depth // 2
        for i in range(count):
            packed = gather_rows(self.k_pages, rows.keys[0:used, first + i : first + i + 1], head.number)
            scales = self.gather_scales(rows.scales[0:used, first + i : first + i + 1], head.number)
            by_position = nl.ndarray((used, self.depth), dtype=keys.dtype, buffer=nl.sbuf)
            widen_rows(by_position, packed, scales)
            transpose_into_blocks(prompts, keys[:, i : i + 1], by_position.reshape_dim(1, (1, self.depth)))
            packed = gather_rows(self.v_pages, rows.values[0:used, first + i : first + i + 1], head.number)
            scale = packed[:, half : half + SCALE_BYTES].view(nl.float32)
            widen_rows(values[:, i, :], packed[:, 0:half], scale.broadcast(1, self.depth))

    def gather_scales(self, rows, head):
        """Return the scales of a head's keys in the pages of some positions, [position, D] bfloat16 in SBUF.

        Args:
            rows: first row of each position's page, [position, 1] int32 in SBUF.
            head: number of the kv head.
        """
        pages, page_rows, heads, half = self.k_pages.shape
        pitch, width = heads * half, SCALE_ROWS * half
        tile = nl.ndarray((rows.shape[0], width), dtype=nl.uint8, buffer=nl.sbuf)
        source = self.k_pages.reshape((pages * page_rows, pitch)).ap(
            pattern=[[pitch, rows.shape[0]], [1, width]],
            offset=self.block * pitch + head * width,
            vector_offset=rows,
        )
        nisa.dma_copy(dst=tile, src=source)
        return tile.view(nl.bfloat16)

    def store_prompt(self, prompts, head, first, end):
        """Write a head's new keys and values to the newest pages in HBM, as `PagedCache.store_prompt` does."""
        self.newest.store_prompt(prompts, head, first, end)


@dataclass
class PrefixRows(nl.NKIObject):
    """Rows of all kv heads of a prefix's positions in k_pages and v_pages, and of the pages' first rows in k_pages.

    Each is [position in block, block] int32 in SBUF.
    """

    keys: nl.NkiTensor
    scales: nl.NkiTensor
    values: nl.NkiTensor


def gather_rows(pages, rows, head):
    """Return the bytes of a head at some rows, [position, bytes] uint8 in SBUF.

    Args:
        pages: k_pages or v_pages in HBM.
        rows: numbers of rows of all kv heads, [position, 1] int32 in SBUF.
        head: number of the kv head.
    """
    count, page_rows, heads, width = pages.shape
    tile = nl.ndarray((rows.shape[0], width), dtype=nl.uint8, buffer=nl.sbuf)
    source = pages.reshape((count * page_rows, heads * width)).ap(
        pattern=[[heads * width, rows.shape[0]], [1, width]], offset=head * width, vector_offset=rows
    )
    nisa.dma_copy(dst=tile, src=source)
    return tile


def widen_rows(target, packed, scales):
    """Write (nibble - 8) * scale of packed rows [position, D / 2] to `target` [position, D], all in SBUF."""
    rows, depth = target.shape
    widen_nibbles(
        target.reshape((rows, 1, 1, depth)),
        packed.reshape((rows, 1, 1, depth // 2)),
        scales.expand_dim(1).expand_dim(1),
    )


def multiply(numbers, factor):
    """Return int32 numbers times a whole number as a new SBUF tile; products below 2^24 are exact."""
    multiplied = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=multiplied, data=numbers, op0=nl.multiply, operand0=float(factor))
    return multiplied


def shift_right(numbers, bits):
    """Return int32 numbers shifted right by `bits` as a new SBUF tile, or the numbers themselves for 0 bits."""
    if bits == 0:
        return numbers
    shifted = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shifted, data=numbers, op0=nl.right_shift, operand0=bits)
    return shifted
