"""Contiguous caches whose rows are named at run time: which row of keys and values holds a sequence.

`cache.create` makes a `RowCache`; it has the methods of `cache.contiguous.ContiguousCache`.

The caches [row, Hk, D, S] and [row, Hk, S, D] are loaded like those of sequences in order, with one sequence in a
DMA. A decode step only reads them. A prompt fills them at once, because what an encoder stores does not grow.

A *unit* is one kv head of one sequence. A *box* of units is (first sequence, end, first kv head, end), counted from
the first ones of a core's share. A *group* is a box that is loaded together. A *slot* is the place of a position in a
cache; a *chunk* is 128 slots.
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
    """Contiguous keys and values in HBM, the rows [B, 1] of a core's sequences, and its kv heads and slots.

    `share` None means all kv heads and slots. `row_numbers`: the rows in SBUF, see `load_addresses`.
    """

    transposes_keys = False
    tiles_per_position = 2
    shares_pages = False
    keeps_heads_together = False
    newest_positions = 0
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
        """Raise AssertionError unless v_cache has the sizes of k_cache and cache_rows is [B, 1].

        `tokens` is not checked: any number of tokens may be new.
        """
        check_values(self, self.depth)
        assert self.cache_rows.shape[1] == 1, f"cache_rows are [B, 1], not {self.cache_rows.shape}"

    def check_prompts(self, rows):
        """Raise AssertionError unless v_cache has the sizes of k_cache, except for D, and cache_rows is [B, 1].

        `rows`, the number of new tokens, is not checked.
        """
        check_values(self, self.value_depth)
        assert self.cache_rows.shape[1] == 1, f"cache_rows are [B, 1], not {self.cache_rows.shape}"

    def select_share(self, share):
        """Return a cache of the same tensors for the sequences, kv heads and slots of a `Share`."""
        rows = share.select_rows(self.cache_rows, self.sequences)
        return RowCache(self.k_cache, self.v_cache, rows, share)

    def choose_group_units(self, sizes, room, unit_bytes, load_units):
        """Return how many units make a group, as whole sequences or as kv heads of one sequence.

        A unit is one kv head of one sequence; a group is the units that are loaded together.

        Args:
            room: most units whose scores fit into PSUM.
            unit_bytes: bytes per partition of the keys of a unit.
            load_units: units whose keys make a DMA of good size; stored keys may take more.
        """
        return choose_contiguous_units(sizes, room, unit_bytes, load_units)

    def divide_buffers(self, sizes, buffers, short):
        """Divide `buffers` tiles, each with room for one group, among keys and values; return the numbers as `Buffers`.

        A group is the (sequence, kv head) pairs that are loaded together.

        Args:
            short: whether the sequences are so short that all keys may be loaded before the values.
        """
        return divide_contiguous_buffers(sizes, buffers, short)

    def compute_row_shape(self, sizes):
        """Return the shape of an SBUF tile for a group's values, positions on the partitions: (128, unit, chunk, D).

        A unit is one kv head of one sequence; a group is the units that are loaded together; a chunk is 128
        positions.
        """
        return (PARTITIONS, sizes.units, sizes.cached, sizes.depth)

    def view_by_unit(self, tile, box):
        """Return `tile` itself: it is [128, unit, chunk, D] already.

        A unit is one kv head of one sequence; a chunk is 128 positions.
        """
        return tile

    def clear_unfilled(self, tile, units, sizes):
        """Write 0 to those elements of a tile [128, unit, chunk, D] in SBUF that loads of `units` units do not fill.

        Those are the units from `units` on, and the last chunk if it has fewer than 128 positions. A unit is one kv
        head of one sequence.
        """
        clear_unfilled_units(tile, units, sizes)

    def load_addresses(self, sizes):
        """Load the rows of the sequences into `self.row_numbers`, [1, B] int32 in SBUF."""
        self.row_numbers = load(self.cache_rows.ap(pattern=[[0, 1], [1, self.sequences]]), nl.int32)

    def create_key_buffers(self, key_tiles, sizes):
        """Return `key_tiles`: keys are loaded into the tiles that the score product takes."""
        return key_tiles

    def load_keys(self, tile, box, sizes):
        """Load the keys of a group from HBM into `tile` [D in tile, tile, unit, S] in SBUF, one DMA for each sequence.

        Needs `load_addresses` before. A unit is one kv head of one sequence; a group is the units that are loaded
        together.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
        """
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
        """Load the values of a group from HBM into `tile` [128, unit, chunk, D] in SBUF.

        Of the first S // 128 * 128 slots, partition p has S // 128 consecutive ones. The remaining slots are a chunk
        of their own. Needs `load_addresses` before. A unit is one kv head of one sequence; a group is the units that
        are loaded together.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
            queue: a queue of `nki_kernels.dma`; SYNC replaces STATIC, because addresses are known at run time only.
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
        """Return a view [partition, kv head, slot, D] of one sequence's values in HBM, in a row known at run time.

        A share is one core's part of a launch.

        Args:
            sequence: number of the sequence, counted from the share's first one.
            heads: (first kv head, end), counted from the share's first one.
            slot: first slot, counted from the share's first one.
            height: number of partitions.
            count: number of neighbouring slots on each partition.
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

    def store_prompt(self, prompts, head, first, end):
        """Write a head's new keys and values from SBUF to the cache row of their sequence, from slot 0 on.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence, with its tiles.
            first: number of the first block of 128 new tokens.
            end: number of the new token after the last one.
        """
        store_pieces(self, prompts, head, first, end)

    def locate_head(self, prompts, head):
        """Return the `HeadAddress` of a head in the cache row that its sequence has at run time."""
        row = self.cache_rows[head.sequence : head.sequence + 1, :]
        return HeadAddress(head.number, row, 0, 0)
