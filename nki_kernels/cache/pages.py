"""Paged caches: keys and values of a sequence lie in pages that a table names at run time.

A page [block, Hk, D] holds `block` positions of all kv heads. Partition p of a tile holds S // 128 consecutive
positions, as from a contiguous cache. It gets them in *runs*, as many positions as pages and partitions have in common:
one DMA with run-time row numbers brings a run to each partition. Keys come with D along the free dim and are transposed
on chip.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.addresses import (
    compute_page_rows,
    is_written_elsewhere,
    repeat_for_heads,
    replace_by_end,
    scatter,
    split_into_columns,
)
from nki_kernels.cache.contiguous import measure_range
from nki_kernels.cache.scales import round_to_cache
from nki_kernels.decode.sizes import BUFFER_BYTES, Buffers, count_units, divide_into_boxes
from nki_kernels.dma import COMPILER, SCALAR, STATIC, transfer
from nki_kernels.prefill.key_blocks import list_new_pieces, view_new_values
from nki_kernels.prefill.keys import transpose_into_blocks
from nki_kernels.tiles import PARTITIONS, blocks, cast, filled, load

MAX_ROWS = 2**24
"""Rows of a paged cache: run-time addresses are computed in float32."""

LOADED_GROUPS = 3
"""Groups whose keys, and whose values, are in SBUF: GpSimd addresses them in the order of their use."""

TRANSPOSED_GROUPS = 2
"""Groups whose keys are in SBUF transposed at most."""

TRANSPOSES_TOGETHER = 4
"""Transposed chunks that one copy moves to SBUF."""


class PagedCache(nl.NKIObject):
    """Pages [P, block, Hk, D] of keys and values, and the sequences, kv heads and pages that a core has of them.

    slots [T, 1] are where new tokens are written, None where nothing is. block_tables [B, N] are the pages of each
    sequence.
    """

    transposes_keys = True
    """Keys come as rows [position, D]."""
    tiles_per_position = 3
    """Keys are in SBUF twice."""
    shares_pages = True
    """A table may name pages of another core behind the last position of its sequence."""
    keeps_heads_together = True
    """The kv heads of a position lie behind one another."""

    def __init__(self, k_cache, v_cache, slots, block_tables, share=None):
        self.k_cache, self.v_cache, self.slots, self.block_tables = k_cache, v_cache, slots, block_tables
        self.sequences, self.blocks = block_tables.shape
        _, self.block, kv_heads, self.depth = k_cache.shape
        self.value_depth = v_cache.shape[3]
        self.capacity = self.blocks * self.block
        self.first_head, self.kv_heads = 0, kv_heads
        if share is not None:
            self.first_head, self.kv_heads = measure_range(share.kv_heads)
        self.runs = None
        # Cores do not divide a chunk, nor a page.
        self.slots_together = PARTITIONS
        while self.slots_together % self.block > 0:
            self.slots_together += PARTITIONS

    def check(self, tokens):
        """Refuse values, slots and tables that do not fit the keys or `tokens` new tokens."""
        k_cache, slots = self.k_cache, self.slots
        assert self.v_cache.shape == k_cache.shape, (
            f"k_cache is {k_cache.shape}, v_cache is {self.v_cache.shape}"
        )
        assert slots is None or slots.shape == (tokens, 1), f"slots are [{tokens}, 1], not {slots.shape}"
        assert self.capacity % PARTITIONS == 0, (
            f"the pages of a sequence hold a multiple of {PARTITIONS} positions, not {self.capacity}"
        )
        rows = k_cache.shape[0] * self.block * self.kv_heads
        assert rows <= MAX_ROWS, (
            f"attention_decode takes pages of at most {MAX_ROWS} rows of a kv head, not {rows}"
        )

    def check_prompts(self, rows):
        """Refuse pages that do not divide a block of 128 positions, and slots of another number of new tokens."""
        assert PARTITIONS % self.block == 0, f"a page has 1, 2, 4 … {PARTITIONS} positions, not {self.block}"
        assert self.slots.shape == (rows, 1), f"slots is [{rows}, 1], not {self.slots.shape}"
        shape = self.k_cache.shape
        assert self.v_cache.shape == shape, (
            f"v_cache is {list(shape)} beside k_cache {shape}, not {self.v_cache.shape}"
        )

    def select_share(self, share):
        """Return the cache of the sequences, kv heads and slots of a share."""
        first, end = share.slots
        tables = share.select_rows(self.block_tables, self.sequences)[
            :, first // self.block : end // self.block
        ]
        slots = share.select_rows(self.slots, self.sequences)
        return PagedCache(self.k_cache, self.v_cache, slots, tables, share)

    def choose_group_units(self, sizes, room, unit_bytes, load_units):
        """Return how many units are loaded together: of several kv heads as many of a sequence as have room.

        The kv heads of a position lie behind one another. So a DMA of all of them moves a run in one piece. A DMA of
        some of them moves a piece for each position, and GpSimd takes as long to address a piece of 256 bytes as one of
        4 KiB.
        """
        if sizes.kv_heads > 1:
            most = min(sizes.kv_heads, room, BUFFER_BYTES // (self.tiles_per_position * unit_bytes))
            return blocks(sizes.kv_heads, blocks(sizes.kv_heads, max(1, most)))
        most = min(room, load_units, sizes.sequences)
        return count_units(divide_into_boxes(sizes.sequences, 1, max(1, most))[0])

    def divide_buffers(self, sizes, buffers, short):
        """Divide buffers of groups among keys as they come, values, and transposed keys."""
        transposed = min(TRANSPOSED_GROUPS, buffers // 3)
        loaded = min(LOADED_GROUPS, (buffers - transposed) // 2)
        return Buffers(loaded, loaded, transposed, False)

    def compute_row_shape(self, sizes):
        """Return the shape of a tile with positions on the partitions: [128, sequence, chunk, kv head, D]."""
        heads = sizes.units if sizes.kv_heads > 1 else 1
        return (PARTITIONS, sizes.units // heads, sizes.cached, heads, sizes.depth)

    def view_by_unit(self, tile, box):
        """Return a tile of rows as [128, unit, chunk, D]; with several heads there is one sequence."""
        if box[3] - box[2] == 1:
            return tile[:, 0 : box[1] - box[0], :, 0, :]
        return tile[:, 0, :, 0 : box[3] - box[2], :].permute((0, 2, 1, 3))

    def clear_unfilled(self, tile, units, sizes):
        """Zero a tile that loads of so many units do not fill."""
        if units < sizes.units:
            nisa.memset(dst=tile, value=0.0)

    def load_addresses(self, sizes):
        """Load where the runs of each partition are in a cache, counted in runs: [128, runs, sequence] int32."""
        run = compute_run_length(self.block, sizes)
        self.runs = load_run_numbers(self.block_tables, self.block, run, sizes.full // run, STATIC)

    def create_key_buffers(self, key_tiles, sizes):
        """Return tiles for rows of keys, one for each group whose loads are under way."""
        result = []
        for _ in range(sizes.key_buffers):
            result.append(nl.ndarray(self.compute_row_shape(sizes), dtype=sizes.dtype, buffer=nl.sbuf))
        return result

    def load_keys(self, tile, box, sizes):
        """Bring the rows of keys of a group of units to a tile of `create_key_buffers`."""
        self.gather(tile, self.k_cache, box, sizes)

    def load_values(self, tile, box, sizes, queue):
        """Bring the values of a group of units; the compiler chooses the queue."""
        self.gather(tile, self.v_cache, box, sizes)

    def gather(self, tile, cache, box, sizes):
        """Bring the rows of a group of units to `tile` [128, sequence, chunk, kv head, D]."""
        first, end, head, last = box
        length = compute_run_length(self.block, sizes)
        pitch = cache.shape[2] * sizes.depth
        row = length * pitch
        flat = cache.reshape((cache.shape[0] * self.block // length, row))
        heads = last - head
        pattern = [[row, PARTITIONS], [pitch, length], [1, heads * sizes.depth]]
        for sequence in range(first, end):
            for run in range(self.runs.shape[1]):
                source = flat.ap(
                    pattern=pattern,
                    offset=(self.first_head + head) * sizes.depth,
                    vector_offset=self.runs[:, run, sequence : sequence + 1],
                )
                chunk = run * length
                target = tile[:, sequence - first, chunk : chunk + length, 0:heads, :]
                nisa.dma_copy(dst=target, src=source)

    def transpose_keys(self, tile, rows, box, chunks, sizes):
        """Transpose keys of a group of units [128, unit, chunk, D] to `tile` [D in tile, tile, unit, S].

        chunks: the first chunk, and the first one that stays. Keys lie position by position in the tile.
        """
        for unit in range(count_units(box)):
            for d in range(sizes.depth_tiles):
                start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
                height = stop - start
                columns = tile[0:height, d, unit, :].reshape((height, PARTITIONS, sizes.full))
                columns = columns.permute((0, 2, 1))
                # Four transposes of 128 columns fit into a PSUM bank in float32 too, and one copy empties it.
                for first in range(chunks[0], chunks[1], TRANSPOSES_TOGETHER):
                    count = min(TRANSPOSES_TOGETHER, chunks[1] - first)
                    bank = nl.ndarray((height, count, PARTITIONS), dtype=rows.dtype, buffer=nl.psum)
                    for i in range(count):
                        nisa.nc_transpose(dst=bank[:, i, :], data=rows[:, unit, first + i, start:stop])
                    nisa.activation(dst=columns[:, first : first + count, :], op=nl.copy, data=bank)

    def compute_new_addresses(self, work, positions, heights):
        """Find where rows (token, kv head) of new keys and new values are written, `heights` rows in each column.

        The addresses [height, 1] int32 count rows [D]. A row that another core or rank writes has an address behind the
        cache.
        """
        sizes, cache = work.sizes, self.k_cache
        slots = repeat_for_heads(self.slots, sizes, STATIC)
        rows = compute_page_rows(slots, self.first_head, cache.shape[2], sizes)
        if work.divided:
            numbers = repeat_for_heads(positions, sizes, SCALAR)
            elsewhere = is_written_elsewhere(numbers, work)
            replace_by_end(rows, elsewhere, cache.shape[0] * cache.shape[1] * cache.shape[2])
        columns = split_into_columns(rows, heights, sizes)
        return columns, columns

    def store_keys(self, rows, addresses, sizes, divided):
        """Write rows of new keys."""
        scatter(self.k_cache, sizes.depth, 1, rows, addresses, sizes, divided)

    def store_values(self, rows, addresses, sizes, divided):
        """Write rows of new values."""
        scatter(self.v_cache, sizes.depth, 1, rows, addresses, sizes, divided)

    def find_prefix(self, case, sequence):
        """Return the rows [position in block, block] of a sequence's prefix, in caches seen as [P * page, Hk * D]."""
        return compute_prefix_rows(case, self.block_tables[sequence : sequence + 1, :], self.block)

    def load_prefix(self, case, head, first, keys, values):
        """Fill tiles of keys [D in tile, block, tile, key] and values [key, block, D] from block `first` on."""
        used, count, _ = values.shape
        self.gather_rows(case, head, head.cached.rows[0:used, first : first + count], keys, values)

    def load_stored(self, case, head):
        """Load the new keys and values, which a launch before wrote, from their slots."""
        for piece in list_new_pieces(case):
            rows = nl.ndarray((piece.used, piece.count), dtype=nl.int32, buffer=nl.sbuf)
            first = head.sequence * case.new_keys + piece.start
            slots = self.slots[first : first + piece.count * piece.used, :]
            nisa.dma_copy(dst=rows, src=slots.reshape((piece.count, piece.used)).permute((1, 0)))
            block = (case.prefix + piece.start) // PARTITIONS
            keys = head.keys[:, block : block + piece.count, :, 0 : piece.used]
            self.gather_rows(case, head, rows, keys, view_new_values(case, head, piece))

    def gather_rows(self, case, head, rows, keys, values):
        """Fill tiles of keys and values from the rows [position in block, block] of the pages, block by block."""
        used, count, _ = values.shape
        width = case.kv_heads * case.depth
        pattern = [[width, used], [1, case.depth]]
        offset = head.number * case.depth
        for i in range(count):
            row = rows[:, i : i + 1]
            by_position = nl.ndarray((used, case.depth), dtype=keys.dtype, buffer=nl.sbuf)
            source = self.k_cache.reshape((-1, width)).ap(pattern=pattern, offset=offset, vector_offset=row)
            nisa.dma_copy(dst=by_position, src=source)
            transpose_into_blocks(case, keys[:, i : i + 1], by_position.reshape_dim(1, (1, case.depth)))
            source = self.v_cache.reshape((-1, width)).ap(pattern=pattern, offset=offset, vector_offset=row)
            nisa.dma_copy(dst=values[:, i, :], src=source)

    def store_prompt(self, case, head, first, end):
        """Write new keys and values, from block `first` of them up to row `end`, to their slots."""
        for row in range(first * PARTITIONS, end, PARTITIONS):
            self.scatter_rows(case, head, row, min(end, row + PARTITIONS))

    def scatter_rows(self, case, head, start, end):
        """Write new keys and values start … end of a sequence to their slots, from the arguments."""
        width = case.kv_heads * case.depth
        first = head.sequence * case.new_keys
        slots = load(self.slots[first + start : first + end, :], nl.int32)
        columns = [head.number * case.depth, (head.number + 1) * case.depth]
        for new, cache, inverses in (
            (case.k, self.k_cache, case.scales.inverse_keys if case.scales is not None else None),
            (case.v, self.v_cache, case.scales.inverse_values if case.scales is not None else None),
        ):
            rows = load(new[first + start : first + end, columns[0] : columns[1]], case.dtype)
            if inverses is not None:
                round_to_cache(rows, inverses[0 : end - start, head.number : head.number + 1], cache.dtype)
            target = cache.reshape((-1, width)).ap(
                pattern=[[width, end - start], [1, case.depth]], offset=columns[0], vector_offset=slots
            )
            nisa.dma_copy(dst=target, src=cast(rows, cache.dtype))


def compute_prefix_rows(case, table, page):
    """Return the row numbers [position in block, block] of a prefix whose pages of `page` positions a table names."""
    count = case.prefix // PARTITIONS
    per_block = PARTITIONS // page
    pages = filled((PARTITIONS, count), 0, nl.int32)
    for block in range(count):
        first = block * per_block
        used = min(per_block, blocks(case.cached, page) - first)
        source = table.ap(pattern=[[1, used], [0, page], [1, 1]], offset=first)
        nisa.dma_copy(dst=pages[0 : used * page, block : block + 1], src=source)
    inside = nl.ndarray((PARTITIONS, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=inside, pattern=[[0, count]], channel_multiplier=1)
    # The page size divides 128, so a mask gives the position inside the page.
    nisa.tensor_scalar(dst=inside, data=inside, op0=nl.bitwise_and, operand0=page - 1)
    size = filled((PARTITIONS, count), page, nl.int32)
    # On GpSimd 32-bit integers are exact.
    nisa.tensor_tensor(dst=pages, data1=pages, data2=size, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=pages, data1=pages, data2=inside, op=nl.add, engine=nisa.engine.gpsimd)
    return pages


def compute_run_length(block, sizes):
    """Return the positions of a run: the greatest common divisor of those of a page and those of a partition."""
    first, second = block, sizes.full
    while second > 0:
        first, second = second, first % second
    return first


def load_run_numbers(block_tables, block, run, runs, queue):
    """Return where `runs` runs of each partition are in a cache, counted in runs: [128, runs, sequence] int32.

    A run has `run` positions of the pages of `block` positions. queue: that of the load of the tables. float32 holds
    the numbers exactly, see the limits.
    """
    runs_per_page = block // run
    sequences, blocks = block_tables.shape
    pages = nl.ndarray((PARTITIONS, runs, sequences), dtype=nl.int32, buffer=nl.sbuf)
    transfer(pages, block_tables.permute((1, 0)).expand_dim(1).broadcast(1, runs_per_page), queue)
    if runs_per_page == 1:
        return pages
    row = nl.ndarray((1, blocks, runs_per_page), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[0, blocks], [1, runs_per_page]])
    within = nl.ndarray((PARTITIONS, runs), dtype=nl.float32, buffer=nl.sbuf)
    transfer(within, row, COMPILER)
    numbers = nl.ndarray(pages.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=numbers,
        data=pages,
        op0=nl.multiply,
        operand0=float(runs_per_page),
        op1=nl.add,
        operand1=within.expand_dim(2).broadcast(2, sequences),
    )
    return numbers
