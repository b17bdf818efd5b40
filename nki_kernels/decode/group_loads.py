"""Keys and values of decode attention on their way: loads into the buffers of groups, transposes, and stores."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.launch import select_valid_keys
from nki_kernels.decode.share import wait_for_other_core
from nki_kernels.decode.sizes import count_units
from nki_kernels.decode.values import clear_values, load_new_values
from nki_kernels.dma import SCALAR, STATIC

LOADS_BEFORE_GATHER = 6
"""Groups whose loads are triggered before queries are gathered over ranks, which waits behind them in a full queue."""


class GroupLoads(nl.NKIObject):
    """The buffers of groups, each for one group after another; the loads of the first groups begin at once.

    key_tiles: [D in tile, tile, unit, S], as the product takes them, and loaded_keys as the cache has them.
    value_tiles, new_tiles: values of the cache, and new values [new token, unit, D], slices of new_values if there are
    any. Those of the groups behind a gather of queries come with `load_after_gather`. rows, seen_keys, output_weights:
    see `take_tokens`.
    """

    def __init__(self, launch):
        cache, sizes, groups = launch.cache, launch.sizes, launch.groups
        self.launch = launch
        self.rows, self.seen_keys, self.output_weights = None, None, None
        self.key_tiles, self.value_tiles, self.new_tiles = [], [], []
        for _ in range(sizes.scored_buffers):
            shape = (min(sizes.depth, nl.tile_size.pmax), sizes.depth_tiles, sizes.units, sizes.capacity)
            self.key_tiles.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
        used = min(sizes.value_buffers, len(groups))
        self.new_values = None
        if not sizes.stored:
            shape = (sizes.new, used * sizes.units, sizes.depth)
            self.new_values = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
            for index in range(used):
                self.new_tiles.append(self.new_values[:, index * sizes.units : (index + 1) * sizes.units, :])
        for index in range(sizes.value_buffers):
            tile = nl.ndarray(cache.compute_row_shape(sizes), dtype=sizes.dtype, buffer=nl.sbuf)
            self.value_tiles.append(tile)
            if index < len(groups):
                # Which bytes are defined may not depend on data.
                cache.clear_unfilled(tile, count_units(groups[index][0]), sizes)
        cache.load_addresses(sizes)
        self.loaded_keys = cache.create_key_buffers(self.key_tiles, sizes)
        most = min(len(groups), sizes.key_buffers)
        self.before_gather = most if launch.ranks is None else min(most, LOADS_BEFORE_GATHER)
        self.load_groups(0, self.before_gather)

    def load_after_gather(self):
        """Load the first groups that were left until queries are gathered."""
        self.load_groups(self.before_gather, min(len(self.launch.groups), self.launch.sizes.key_buffers))

    def load_groups(self, first, last):
        """Load the keys of groups first … last, and values as there is room for, or behind all keys."""
        sizes = self.launch.sizes
        for group in range(first, last):
            self.load_keys(group)
            if group < sizes.value_buffers and not sizes.keys_first:
                self.load_values(group, STATIC)
        if sizes.keys_first and last == len(self.launch.groups):
            self.load_first_values()

    def load_first_values(self):
        """Begin to load the values of the first groups."""
        for group in range(min(len(self.launch.groups), self.launch.sizes.value_buffers)):
            self.load_values(group, STATIC)

    def take_tokens(self, rows, seen_keys, output_weights):
        """Take the new tokens, whose values are loaded, and begin what depends on them.

        rows: see `TokenRows`. seen_keys: see `SeenKeys`. output_weights: loaded behind the keys, or None.
        """
        self.rows, self.seen_keys, self.output_weights = rows, seen_keys, output_weights
        self.load_first_new_values()
        if len(self.launch.groups) <= self.launch.sizes.key_buffers:
            self.issue_after_keys()
        # Each item transposes for the group behind its own, so the first group is transposed before the pipeline.
        self.transpose_group(0, 0)
        self.transpose_group(0, 1)

    def load_keys(self, group):
        """Load the keys of a group; behind the last load the new keys may be written."""
        tile = self.loaded_keys[group % self.launch.sizes.key_buffers]
        self.launch.cache.load_keys(tile, self.launch.groups[group][0], self.launch.sizes)

    def load_values(self, group, queue):
        """Load the values of a group."""
        tile = self.value_tiles[group % self.launch.sizes.value_buffers]
        self.launch.cache.load_values(tile, self.launch.groups[group][0], self.launch.sizes, queue)

    def load_first_new_values(self):
        """Load the new tokens' values of the groups that have a buffer; one DMA for complete sequences."""
        sizes, groups = self.launch.sizes, self.launch.groups
        if sizes.stored:
            return
        count = len(self.new_tiles)
        together = sizes.units % sizes.kv_heads == 0
        for group in range(count - 1):
            together = together and count_units(groups[group][0]) == sizes.units
        if together:
            box = (0, groups[count - 1][0][1], 0, sizes.kv_heads)
            load_new_values(self.new_values, self.rows.v, box, sizes, self.launch.step.scales)
            return
        for group in range(count):
            self.load_new_values(group)

    def load_new_values(self, group):
        """Load the values of the new tokens of a group, if they are not in the caches."""
        sizes = self.launch.sizes
        if not sizes.stored:
            tile = self.new_tiles[group % sizes.value_buffers]
            load_new_values(tile, self.rows.v, self.launch.groups[group][0], sizes, self.launch.step.scales)

    def load_later_keys(self, group):
        """Load keys into the buffer of a group that is done with them; behind the last load new ones are written."""
        sizes, count = self.launch.sizes, len(self.launch.groups)
        later = group + sizes.key_buffers
        if later < count:
            self.load_keys(later)
            if later + 1 == count:
                if sizes.keys_first:
                    self.load_first_values()
                self.issue_after_keys()

    def load_later_values(self, group):
        """Load values into the buffers of a group that is done with them."""
        later = group + self.launch.sizes.value_buffers
        if later < len(self.launch.groups):
            self.load_values(later, SCALAR)
            self.load_new_values(later)

    def view_cached_values(self, group):
        """Return the tile of a group's cached values: [128, unit, chunk, D]."""
        tile = self.value_tiles[group % self.launch.sizes.value_buffers]
        return self.launch.cache.view_by_unit(tile, self.launch.groups[group][0])

    def transpose_group(self, group, half):
        """Transpose a half of the keys of a group, if they come as rows; then load later ones into their buffer."""
        sizes, cache, groups = self.launch.sizes, self.launch.cache, self.launch.groups
        if not cache.transposes_keys or group >= len(groups):
            return
        box = groups[group][0]
        rows = cache.view_by_unit(self.loaded_keys[group % sizes.key_buffers], box)
        tile = self.key_tiles[group % sizes.scored_buffers]
        first, last = sizes.full * half // 2, sizes.full * (half + 1) // 2
        if nisa.get_nc_version() == nisa.nc_version.gen2:
            # Its transposes multiply with zeros, so that one key that is not a number would spoil all of a chunk.
            clear_values(rows, select_valid_keys(self.seen_keys.mark_seen_keys(box)), first, last, sizes)
        cache.transpose_keys(tile, rows, box, (first, last), sizes)
        if half == 1:
            self.load_later_keys(group)

    def transpose_next(self, item, half):
        """Transpose a half of the keys of the group after an item's, beside the last item of this one.

        In halves, so that the exponentials, on the engine that copies transposed keys, do not wait for all of them. On
        gen2 both follow the exponentials, because Vector, which finds the maximum, would first wait for the keys to
        clear them.
        """
        if self.launch.is_first_of_group(item + 1):
            group = self.launch.find_group(item) + 1
            if nisa.get_nc_version() == nisa.nc_version.gen2:
                if half == 1:
                    self.transpose_group(group, 0)
                    self.transpose_group(group, 1)
            else:
                self.transpose_group(group, half)

    def issue_after_keys(self):
        """Load weights of the output projection behind the last load of keys, and store the new keys.

        With all keys first these stores come when all weights are found: no tile of theirs takes the place of what the
        stores still read.
        """
        sizes = self.launch.sizes
        if self.output_weights is not None:
            self.output_weights.load_first_heads()
        if not sizes.keys_first and not sizes.stored:
            self.store_keys()

    def store_keys(self):
        """Store the new keys, behind the last load of keys in program order: all writes of a cache are one tensor's.

        No core writes while the other one still reads: block tables may name any page behind the last position.
        """
        launch, rows = self.launch, self.rows
        wait_for_other_core(launch.share.cores, launch.cache.k_cache, nisa.engine.gpsimd)
        launch.cache.store_keys(rows.key_rows, rows.key_addresses, launch.sizes, launch.divided)

    def store_values(self):
        """Store the new values."""
        launch, rows = self.launch, self.rows
        wait_for_other_core(launch.share.cores, launch.cache.v_cache, nisa.engine.gpsimd)
        launch.cache.store_values(rows.value_rows, rows.value_addresses, launch.sizes, launch.divided)
