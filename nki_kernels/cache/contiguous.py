"""Contiguous caches: row b of keys [B, Hk, D, S] and values [B, Hk, S, D] holds sequence b.

`cache.create` makes a `ContiguousCache` or another cache with the same methods; decode and prompt kernels load and
store through them.

A *unit* is one kv head of one sequence. A *box* of units is (first sequence, end, first kv head, end), counted from
the first ones of a core's share. A *group* is a box that is loaded together. A *slot* is the place of a position in a
cache; a *chunk* is 128 slots. A *piece* of a prompt is some whole blocks of 128 new positions, or a last short block.
"""

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
    """Contiguous keys and values in HBM, and the sequences, kv heads and slots that a core's share has of them.

    `share` None means all of them. `depth` is D; `capacity` is the number of slots. `tiles_per_position` counts the
    SBUF tiles that hold a loaded position, one of keys and one of values.
    """

    transposes_keys = False
    """Whether keys are loaded as rows and transposed on chip; here they come with D on the partitions."""
    tiles_per_position = 2
    shares_pages = False
    keeps_heads_together = False
    newest_positions = 0
    slots_together = PARTITIONS
    """Cores that divide the slots cut them at multiples of this number only."""

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
        """Raise AssertionError unless v_cache is [B, Hk, S, D], with the sizes of k_cache.

        `tokens` is not checked: any number of tokens may be new.
        """
        check_values(self, self.depth)

    def check_prompts(self, rows):
        """Raise AssertionError unless v_cache is [B, Hk, S, Dv], with the sizes of k_cache except for D.

        `rows`, the number of new tokens, is not checked.
        """
        check_values(self, self.value_depth)

    def select_share(self, share):
        """Return a cache of the same tensors for the sequences, kv heads and slots of a `Share`."""
        return ContiguousCache(self.k_cache, self.v_cache, share)

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
        """Do nothing: addresses are known before the launch."""

    def create_key_buffers(self, key_tiles, sizes):
        """Return `key_tiles`: keys are loaded into the tiles that the score product takes."""
        return key_tiles

    def load_keys(self, tile, box, sizes):
        """Load the keys of a group from HBM into `tile` [D in tile, tile, unit, S] in SBUF.

        The DMA casts them to the dtype of the tile. A unit is one kv head of one sequence; a group is the units that
        are loaded together.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
        """
        units = count_units(box)
        first_slot = self.first_slot
        source = self.k_cache[:, :, :, first_slot : first_slot + sizes.capacity]
        source = self.select_box(source, box)
        for d in range(sizes.depth_tiles):
            start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
            rows = source[:, :, start:stop, :].permute((2, 0, 1, 3))
            transfer(tile[0 : stop - start, d, 0:units, :], rows, STATIC)

    def load_values(self, tile, box, sizes, queue):
        """Load the values of a group from HBM into `tile` [128, unit, chunk, D] in SBUF.

        Of the first S // 128 * 128 slots, partition p has S // 128 consecutive ones, which are neighbours in HBM. The
        remaining slots are a chunk of their own. A unit is one kv head of one sequence; a group is the units that are
        loaded together.

        Args:
            box: (first sequence, end, first kv head, end) of the group.
            queue: a queue of `nki_kernels.dma`.
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
        """Return a view of a box's sequences (axis 0) and kv heads (axis 1), counted from the share's first ones.

        A share is one core's part of a launch.
        """
        sequence, head = self.first_sequence, self.first_head
        return array[sequence + box[0] : sequence + box[1], head + box[2] : head + box[3]]

    def compute_new_addresses(self, launch, positions, heights):
        """Return the addresses of the new tokens' rows (token, kv head): one list for keys, one for values.

        A list has columns [height, 1] int32 in SBUF, one for each of `heights`. Addresses count elements of keys, and
        rows of D elements of values. A row that another core or rank writes gets an address beyond the cache.

        Args:
            launch: the `DecodeLaunch`.
            positions: [T, 1] int32 in HBM.
            heights: number of rows in each column.
        """
        sizes = launch.sizes
        numbers = repeat_for_heads(positions, sizes, SCALAR)
        slots = compute_slots(numbers, sizes.ranks)
        sequences, kv_heads, depth, capacity = self.k_cache.shape
        first_row = self.first_sequence * kv_heads + self.first_head
        columns = []
        for head_rows in (depth * capacity, capacity):
            rows = compute_row_starts(slots, first_row * head_rows, kv_heads, head_rows, sizes)
            if launch.divided:
                replace_by_end(rows, is_written_elsewhere(numbers, launch), sequences * kv_heads * head_rows)
            columns.append(split_into_columns(rows, heights, sizes))
        return columns[0], columns[1]

    def store_keys(self, rows, addresses, sizes, divided):
        """Write rows (token, kv head) of new keys from SBUF to the cache in HBM, where their elements are S apart.

        Args:
            rows: SBUF tiles [height, D].
            addresses: the first list of `compute_new_addresses`.
            divided: whether other cores or ranks write some of the rows, which are skipped.
        """
        scatter(self.k_cache, 1, self.k_cache.shape[3], rows, addresses, sizes, divided)

    def store_values(self, rows, addresses, sizes, divided):
        """Write rows (token, kv head) of new values from SBUF to the cache in HBM.

        Args:
            rows: SBUF tiles [height, D].
            addresses: the second list of `compute_new_addresses`.
            divided: whether other cores or ranks write some of the rows, which are skipped.
        """
        scatter(self.v_cache, sizes.depth, 1, rows, addresses, sizes, divided)

    def find_prefix(self, prompts, sequence):
        """Return None: the positions of a prefix are consecutive, so `load_prefix` needs no table of rows."""
        return None

    def load_prefix(self, prompts, head, first, keys, values):
        """Load cached keys and values of a head from position 128 * `first` on, as many positions as the tiles hold.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence.
            first: number of the first block of 128 positions.
            keys: [D in tile, block, tile, key] in SBUF, which is written.
            values: [key, block, D] in SBUF, which is written.
        """
        used, count, _ = values.shape
        start = first * PARTITIONS
        end = start + used * count
        for d in range(prompts.depth_tiles):
            height = prompts.heights[d]
            row = d * prompts.tile_depth
            rows = self.k_cache[head.sequence, head.number, row : row + height]
            source = rows[:, start:end].reshape_dim(1, (count, used))
            nisa.dma_copy(dst=keys[0:height, :, d, :], src=source)
        rows = self.v_cache[head.sequence, head.number, start:end]
        nisa.dma_copy(dst=values, src=rows.reshape_dim(0, (count, used)).permute((1, 0, 2)))

    def load_stored(self, prompts, head):
        """Load a head's new keys and values, which an earlier launch stored, into its two tiles in SBUF.

        The tiles are `head.keys` and `head.values`; DMA casts what it loads. The Scalar engine triggers these loads:
        the transposes of weights in the queue of the others need not wait.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence.
        """
        address = self.locate_head(prompts, head)
        for piece in list_new_pieces(prompts):
            for depth_range in prompts.depth_ranges:
                source = view_key_piece(self.k_cache, prompts, depth_range, piece, address)
                transfer(view_new_keys(prompts, head, depth_range, piece), source, SCALAR)
        for piece in list_new_pieces(prompts):
            transfer(
                view_new_values(prompts, head, piece),
                view_value_piece(self.v_cache, prompts, piece, address),
                SCALAR,
            )

    def store_prompt(self, prompts, head, first, end):
        """Write a head's new keys and values from SBUF to the cache, behind the positions that are valid at run time.

        Args:
            prompts: `Prompts`, the launch of attention_prefill.
            head: `Head`, a kv head of one sequence, with its tiles.
            first: number of the first block of 128 new tokens.
            end: number of the new token after the last one.
        """
        store_pieces(self, prompts, head, first, end)

    def locate_head(self, prompts, head):
        """Return the `HeadAddress` of a head's first new key and value.

        With a prefix, it is moved at run time by the sequence's first new position, which `prompts.positions` has.
        """
        row = head.sequence * prompts.kv_heads + head.number
        if prompts.prefix == 0:
            return HeadAddress(row, None, 3, 2)
        first = head.sequence * prompts.queries
        return HeadAddress(row, prompts.positions[first : first + 1, :], 3, 2)


@dataclass
class HeadAddress(nl.NKIObject):
    """Address of a head's keys and values in contiguous caches: a row known now, and an offset read at run time.

    row: number of the head, sequence * Hk + kv head. offset: [1, 1] int32 in HBM or None; it counts along axis
    `key_dim` of the keys and axis `value_dim` of the values.
    """

    row: int
    offset: object
    key_dim: int
    value_dim: int


def check_values(cache, depth):
    """Raise AssertionError unless `cache.v_cache` is [rows, Hk, S, depth], where k_cache is [rows, Hk, D, S]."""
    rows, kv_heads, _, capacity = cache.k_cache.shape
    shape = (rows, kv_heads, capacity, depth)
    assert cache.v_cache.shape == shape, (
        f"v_cache is {list(shape)} beside k_cache {cache.k_cache.shape}, not {cache.v_cache.shape}"
    )


def store_pieces(cache, prompts, head, first, end):
    """Write a head's new keys and values from SBUF to contiguous caches in HBM, piece by piece.

    Args:
        cache: `ContiguousCache` or `RowCache`, which says where the head begins.
        prompts: `Prompts`, the launch of attention_prefill.
        head: `Head`, a kv head of one sequence, with its tiles.
        first: number of the first block of 128 new tokens.
        end: number of the new token after the last one.
    """
    address = cache.locate_head(prompts, head)
    for piece in split_into_pieces(first * PARTITIONS, end):
        for depth_range in prompts.depth_ranges:
            target = view_key_piece(cache.k_cache, prompts, depth_range, piece, address)
            transfer(target, view_new_keys(prompts, head, depth_range, piece), COMPILER)
        target = view_value_piece(cache.v_cache, prompts, piece, address)
        transfer(target, view_new_values(prompts, head, piece), COMPILER)


def view_key_piece(cache, prompts, depth_range, piece, address):
    """Return a view of the keys in HBM that a piece of new tokens takes: [D in tile, block, tile, key].

    Args:
        cache: keys [rows, Hk, D, S].
        prompts: `Prompts`, the launch of attention_prefill.
        depth_range: (first tile of D, end, height), tiles of equal height.
        piece: the blocks of new positions.
        address: the `HeadAddress`.
    """
    first_tile, end, height = depth_range
    capacity = cache.shape[3]
    row = address.row * prompts.depth + first_tile * prompts.tile_depth
    return cache.ap(
        pattern=[
            [capacity, height],
            [piece.used, piece.count],
            [prompts.tile_depth * capacity, end - first_tile],
            [1, piece.used],
        ],
        offset=row * capacity + piece.start,
        scalar_offset=address.offset,
        indirect_dim=address.key_dim,
    )


def view_value_piece(cache, prompts, piece, address):
    """Return a view of the values in HBM that a piece of new tokens takes: [key, block, D].

    Args:
        cache: values [rows, Hk, S, D].
        prompts: `Prompts`, the launch of attention_prefill.
        piece: the blocks of new positions.
        address: the `HeadAddress`.
    """
    depth = prompts.value_depth
    return cache.ap(
        pattern=[[depth, piece.used], [piece.used * depth, piece.count], [1, depth]],
        offset=(address.row * cache.shape[2] + piece.start) * depth,
        scalar_offset=address.offset,
        indirect_dim=address.value_dim,
    )


def measure_range(bounds):
    """Return the start and the length of a range (start, end)."""
    return bounds[0], bounds[1] - bounds[0]


def choose_contiguous_units(sizes, room, unit_bytes, load_units):
    """Return how many units make a group of contiguous caches, as whole sequences or as kv heads of one sequence.

    Groups of stored keys are larger, see STORED_COLUMNS. A unit is one kv head of one sequence; a group is the units
    that are loaded together.

    Args:
        room: most units whose scores fit into PSUM.
        unit_bytes: bytes per partition of the keys of a unit.
        load_units: units whose keys make a DMA of good size.
    """
    enough = load_units
    if sizes.stored:
        columns = blocks(STORED_COLUMNS, sizes.width * sizes.chunks)
        enough = max(load_units, min(columns, STORED_BYTES // unit_bytes))
    most = min(room, enough, sizes.sequences * sizes.kv_heads)
    return count_units(divide_into_boxes(sizes.sequences, sizes.kv_heads, max(1, most))[0])


def divide_contiguous_buffers(sizes, buffers, short):
    """Divide `buffers` tiles, each with room for one group, among keys and values; return the numbers as `Buffers`.

    All keys come before the values if `short`, unless the caches hold the new keys or ranks divide positions. A group
    is the (sequence, kv head) pairs that are loaded together.

    Args:
        short: whether the sequences are so short that all keys may be loaded first.
    """
    keys_first = short and not sizes.stored and sizes.ranks == 1
    # Groups of fp8 are loaded in half of the time, so fewer ones hide the start of a load.
    if keys_first or sizes.stored or sizes.operand != sizes.dtype:
        values = buffers // 2
    else:
        most = VALUE_BUFFERS if sizes.ranks == 1 else buffers // VALUE_PART_OVER_RANKS
        values = min(max(most, VALUE_BUFFERS), buffers // 2)
    return Buffers(buffers - values, values, buffers - values, keys_first)


def clear_unfilled_units(tile, units, sizes):
    """Write 0 to those elements of a tile [128, unit, chunk, D] in SBUF that loads of `units` units do not fill.

    Those are the units from `units` on, and the last chunk if it has fewer than 128 positions. A unit is one kv head
    of one sequence.
    """
    if units < sizes.units:
        nisa.memset(dst=tile[:, units : sizes.units, :, :], value=0.0)
    if sizes.remaining > 0:
        nisa.memset(dst=tile[:, 0:units, sizes.full, :], value=0.0)
