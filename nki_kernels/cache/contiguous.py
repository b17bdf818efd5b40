"""Contiguous caches: row b of keys [B, Hk, D, S] and values [B, Hk, S, D] holds sequence b."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.addresses import (
    as_columns,
    is_written_elsewhere,
    repeat_for_heads,
    replace_by_end,
    row_starts,
    scatter,
    slots_of_positions,
)
from nki_kernels.decode.sizes import (
    STORED_BYTES,
    STORED_COLUMNS,
    VALUE_BUFFERS,
    VALUE_PART_OVER_RANKS,
    Buffers,
    boxes,
    units_in,
)
from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims


class ContiguousCache(nl.NKIObject):
    """Contiguous keys and values, and the sequences, kv heads and slots that a core has of them."""

    transposes_keys = False
    """Keys come with D on the partitions, as the product takes them."""
    tiles_per_position = 2
    slots_together = PARTITIONS
    """Slots that cores do not divide."""

    def __init__(self, k_cache, v_cache):
        expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
        self.k_cache, self.v_cache = k_cache, v_cache
        self.sequences, self.kv_heads, self.depth, self.capacity = k_cache.shape
        self.first_sequence, self.first_head, self.first_slot = 0, 0, 0

    def check(self, tokens):
        """Refuse values that do not fit the keys; any number of tokens may be new."""
        shape = (self.sequences, self.kv_heads, self.capacity, self.depth)
        assert self.v_cache.shape == shape, (
            f"v_cache is {list(shape)} beside k_cache {self.k_cache.shape}, not {self.v_cache.shape}"
        )

    def of_share(self, share):
        """Return the cache of the sequences, kv heads and slots of a share."""
        result = ContiguousCache(self.k_cache, self.v_cache)
        narrow(result, share)
        result.first_sequence, result.sequences = share.sequences[0], share.sequences[1] - share.sequences[0]
        return result

    def group_units(self, sizes, room, unit_bytes, load_units):
        """Return how many units are loaded together: `load_units`, or what fits in `room`."""
        return contiguous_units(sizes, room, unit_bytes, load_units)

    def divide_buffers(self, sizes, buffers, short):
        """Divide buffers of groups among keys and values; all keys come first where the sequences are `short`."""
        return contiguous_buffers(sizes, buffers, short)

    def row_shape(self, sizes):
        """Return the shape of a tile with positions on the partitions: [128, unit, chunk, D]."""
        return (PARTITIONS, sizes.units, sizes.cached, sizes.depth)

    def by_unit(self, tile, box):
        """Return a tile of rows as [128, unit, chunk, D]."""
        return tile

    def clear_unfilled(self, tile, units, sizes):
        """Zero what the first values of a tile, of so many units, leave."""
        clear_unfilled_units(tile, units, sizes)

    def load_addresses(self, sizes):
        """Addresses are known before the launch."""

    def key_buffers(self, key_tiles, sizes):
        """Return the tiles that keys are loaded into: those that the product takes."""
        return key_tiles

    def load_keys(self, tile, box, sizes):
        """Bring the keys of a group of units; a dtype other than the tile's is cast on the way."""
        units = units_in(box)
        first_slot = self.first_slot
        source = self.k_cache[:, :, :, first_slot : first_slot + sizes.capacity]
        source = self.in_box(source, box)
        for part in range(sizes.parts):
            start, stop = part * PARTITIONS, min(sizes.depth, (part + 1) * PARTITIONS)
            rows = source[:, :, start:stop, :].permute((2, 0, 1, 3))
            transfer(tile[0 : stop - start, part, 0:units, :], rows, STATIC)

    def load_values(self, tile, box, sizes, queue):
        """Bring the values of a group of units.

        Partition p of the first S // 128 chunks holds as many consecutive positions, which lie side by side in HBM.
        """
        units = units_in(box)
        first_slot = self.first_slot
        source = self.v_cache[:, :, first_slot : first_slot + sizes.capacity, :]
        source = self.in_box(source, box)
        whole = sizes.full * PARTITIONS
        if sizes.full > 0:
            rows = source[:, :, 0:whole, :].reshape_dim(2, (PARTITIONS, sizes.full)).permute((2, 0, 1, 3, 4))
            transfer(tile[:, 0:units, 0 : sizes.full, :], rows, queue)
        if sizes.rest > 0:
            rows = source[:, :, whole : sizes.capacity, :].permute((2, 0, 1, 3))
            transfer(tile[0 : sizes.rest, 0:units, sizes.full, :], rows, queue)

    def in_box(self, array, box):
        """Return the sequences and kv heads of a box, counted from those of the share."""
        sequence, head = self.first_sequence, self.first_head
        return array[sequence + box[0] : sequence + box[1], head + box[2] : head + box[3]]

    def new_addresses(self, work, positions, heights):
        """Find where rows (token, kv head) of new keys and new values are written, `heights` rows in each column.

        The addresses [height, 1] int32 count elements of keys and rows [D] of values. A row that another core or rank
        writes has an address behind the cache.
        """
        sizes = work.sizes
        numbers = repeat_for_heads(positions, sizes, SCALAR)
        slots = slots_of_positions(numbers, sizes.ranks)
        sequences, kv_heads, depth, capacity = self.k_cache.shape
        first_row = self.first_sequence * kv_heads + self.first_head
        columns = []
        for step in (depth * capacity, capacity):
            rows = row_starts(slots, first_row * step, kv_heads, step, sizes)
            if work.divided:
                replace_by_end(rows, is_written_elsewhere(numbers, work), sequences * kv_heads * step)
            columns.append(as_columns(rows, heights, sizes))
        return columns[0], columns[1]

    def store_keys(self, rows, addresses, sizes, divided):
        """Write rows of new keys: their elements are `capacity` apart."""
        scatter(self.k_cache, 1, self.k_cache.shape[3], rows, addresses, sizes, divided)

    def store_values(self, rows, addresses, sizes, divided):
        """Write rows of new values."""
        scatter(self.v_cache, sizes.depth, 1, rows, addresses, sizes, divided)


def narrow(cache, share):
    """Narrow a cache to the kv heads and slots of a share."""
    cache.first_head, cache.kv_heads = share.kv_heads[0], share.kv_heads[1] - share.kv_heads[0]
    cache.first_slot, cache.capacity = share.slots[0], share.slots[1] - share.slots[0]


def contiguous_units(sizes, room, unit_bytes, load_units):
    """Return how many units of contiguous caches are loaded together; groups of stored keys are larger."""
    enough = load_units
    if sizes.stored:
        columns = blocks(STORED_COLUMNS, sizes.width * sizes.chunks)
        enough = max(load_units, min(columns, STORED_BYTES // unit_bytes))
    most = min(room, enough, sizes.sequences * sizes.kv_heads)
    return units_in(boxes(sizes.sequences, sizes.kv_heads, max(1, most))[0])


def contiguous_buffers(sizes, buffers, short):
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
    if sizes.rest > 0:
        nisa.memset(dst=tile[:, 0:units, sizes.full, :], value=0.0)
