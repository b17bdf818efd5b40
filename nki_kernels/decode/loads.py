"""Keys and values of decode attention on their way: loads into the buffers of groups, transposes, and stores."""

from __future__ import annotations

import nki.isa as nisa

from nki_kernels.decode.buffers import allocate_buffers, clear_values, load_new_values
from nki_kernels.decode.output import OutputWeights
from nki_kernels.decode.share import wait_for_other_core
from nki_kernels.decode.sizes import units_in
from nki_kernels.decode.work import seen_keys, valid_keys
from nki_kernels.dma import STATIC

LOADS_BEFORE_GATHER = 6
"""Groups whose loads are triggered before queries are gathered over ranks, which waits behind them in a full queue."""


def bring_first(work):
    """Begin to load the first groups; those behind a gather of queries come with `bring_after_gather`."""
    sizes = work.sizes
    work.key_tiles, work.value_tiles, work.new_values = allocate_buffers(work.cache, sizes, work.groups)
    work.cache.load_addresses(sizes)
    work.loaded_keys = work.cache.key_buffers(work.key_tiles, sizes)
    most = min(len(work.groups), sizes.key_buffers)
    work.brought = most if work.ranks is None else min(most, LOADS_BEFORE_GATHER)
    bring_groups(work, 0, work.brought)


def bring_after_gather(work):
    """Load the first groups that `bring_first` left."""
    most = min(len(work.groups), work.sizes.key_buffers)
    bring_groups(work, work.brought, most)


def bring_groups(work, first, last):
    """Load the keys of groups first … last, and values as there is room for, or behind all keys."""
    sizes = work.sizes
    for group in range(first, last):
        bring_keys(work, group)
        if group < sizes.value_buffers and not sizes.keys_first:
            bring_values(work, group, STATIC)
    if sizes.keys_first and last == len(work.groups):
        bring_first_values(work)


def bring_first_values(work):
    """Begin to load the values of the first groups."""
    for group in range(min(len(work.groups), work.sizes.value_buffers)):
        bring_values(work, group, STATIC)


def take_tokens(work, queries, keys, key_rows, value_rows):
    """The new tokens, in the layouts of `transposed_tokens` and as rows that the caches take, if these lack them."""
    work.queries, work.keys, work.key_rows, work.value_rows = queries, keys, key_rows, value_rows
    bring_first_new_values(work)
    if len(work.groups) <= work.sizes.key_buffers:
        follow_keys(work)
    transpose_group(work, 0, 0)
    transpose_group(work, 0, 1)


def bring_keys(work, group):
    """Load the keys of a group; behind the last load the new keys may be written."""
    tile = work.loaded_keys[group % work.sizes.key_buffers]
    work.cache.load_keys(tile, work.groups[group][0], work.sizes)


def bring_values(work, group, queue):
    """Load the values of a group."""
    tile = work.value_tiles[group % work.sizes.value_buffers][0]
    work.cache.load_values(tile, work.groups[group][0], work.sizes, queue)


def bring_first_new_values(work):
    """Load the new tokens' values of the groups that have a buffer; one DMA for whole sequences."""
    sizes = work.sizes
    if sizes.stored:
        return
    count = min(len(work.groups), sizes.value_buffers)
    whole = sizes.units % sizes.kv_heads == 0
    for group in range(count - 1):
        whole = whole and units_in(work.groups[group][0]) == sizes.units
    if whole:
        end = work.groups[count - 1][0][1]
        load_new_values(work.new_values, work.v, (0, end, 0, sizes.kv_heads), sizes, work.step.scales)
        return
    for group in range(count):
        bring_new_values(work, group)


def bring_new_values(work, group):
    """Load the values of the new tokens of a group, if they are not in the caches."""
    if work.sizes.stored:
        return
    new = work.value_tiles[group % work.sizes.value_buffers][1]
    load_new_values(new, work.v, work.groups[group][0], work.sizes, work.step.scales)


def bring_later_keys(work, group):
    """Load keys into the buffer of a group that is done with them; behind the last load the new ones are written."""
    sizes = work.sizes
    later = group + sizes.key_buffers
    if later < len(work.groups):
        bring_keys(work, later)
        if later + 1 == len(work.groups):
            if sizes.keys_first:
                bring_first_values(work)
            follow_keys(work)


def transpose_group(work, group, half):
    """Transpose a half of the keys of a group, if they come as rows; then their rows make room for a later group."""
    sizes = work.sizes
    if not work.cache.transposes_keys or group >= len(work.groups):
        return
    box = work.groups[group][0]
    rows = work.cache.by_unit(work.loaded_keys[group % sizes.key_buffers], box)
    tile = work.key_tiles[group % sizes.scored_buffers]
    first, last = sizes.full * half // 2, sizes.full * (half + 1) // 2
    if nisa.get_nc_version() == nisa.nc_version.gen2:
        # Its transposes multiply with zeros, so that one key that is not a number would spoil all of a chunk.
        clear_values(rows, valid_keys(seen_keys(work, box)), first, last, sizes)
    work.cache.transpose_keys(tile, rows, box, (first, last), sizes)
    if half == 1:
        bring_later_keys(work, group)


def transpose_next(work, item, half):
    """A half of the transposes of the group after an item's, beside the last item of this one.

    In halves, so that the exponentials, on the engine that copies transposed keys, do not wait for all of them. On gen2
    both follow the exponentials, because Vector, which finds the maximum, would first wait for the keys to clear them.
    """
    if work.begins_group(item + 1):
        following = item // len(work.parts) + 1
        if nisa.get_nc_version() == nisa.nc_version.gen2:
            if half == 1:
                transpose_group(work, following, 0)
                transpose_group(work, following, 1)
        else:
            transpose_group(work, following, half)


def follow_keys(work):
    """What comes behind the last load of keys: the weights of the output projection, and the new keys' stores.

    With all keys first these stores come when all weights are found: no tile of theirs takes the place of what the
    stores still read.
    """
    if work.w_o is not None:
        work.output = OutputWeights(work.w_o, work.sizes)
    if not work.sizes.keys_first and not work.sizes.stored:
        write_keys(work)


def write_keys(work):
    """Store the new keys, behind the last load of keys in program order: all writes of a cache are one tensor's.

    No core writes while the other one still reads: block tables may name any page behind the last position.
    """
    wait_for_other_core(work.share.cores, work.cache.k_cache, nisa.engine.gpsimd)
    work.cache.store_keys(work.key_rows, work.key_addresses, work.sizes, work.divided)


def write_values(work):
    """Store the new values."""
    wait_for_other_core(work.share.cores, work.cache.v_cache, nisa.engine.gpsimd)
    work.cache.store_values(work.value_rows, work.value_addresses, work.sizes, work.divided)
