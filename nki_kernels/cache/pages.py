"""Paged caches: keys and values of a sequence are in pages that a block table names at run time.

`cache.create` makes a `PagedCache`; it has the methods of `cache.contiguous.ContiguousCache`.

A page [block, Hk, D] holds `block` positions of all kv heads. Partition p of a tile holds S // 128 consecutive
positions, as from a contiguous cache. It gets them in *runs*: a run is as many positions as pages and partitions have
in common. One DMA with run-time row numbers brings a run to each partition. Keys come with D along the free dimension
and are transposed on chip.

A *unit* is one kv head of one sequence. A *box* of units is (first sequence, end, first kv head, end), counted from
the first ones of a core's share. A *group* is a box that is loaded together. A *slot* is page * block + offset, the
place of a position in all pages; a *chunk* is 128 positions. A *piece* of a prompt is some whole blocks of 128 new
positions, or a last short block.
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
from nki_kernels.tiles import PARTITIONS, blocks, cast, filled, identity, load

MAX_ROWS = 2**24
"""Most rows (position, kv head) of a paged cache: run-time addresses are computed in float32."""

LOADED_GROUPS = 3
"""Groups whose keys, and groups whose values, are in SBUF at most: GpSimd computes addresses in the order of use."""

TRANSPOSED_GROUPS = 2
"""Groups whose transposed keys are in SBUF at most."""

TRANSPOSES_TOGETHER = 4
"""Transposed chunks that one copy moves from PSUM to SBUF."""


class PagedCache(nl.NKIObject):
    """Pages [P, block, Hk, D] of keys and of values in HBM, and the sequences, kv heads and pages of a core's share.

    slots [T, 1] int32: where new tokens are written, None where nothing is. block_tables [B, N] int32: the pages of
    each sequence, in the order of positions. `share` None means all kv heads. `runs`: see `load_addresses`. `identity`:
    [128, 128] in SBUF where keys of fp8 are transposed, else None.
    """

    transposes_keys = True
    """Whether keys are loaded as rows [position, D] and transposed on chip."""
    tiles_per_position = 3
    """SBUF tiles that hold a loaded position: its key as loaded, its transposed key, and its value."""
    shares_pages = True
    """Whether a table may name pages of another core, as it may beyond the last position of its sequence."""
    keeps_heads_together = True
    """Whether the kv heads of a position are neighbours in HBM, so that cores do not divide them."""
    newest_positions = 0
    """Positions of a newest page that is a chunk of its own."""

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
        self.identity = None
        # Cores do not divide a chunk, nor a page.
        self.slots_together = PARTITIONS
        while self.slots_together % self.block > 0:
            self.slots_together += PARTITIONS

    def check(self, tokens):
        """Raise AssertionError unless the caches fit each other and the slots of `tokens` new tokens of a decode step.

        The caches must have equal shapes and at most MAX_ROWS rows, slots must be [tokens, 1] or None. The pages of a
        sequence must hold a multiple of 128 positions.
        """
        k_cache, slots = self.k_cache, self.slots
        assert self.v_cache.shape == k_cache.shape, (
            f"k_cache is {k_cache.shape}, v_cache is {self.v_cache.shape}; pages of both have one shape"
        )
        assert slots is None or slots.shape == (tokens, 1), f"slots are [{tokens}, 1], not {slots.shape}"
        assert self.capacity % PARTITIONS == 0, (
            f"the pages of a sequence hold a multiple of {PARTITIONS} positions, not {self.capacity}; "
            "widen block_tables"
        )
        rows = k_cache.shape[0] * self.block * self.kv_heads
        assert rows <= MAX_ROWS, (
            f"attention_decode takes pages of at most {MAX_ROWS} rows, one for each position and kv head, not {rows}; "
            "use fewer pages"
        )

    def check_prompts(self, rows):
        """Raise AssertionError unless a prompt of `rows` new tokens fits the pages.

        The positions of a page must divide 128, slots must be [rows, 1], and the caches must have equal shapes.
        """
        assert PARTITIONS % self.block == 0, (
            f"a page has 1, 2, 4 … {PARTITIONS} positions, not {self.block}; choose a divisor of {PARTITIONS}"
        )
        assert self.slots.shape == (rows, 1), f"slots is [{rows}, 1], not {self.slots.shape}"
        shape = self.k_cache.shape
        assert self.v_cache.shape == shape, (
            f"v_cache is {list(shape)} beside k_cache {shape}, not {self.v_cache.shape}"
        )

    def select_share(self, share):
        """Return a cache of the same pages for the sequences, kv heads and slots of a `Share`.

        Its block tables have the pages of the share's slots only.
        """
        first, end = share.slots
        tables = share.select_rows(self.block_tables, self.sequences)[
            :, first // self.block : end // self.block
        ]
        slots = share.select_rows(self.slots, self.sequences)
        return PagedCache(self.k_cache, self.v_cache, slots, tables, share)

    def choose_group_units(self, sizes, room, unit_bytes, load_units):
        """Return how many units make a group: kv heads of one sequence, or sequences if there is one kv head.

        The kv heads of a position are neighbours in HBM. So a DMA of all of them moves a run in one piece. A DMA of
        some of them moves a piece for each position. GpSimd takes as long to address a piece of 256 bytes as one of 4
        KiB. A unit is one kv head of one sequence; a group is the units that are loaded together.

        Args:
            room: most units whose scores fit into PSUM.
            unit_bytes: bytes per partition of the keys of a unit.
            load_units: sequences whose keys make a DMA of good size.
        """
        if sizes.kv_heads > 1:
            most = min(sizes.kv_heads, room, BUFFER_BYTES // (self.tiles_per_position * unit_bytes))
            return blocks(sizes.kv_heads, blocks(sizes.kv_heads, max(1, most)))
        most = min(room, load_units, sizes.sequences)
        return count_units(divide_into_boxes(sizes.sequences, 1, max(1, most))[0])

    def divide_buffers(self, sizes, buffers, short):
        """Divide `buffers` tiles, each with room for one group, among keys, values and transposed keys: `Buffers`.

        Keys never all come before the values; `short` is not used. A group is the (sequence, kv head) pairs that are
        loaded together.
        """
        transposed = min(TRANSPOSED_GROUPS, buffers // 3)
        loaded = min(LOADED_GROUPS, (buffers - transposed) // 2)
        return Buffers(loaded, loaded, transposed, False)

    def compute_row_shape(self, sizes):
        """Return the shape of an SBUF tile for a group's keys or values as rows: (128, sequence, chunk, kv head, D).

        A group is the (sequence, kv head) pairs that are loaded together; a chunk is 128 positions.
        """
        heads = sizes.units if sizes.kv_heads > 1 else 1
        return (PARTITIONS, sizes.units // heads, sizes.cached, heads, sizes.depth)

    def view_by_unit(self, tile, box):
        """Return a view [128, unit, chunk, D] of a tile [128, sequence, chunk, kv head, D] for a box of units.

        A box has one kv head, or one sequence. A unit is one kv head of one sequence; a chunk is 128 positions.

        Args:
            box: (first sequence, end, first kv head, end).
        """
        if box[3] - box[2] == 1:
            return tile[:, 0 : box[1] - box[0], :, 0, :]
        return tile[:, 0, :, 0 : box[3] - box[2], :].permute((0, 2, 1, 3))

    def clear_unfilled(self, tile, units, sizes):
        """Write 0 to a tile in SBUF if a group has only `units` units, fewer than `sizes.units`; else do nothing.

        A unit is one kv head of one sequence; a group is the units that are loaded together.
        """
        if units < sizes.units:
            nisa.memset(dst=tile, value=0.0)

    def load_addresses(self, sizes):
        """Compute from the block tables where each partition's runs are in the cache, and keep that in `self.runs`.

        The tile is [128, run of the partition, sequence] int32 in SBUF. Its numbers count runs from the start of the
        cache. A run is neighbouring positions of one page that belong on one partition.
        """
        run = compute_run_length(self.block, sizes)
        self.runs = load_run_numbers(self.block_tables, self.block, run, sizes.full // run, STATIC)

    def create_key_buffers(self, key_tiles, sizes):
        """Return uninitialised SBUF tiles for keys as rows, `sizes.key_buffers` of them, one for a group each.

        `key_tiles`, which take the transposed keys, are not used. A group is the (sequence, kv head) pairs that are
        loaded together.
        """
        result = []
        for _ in range(sizes.key_buffers):
            result.append(nl.ndarray(self.compute_row_shape(sizes), dtype=sizes.operand, buffer=nl.sbuf))
        if sizes.operand != sizes.dtype:
            self.identity = identity(PARTITIONS, sizes.dtype)
        return result

    def load_keys(self, tile, box, sizes):
        """Load the keys of a group from pages into `tile` [128, sequence, chunk, kv head, D] in SBUF, as rows.

        A group is the (sequence, kv head) pairs that are loaded together; a chunk is 128 positions.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
        """
        self.gather(tile, self.k_cache, box, sizes)

    def load_values(self, tile, box, sizes, queue):
        """Load the values of a group from pages into `tile` [128, sequence, chunk, kv head, D] in SBUF.

        `queue` is not used: the compiler chooses the queue of loads with run-time addresses. A group is the
        (sequence, kv head) pairs that are loaded together; a chunk is 128 positions.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
        """
        self.gather(tile, self.v_cache, box, sizes)

    def gather(self, tile, cache, box, sizes):
        """Load a group's rows from pages of `cache` into `tile` [128, sequence, chunk, kv head, D] in SBUF.

        Each DMA brings one run of positions of a sequence to every partition. Needs `load_addresses` before. A group
        is the (sequence, kv head) pairs that are loaded together; a chunk is 128 positions.

        Args:
            cache: keys or values, [P, block, Hk, D] in HBM.
            box: (first sequence, end, first kv head, end) of the group.
        """
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
        """Transpose keys of a group in SBUF from `rows` [128, unit, chunk, D] to `tile` [D in tile, tile, unit, S].

        The keys are in the order of positions in `tile`. A unit is one kv head of one sequence; a group is the units
        that are loaded together; a chunk is 128 positions.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
            chunks: (first, end) of the chunks that are transposed.
        """
        for unit in range(count_units(box)):
            for d in range(sizes.depth_tiles):
                start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
                height = stop - start
                columns = tile[0:height, d, unit, 0 : sizes.full * PARTITIONS]
                columns = columns.reshape((height, PARTITIONS, sizes.full))
                columns = columns.permute((0, 2, 1))
                # Four transposes of 128 columns fit into a PSUM bank in float32 too, and one copy empties it.
                for first in range(chunks[0], chunks[1], TRANSPOSES_TOGETHER):
                    count = min(TRANSPOSES_TOGETHER, chunks[1] - first)
                    dtype = rows.dtype if self.identity is None else nl.float32
                    bank = nl.ndarray((height, count, PARTITIONS), dtype=dtype, buffer=nl.psum)
                    for i in range(count):
                        transpose_rows(bank[:, i, :], rows[:, unit, first + i, start:stop], self.identity)
                    nisa.activation(dst=columns[:, first : first + count, :], op=nl.copy, data=bank)

    def compute_new_addresses(self, launch, positions, heights):
        """Return the addresses of the new tokens' rows (token, kv head), twice: for keys and for values they are equal.

        A list has columns [height, 1] int32 in SBUF, one for each of `heights`. Addresses count rows of D elements. A
        row that another core or rank writes gets an address beyond the cache.

        Args:
            launch: the `DecodeLaunch`.
            positions: [T, 1] int32 in HBM; they say which core or rank writes a row.
            heights: number of rows in each column.
        """
        sizes, cache = launch.sizes, self.k_cache
        slots = repeat_for_heads(self.slots, sizes, STATIC)
        rows = compute_page_rows(slots, self.first_head, cache.shape[2], sizes)
        if launch.divided:
            numbers = repeat_for_heads(positions, sizes, SCALAR)
            elsewhere = is_written_elsewhere(numbers, launch)
            replace_by_end(rows, elsewhere, cache.shape[0] * cache.shape[1] * cache.shape[2])
        columns = split_into_columns(rows, heights, sizes)
        return columns, columns

    def store_keys(self, rows, addresses, sizes, divided):
        """Write rows (token, kv head) of new keys from SBUF to pages in HBM.

        Args:
            rows: SBUF tiles [height, D].
            addresses: the list of `compute_new_addresses`.
            divided: whether other cores or ranks write some of the rows, which are skipped.
        """
        scatter(self.k_cache, sizes.depth, 1, rows, addresses, sizes, divided)

    def store_values(self, rows, addresses, sizes, divided):
        """Write rows (token, kv head) of new values from SBUF to pages in HBM.

        Args:
            rows: SBUF tiles [height, D].
            addresses: the list of `compute_new_addresses`.
            divided: whether other cores or ranks write some of the rows, which are skipped.
        """
        scatter(self.v_cache, sizes.depth, 1, rows, addresses, sizes, divided)

    def find_prefix(self, prompts, sequence):
        """Return the cache row of each position of a sequence's prefix: [position in block, block] int32 in SBUF.

        A row is page * block + offset, of caches seen as [P * block, Hk * D]. See `compute_prefix_rows`.
        """
        return compute_prefix_rows(prompts, self.block_tables[sequence : sequence + 1, :], self.block)

    def load_prefix(self, prompts, head, first, keys, values):
        """Load cached keys and values of a head from position 128 * `first` on, as many positions as the tiles hold.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence, whose `cached.rows` `find_prefix` returned.
            first: number of the first block of 128 positions.
            keys: [D in tile, block, tile, key] in SBUF, which is written.
            values: [key, block, D] in SBUF, which is written.
        """
        used, count, _ = values.shape
        self.gather_rows(prompts, head, head.cached.rows[0:used, first : first + count], keys, values)

    def load_stored(self, prompts, head):
        """Load a head's new keys and values, which an earlier launch stored in their slots, into its tiles in SBUF.

        The tiles are `head.keys` and `head.values`.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence.
        """
        for piece in list_new_pieces(prompts):
            rows = nl.ndarray((piece.used, piece.count), dtype=nl.int32, buffer=nl.sbuf)
            first = head.sequence * prompts.new_keys + piece.start
            slots = self.slots[first : first + piece.count * piece.used, :]
            nisa.dma_copy(dst=rows, src=slots.reshape((piece.count, piece.used)).permute((1, 0)))
            block = (prompts.prefix + piece.start) // PARTITIONS
            keys = head.keys[:, block : block + piece.count, :, 0 : piece.used]
            self.gather_rows(prompts, head, rows, keys, view_new_values(prompts, head, piece))

    def gather_rows(self, prompts, head, rows, keys, values):
        """Load keys and values of a head from the cache rows that `rows` names, block by block of up to 128 positions.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence.
            rows: page * block + offset of each position, [position in block, block] int32 in SBUF.
            keys: [D in tile, block, tile, key] in SBUF, which is written.
            values: [key, block, D] in SBUF, which is written.
        """
        used, count, _ = values.shape
        width = prompts.kv_heads * prompts.depth
        pattern = [[width, used], [1, prompts.depth]]
        offset = head.number * prompts.depth
        for i in range(count):
            row = rows[:, i : i + 1]
            by_position = nl.ndarray((used, prompts.depth), dtype=keys.dtype, buffer=nl.sbuf)
            source = self.k_cache.reshape((-1, width)).ap(pattern=pattern, offset=offset, vector_offset=row)
            nisa.dma_copy(dst=by_position, src=source)
            transpose_into_blocks(prompts, keys[:, i : i + 1], by_position.reshape_dim(1, (1, prompts.depth)))
            source = self.v_cache.reshape((-1, width)).ap(pattern=pattern, offset=offset, vector_offset=row)
            nisa.dma_copy(dst=values[:, i, :], src=source)

    def store_prompt(self, prompts, head, first, end):
        """Write a head's new keys and values to their slots in HBM.

        Args:
            prompts: `Prompts`, the launch of attention_prefill, with the rows of new keys and values.
            head: `Head`, a kv head of one sequence.
            first: number of the first block of 128 new tokens.
            end: number of the new token after the last one.
        """
        for row in range(first * PARTITIONS, end, PARTITIONS):
            self.scatter_rows(prompts, head, row, min(end, row + PARTITIONS))

    def scatter_rows(self, prompts, head, start, end):
        """Copy new keys and values of a head from `prompts.k` and `prompts.v` to their slots, all in HBM.

        It copies tokens `start` … `end` - 1, counted in the head's sequence. The rows pass SBUF, where they
        are rounded if the cache has scales.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence.
        """
        width = prompts.kv_heads * prompts.depth
        first = head.sequence * prompts.new_keys
        slots = load(self.slots[first + start : first + end, :], nl.int32)
        columns = [head.number * prompts.depth, (head.number + 1) * prompts.depth]
        for new, cache, inverses in (
            (prompts.k, self.k_cache, prompts.scales.inverse_keys if prompts.scales is not None else None),
            (prompts.v, self.v_cache, prompts.scales.inverse_values if prompts.scales is not None else None),
        ):
            rows = load(new[first + start : first + end, columns[0] : columns[1]], prompts.dtype)
            if inverses is not None:
                round_to_cache(rows, inverses[0 : end - start, head.number : head.number + 1], cache.dtype)
            target = cache.reshape((-1, width)).ap(
                pattern=[[width, end - start], [1, prompts.depth]], offset=columns[0], vector_offset=slots
            )
            nisa.dma_copy(dst=target, src=cast(rows, cache.dtype))


def transpose_rows(target, rows, identity_tile):
    """Transpose up to 128 rows in SBUF to `target` in PSUM.

    Rows of fp8 are multiplied by the identity, exactly, because a transpose keeps the dtype; `target` is then float32.

    Args:
        target: [element, row].
        rows: [row, element], at most 128 of each.
        identity_tile: [128, 128] in SBUF for rows of fp8, else None.
    """
    if identity_tile is None:
        nisa.nc_transpose(dst=target, data=rows)
    else:
        height = rows.shape[0]
        nisa.nc_matmul(
            dst=target, stationary=rows, moving=identity_tile[0:height, 0:height], accumulate=False
        )


def compute_prefix_rows(prompts, table, page):
    """Return the cache row of each position of a prefix, page * `page` + offset.

    The result is [position in block, block] int32 in SBUF. Positions beyond the cached ones name rows of page 0.
    A prefix is the cached positions before a prompt's new tokens, padded to blocks of 128.

    Args:
        prompts: `Prompts`, the launch of attention_prefill.
        table: block table of one sequence, [1, N] int32 in HBM.
        page: number of positions of a page.
    """
    count = prompts.cached_keys // PARTITIONS
    per_block = PARTITIONS // page
    pages = filled((PARTITIONS, count), 0, nl.int32)
    for block in range(count):
        first = block * per_block
        used = min(per_block, blocks(prompts.cached, page) - first)
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
    """Return the positions of a run: the greatest common divisor of `block` and `sizes.full`.

    A run is neighbouring positions of one page that belong on one partition.

    Args:
        block: number of positions of a page.
        sizes: `Sizes`, whose `full` is the number of positions on a partition.
    """
    first, second = block, sizes.full
    while second > 0:
        first, second = second, first % second
    return first


def load_run_numbers(block_tables, block, run, runs, queue):
    """Return where each partition's runs of positions are in a cache, in runs from its start.

    The result is [128, run of the partition, sequence] int32 in SBUF. float32 holds the numbers exactly, because a
    cache has at most 2^24 rows. A run is neighbouring positions of one page that belong on one partition.

    Args:
        block_tables: [B, N] int32 in HBM.
        block: number of positions of a page.
        run: number of positions of a run, a divisor of `block`.
        runs: number of runs of each partition.
        queue: queue of `nki_kernels.dma` on which the tables are loaded.
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
