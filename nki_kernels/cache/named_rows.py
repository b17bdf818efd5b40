"""Contiguous caches whose rows are named at run time: which row of keys and values holds a sequence.

The caches [row, Hk, D, S] and [row, Hk, S, D] are loaded as those of sequences in order are, one sequence a DMA. A
decode step only reads them, and a prompt fills them at once: what an encoder leaves behind does not grow.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.contiguous import (
    HeadAddress,
    check_values,
    choose_contiguous_units,
    clear_unfilled_units,
    divide_contiguous_buffers,
    measure_range,
    store_pieces,
)
from nki_kernels.decode.share import Share
from nki_kernels.dma import STATIC, SYNC, transfer
from nki_kernels.tiles import PARTITIONS, load


class RowCache(nl.NKIObject):
    """Contiguous keys and values, and the rows [B, 1] of a core's sequences, with its kv heads and slots."""

    transposes_keys = False
    tiles_per_position = 2
    shares_pages = False
    keeps_heads_together = False
    slots_together = PARTITIONS

    def __init__(self, k_cache, v_cache, cache_rows, share=None):
        self.k_cache, self.v_cache, self.cache_rows = k_cache, v_cache, cache_rows
        self.sequences = cache_rows.shape[0]
        _, kv_heads, self.depth, capacity = k_cache.shape
        self.value_depth = v_cache.shape[3]
        if share is None:
            share = Share((0, self.sequences), (0, kv_heads), (0, capacity))
        self.first_head, self.kv_heads = measure_range(share.kv_heads)
        self.first_slot, self.capacity = measure_range(share.slots)
        self.row_numbers = None

    def check(self, tokens):
        """Refuse values that do not fit the keys, and rows of another shape; any number of tokens may be new."""
        check_values(self, self.depth)
        assert self.cache_rows.shape[1] == 1, f"cache_rows are [B, 1], not {self.cache_rows.shape}"

    def check_prompts(self, rows):
        """Refuse values that do not fit the keys, and rows of another shape."""
        check_values(self, self.value_depth)
        assert self.cache_rows.shape[1] == 1, f"cache_rows are [B, 1], not {self.cache_rows.shape}"

    def select_share(self, share):
        """Return the cache of the sequences, kv heads and slots of a share."""
        rows = share.select_rows(self.cache_rows, self.sequences)
        return RowCache(self.k_cache, self.v_cache, rows, share)

    def choose_group_units(self, sizes, room, unit_bytes, load_units):
        """Return how many units are loaded together, as of contiguous caches."""
        return choose_contiguous_units(sizes, room, unit_bytes, load_units)

    def divide_buffers(self, sizes, buffers, short):
        """Divide buffers of groups among keys and values, as of contiguous caches."""
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
        """Load the rows of the sequences as one row of SBUF, [1, B] int32."""
        self.row_numbers = load(self.cache_rows.ap(pattern=[[0, 1], [1, self.sequences]]), nl.int32)

    def create_key_buffers(self, key_tiles, sizes):
        """Return the tiles that keys are loaded into: those that the product takes."""
        return key_tiles

    def load_keys(self, tile, box, sizes):
        """Bring the keys of a group of units to a tile [D in tile, tile, unit, S]."""
        heads = box[3] - box[2]
        depth, capacity = self.k_cache.shape[2], self.k_cache.shape[3]
        for sequence in range(box[0], box[1]):
            unit = (sequence - box[0]) * heads
            for d in range(sizes.depth_tiles):
                start, stop = d * PARTITIONS, min(depth, (d + 1) * PARTITIONS)
                source = self.k_cache.ap(
                    pattern=[[capacity, stop - start], [depth * capacity, heads], [1, sizes.capacity]],
                    offset=((self.first_head + box[2]) * depth + start) * capacity + self.first_slot,
                    scalar_offset=self.row_numbers[0:1, sequence : sequence + 1],
                    indirect_dim=0,
                )
                nisa.dma_copy(dst=tile[0 : stop - start, d, unit : unit + heads, :], src=source)

    def load_values(self, tile, box, sizes, queue):
        """Bring the values of a group of units to a tile [128, unit, chunk, D], laid out as by `ContiguousCache`.

        Run-time addresses take descriptors that the Sync engine triggers in place of STATIC ones.
        """
        heads = box[3] - box[2]
        full_slots = sizes.full * PARTITIONS
        pieces = []
        if sizes.full > 0:
            pieces.append((0, PARTITIONS, sizes.full, 0))
        if sizes.remaining > 0:
            pieces.append((full_slots, sizes.remaining, 1, sizes.full))
        for sequence in range(box[0], box[1]):
            unit = (sequence - box[0]) * heads
            for slot, height, count, chunk in pieces:
                target = tile[0:height, unit : unit + heads, chunk : chunk + count, :]
                source = self.view_row_values(sequence, (box[2], box[3]), slot, height, count)
                transfer(target, source, SYNC if queue == STATIC else queue)

    def view_row_values(self, sequence, heads, slot, height, count):
        """Return values [partition, head, chunk, D] of a sequence and a range of kv heads, from a slot of the share on.

        `height` partitions have `count` neighbouring slots each.
        """
        capacity, depth = self.v_cache.shape[2], self.v_cache.shape[3]
        first_head, first_slot = self.first_head + heads[0], self.first_slot + slot
        return self.v_cache.ap(
            pattern=[
                [count * depth, height],
                [capacity * depth, heads[1] - heads[0]],
                [depth, count],
                [1, depth],
            ],
            offset=(first_head * capacity + first_slot) * depth,
            scalar_offset=self.row_numbers[0:1, sequence : sequence + 1],
            indirect_dim=0,
        )

    def store_prompt(self, case, head, first, end):
        """Write new keys and values, from block `first` of them up to row `end`, to the row of their sequence."""
        store_pieces(self, case, head, first, end)

    def locate_head(self, case, head):
        """Return where a head's keys and values are in the row that its sequence has at run time."""
        row = self.cache_rows[head.sequence : head.sequence + 1, :]
        return HeadAddress(head.number, row, 0, 0)
