"""Contiguous caches: row b of keys [B, Hk, D, S] and values [B, Hk, S, D] holds sequence b."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.addresses import (
    compute_row_starts,
    compute_slots,
    is_written_elsewhere,
    repeat_for_heads,
    replace_by_end,
    scatter,
    split_into_columns,
)
from nki_kernels.decode.share import Share
from nki_kernels.decode.sizes import (
    STORED_BYTES,
    STORED_COLUMNS,
    VALUE_BUFFERS,
    VALUE_PART_OVER_RANKS,
    Buffers,
    count_units,
    divide_into_boxes,
)
from nki_kernels.dma import COMPILER, SCALAR, STATIC, transfer
from nki_kernels.prefill.key_blocks import list_new_pieces, split_into_pieces, view_new_keys, view_new_values
from nki_kernels.tiles import PARTITIONS, blocks


class ContiguousCache(nl.NKIObject):
    """Contiguous keys and values, and the sequences, kv heads and slots that a core has of them."""

    transposes_keys = False
    """Keys come with D on the partitions, as the product takes them."""
    tiles_per_position = 2
    shares_pages = False
    keeps_heads_together = False
    slots_together = PARTITIONS
    """Slots that cores do not divide."""

    def __init__(self, k_cache, v_cache, share=None):
        self.k_cache, self.v_cache = k_cache, v_cache
        sequences, kv_heads, self.depth, capacity = k_cache.shape
        self.value_depth = v_cache.shape[3]
        if share is None:
            share = Share((0, sequences), (0, kv_heads), (0, capacity))
        self.first_sequence, self.sequences = measure_range(share.sequences)
        self.first_head, self.kv_heads = measure_range(share.kv_heads)
        self.first_slot, self.capacity = measure_range(share.slots)

    def check(self, tokens):
        """Refuse values that do not fit the keys; any number of tokens may be new."""
        check_values(self, self.depth)

    def check_prompts(self, rows):
        """Refuse values that do not fit the keys; heads of values may have another size."""
        check_values(self, self.value_depth)

    def select_share(self, share):
        """Return the cache of the sequences, kv heads and slots of a share."""
        return ContiguousCache(self.k_cache, self.v_cache, share)

    def choose_group_units(self, sizes, room, unit_bytes, load_units):
        """Return how many units are loaded together: `load_units`, or what fits in `room`."""
        return choose_contiguous_units(sizes, room, unit_bytes, load_units)

    def divide_buffers(self, sizes, buffers, short):
        """Divide buffers of groups among keys and values; all keys come first where the sequences are `short`."""
        return divide_contiguous_buffers(sizes, buffers, short)

    def compute_row_shape(self, sizes):
        """Return the shape of a tile with positions on the partitions: [128, unit, chunk, D]."""
        return (PARTITIONS, sizes.units, sizes.cached, sizes.depth)

    def view_by_unit(self, tile, box):
        """Return a tile of rows as [128, unit, chunk, D]."""
        return tile

    def clear_unfilled(self, tile, units, sizes):
        """Zero what the first values of a tile, of so many units, leave."""
        clear_unfilled_units(tile, units, sizes)

    def load_addresses(self, sizes):
        """Do nothing: addresses are known before the launch."""

    def create_key_buffers(self, key_tiles, sizes):
        """Return the tiles that keys are loaded into: those that the product takes."""
        return key_tiles

    def load_keys(self, tile, box, sizes):
        """Bring the keys of a group of units; a dtype other than the tile's is cast on the way."""
        units = count_units(box)
        first_slot = self.first_slot
        source = self.k_cache[:, :, :, first_slot : first_slot + sizes.capacity]
        source = self.select_box(source, box)
        for d in range(sizes.depth_tiles):
            start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
            rows = source[:, :, start:stop, :].permute((2, 0, 1, 3))
            transfer(tile[0 : stop - start, d, 0:units, :], rows, STATIC)

    def load_values(self, tile, box, sizes, queue):
        """Bring the values of a group of units.

        Partition p of the first S // 128 chunks holds as many consecutive positions, which lie side by side in HBM.
        """
        units = count_units(box)
        first_slot = self.first_slot
        source = self.v_cache[:, :, first_slot : first_slot + sizes.capacity, :]
        source = self.select_box(source, box)
        full_slots = sizes.full * PARTITIONS
        if sizes.full > 0:
            rows = (
                source[:, :, 0:full_slots, :]
                .reshape_dim(2, (PARTITIONS, sizes.full))
                .permute((2, 0, 1, 3, 4))
            )
            transfer(tile[:, 0:units, 0 : sizes.full, :], rows, queue)
        if sizes.remaining > 0:
            rows = source[:, :, full_slots : sizes.capacity, :].permute((2, 0, 1, 3))
            transfer(tile[0 : sizes.remaining, 0:units, sizes.full, :], rows, queue)

    def select_box(self, array, box):
        """Return the sequences and kv heads of a box, counted from those of the share."""
        sequence, head = self.first_sequence, self.first_head
        return array[sequence + box[0] : sequence + box[1], head + box[2] : head + box[3]]

    def compute_new_addresses(self, work, positions, heights):
        """Find where rows (token, kv head) of new keys and new values are written, `heights` rows in each column.

        The addresses [height, 1] int32 count elements of keys and rows [D] of values. A row that another core or rank
        writes has an address behind the cache.
        """
        sizes = work.sizes
        numbers = repeat_for_heads(positions, sizes, SCALAR)
        slots = compute_slots(numbers, sizes.ranks)
        sequences, kv_heads, depth, capacity = self.k_cache.shape
        first_row = self.first_sequence * kv_heads + self.first_head
        columns = []
        for step in (depth * capacity, capacity):
            rows = compute_row_starts(slots, first_row * step, kv_heads, step, sizes)
            if work.divided:
                replace_by_end(rows, is_written_elsewhere(numbers, work), sequences * kv_heads * step)
            columns.append(split_into_columns(rows, heights, sizes))
        return columns[0], columns[1]

    def store_keys(self, rows, addresses, sizes, divided):
        """Write rows of new keys: their elements are `capacity` apart."""
        scatter(self.k_cache, 1, self.k_cache.shape[3], rows, addresses, sizes, divided)

    def store_values(self, rows, addresses, sizes, divided):
        """Write rows of new values."""
        scatter(self.v_cache, sizes.depth, 1, rows, addresses, sizes, divided)

    def find_prefix(self, case, sequence):
        """Return None: the positions of a prefix are consecutive, so it needs no table."""
        return None

    def load_prefix(self, case, head, first, keys, values):
        """Fill tiles of keys [D in tile, block, tile, key] and values [key, block, D] from block `first` on."""
        used, count, _ = values.shape
        start = first * PARTITIONS
        end = start + used * count
        for d in range(case.depth_tiles):
            height = case.heights[d]
            row = d * case.tile_depth
            rows = self.k_cache[head.sequence, head.number, row : row + height]
            source = rows[:, start:end].reshape_dim(1, (count, used))
            nisa.dma_copy(dst=keys[0:height, :, d, :], src=source)
        rows = self.v_cache[head.sequence, head.number, start:end]
        nisa.dma_copy(dst=values, src=rows.reshape_dim(0, (count, used)).permute((1, 0, 2)))

    def load_stored(self, case, head):
        """Load the new keys, and behind them the new values, which a launch before wrote; DMA casts them.

        The Scalar engine triggers these loads: the transposes of weights in the queue of the others need not wait.
        """
        address = self.locate_head(case, head)
        for piece in list_new_pieces(case):
            for depth_range in case.depth_ranges:
                source = view_key_piece(self.k_cache, case, depth_range, piece, address)
                transfer(view_new_keys(case, head, depth_range, piece), source, SCALAR)
        for piece in list_new_pieces(case):
            transfer(
                view_new_values(case, head, piece),
                view_value_piece(self.v_cache, case, piece, address),
                SCALAR,
            )

    def store_prompt(self, case, head, first, end):
        """Write new keys and values, from block `first` of them up to row `end`, behind the valid positions."""
        store_pieces(self, case, head, first, end)

    def locate_head(self, case, head):
        """Return where a head's new keys and values begin: behind as many positions as are valid at run time."""
        row = head.sequence * case.kv_heads + head.number
        if case.prefix == 0:
            return HeadAddress(row, None, 3, 2)
        first = head.sequence * case.queries
        return HeadAddress(row, case.positions[first : first + 1, :], 3, 2)


@dataclass
class HeadAddress(nl.NKIObject):
    """The row of a head among those of all sequences, and what is added at run time, if anything.

    offset [1, 1] int32 counts steps along dimension `key_dim` of the keys and `value_dim` of the values.
    """

    row: int
    offset: object
    key_dim: int
    value_dim: int


def check_values(cache, depth):
    """Refuse values whose shape does not fit the keys and heads of `depth` elements."""
    rows, kv_heads, _, capacity = cache.k_cache.shape
    shape = (rows, kv_heads, capacity, depth)
    assert cache.v_cache.shape == shape, (
        f"v_cache is {list(shape)} beside k_cache {cache.k_cache.shape}, not {cache.v_cache.shape}"
    )


def store_pieces(cache, case, head, first, end):
    """Write new keys and values of a head to contiguous caches, from block `first` of them up to row `end`."""
    address = cache.locate_head(case, head)
    for piece in split_into_pieces(first * PARTITIONS, end):
        for depth_range in case.depth_ranges:
            target = view_key_piece(cache.k_cache, case, depth_range, piece, address)
            transfer(target, view_new_keys(case, head, depth_range, piece), COMPILER)
        target = view_value_piece(cache.v_cache, case, piece, address)
        transfer(target, view_new_values(case, head, piece), COMPILER)


def view_key_piece(cache, case, depth_range, piece, address):
    """Return where contiguous keys have a piece of new ones: [D in tile, block, tile, key]."""
    first_tile, end, height = depth_range
    capacity = cache.shape[3]
    row = address.row * case.depth + first_tile * case.tile_depth
    return cache.ap(
        pattern=[
            [capacity, height],
            [piece.used, piece.count],
            [case.tile_depth * capacity, end - first_tile],
            [1, piece.used],
        ],
        offset=row * capacity + piece.start,
        scalar_offset=address.offset,
        indirect_dim=address.key_dim,
    )


def view_value_piece(cache, case, piece, address):
    """Return where contiguous values have a piece of new ones: [value, block, D]."""
    depth = case.value_depth
    return cache.ap(
        pattern=[[depth, piece.used], [piece.used * depth, piece.count], [1, depth]],
        offset=(address.row * cache.shape[2] + piece.start) * depth,
        scalar_offset=address.offset,
        indirect_dim=address.value_dim,
    )


def measure_range(bounds):
    """Return the start of a range and how many it has."""
    return bounds[0], bounds[1] - bounds[0]


def choose_contiguous_units(sizes, room, unit_bytes, load_units):
    """Return how many units of contiguous caches are loaded together; groups of stored keys are larger."""
    enough = load_units
    if sizes.stored:
        columns = blocks(STORED_COLUMNS, sizes.width * sizes.chunks)
        enough = max(load_units, min(columns, STORED_BYTES // unit_bytes))
    most = min(room, enough, sizes.sequences * sizes.kv_heads)
    return count_units(divide_into_boxes(sizes.sequences, sizes.kv_heads, max(1, most))[0])


def divide_contiguous_buffers(sizes, buffers, short):
    """Divide buffers of groups among the keys and values of contiguous caches."""
    keys_first = short and not sizes.stored and sizes.ranks == 1
    if keys_first or sizes.stored:
        values = buffers // 2
    else:
        most = VALUE_BUFFERS if sizes.ranks == 1 else buffers // VALUE_PART_OVER_RANKS
        values = min(max(most, VALUE_BUFFERS), buffers // 2)
    return Buffers(buffers - values, values, buffers - values, keys_first)


def clear_unfilled_units(tile, units, sizes):
    """Zero the units and the last positions of a tile of rows that loads of so many units leave."""
    if units < sizes.units:
        nisa.memset(dst=tile[:, units : sizes.units, :, :], value=0.0)
    if sizes.remaining > 0:
        nisa.memset(dst=tile[:, 0:units, sizes.full, :], value=0.0)
