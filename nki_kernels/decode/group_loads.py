"""Keys and values of decode attention between HBM and SBUF: loads into buffers, transposes, and stores of new ones.

`decode.attend` and `decode.block` make a `GroupLoads`, and `decode.pipeline` calls it for the later groups.

A *unit* is one kv head of one sequence. A *group* is a set of units whose keys are loaded together, numbered in the
order of `launch.groups`. An *item* is a group with some of its queries, one pass of the pipeline. A *chunk* is 128
positions.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.launch import select_valid_keys
from nki_kernels.decode.share import wait_for_other_core
from nki_kernels.decode.sizes import count_units
from nki_kernels.decode.values import clear_values, load_new_values
from nki_kernels.dma import SCALAR, STATIC

LOADS_BEFORE_GATHER = 6
"""Groups that are loaded before queries are gathered over ranks: the gather would wait for more loads in its queue."""


class GroupLoads(nl.NKIObject):
    """SBUF buffers for keys and values of groups, reused by later groups; loads of the first groups begin at once.

    key_tiles: keys as the score product takes them, [D in tile, tile, unit, S]. loaded_keys: buffers that DMAs fill,
    the same tiles or rows that are transposed to them. value_tiles: cached values. new_tiles: values of new tokens
    [new token, unit, D], views of the one tile new_values; none if the caches hold them.

    With ranks that divide positions, only LOADS_BEFORE_GATHER groups are loaded at once; `load_after_gather` loads
    the others that have buffers. rows, seen_keys, output_weights: the arguments of `take_tokens`.
    """

    def __init__(self, launch):
        cache, sizes, groups = launch.cache, launch.sizes, launch.groups
        self.launch = launch
        self.rows, self.seen_keys, self.output_weights = None, None, None
        self.key_tiles, self.value_tiles, self.new_tiles = [], [], []
        for _ in range(sizes.scored_buffers):
            shape = (min(sizes.depth, nl.tile_size.pmax), sizes.depth_tiles, sizes.units, sizes.capacity)
            self.key_tiles.append(nl.ndarray(shape, dtype=sizes.operand, buffer=nl.sbuf))
        used = min(sizes.value_buffers, len(groups))
        self.new_values = None
        if not sizes.stored:
            shape = (sizes.new, used * sizes.units, sizes.depth)
            self.new_values = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
            for index in range(used):
                self.new_tiles.append(self.new_values[:, index * sizes.units : (index + 1) * sizes.units, :])
        for index in range(sizes.value_buffers):
            tile = nl.ndarray(cache.compute_row_shape(sizes), dtype=sizes.operand, buffer=nl.sbuf)
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
        """Load the groups that have buffers and were not loaded when the object was made, because ranks gather queries.

        Does nothing if no ranks divide positions. A group is the (sequence, kv head) pairs that are loaded together.
        """
        self.load_groups(self.before_gather, min(len(self.launch.groups), self.launch.sizes.key_buffers))

    def load_groups(self, first, last):
        """Begin to load cached keys of groups `first` … `last` - 1, and cached values of those with value buffers.

        With `sizes.keys_first` no values are loaded until the keys of the launch's last group are. A group is the
        (sequence, kv head) pairs that are loaded together.
        """
        sizes = self.launch.sizes
        for group in range(first, last):
            self.load_keys(group)
            if group < sizes.value_buffers and not sizes.keys_first:
                self.load_values(group, STATIC)
        if sizes.keys_first and last == len(self.launch.groups):
            self.load_first_values()

    def load_first_values(self):
        """Begin to load the cached values of the first groups, as many as there are value buffers.

        A group is the (sequence, kv head) pairs that are loaded together.
        """
        for group in range(min(len(self.launch.groups), self.launch.sizes.value_buffers)):
            self.load_values(group, STATIC)

    def take_tokens(self, rows, seen_keys, output_weights):
        """Keep the new tokens and begin what needs them: loads of new values, transposes of the first group's keys.

        If no later keys remain to be loaded, it also calls `issue_after_keys`. A group is the (sequence, kv head)
        pairs that are loaded together.

        Args:
            rows: `TokenRows`.
            seen_keys: `SeenKeys`.
            output_weights: `OutputWeights`, loaded after the last keys, or None.
        """
        self.rows, self.seen_keys, self.output_weights = rows, seen_keys, output_weights
        self.load_first_new_values()
        if len(self.launch.groups) <= self.launch.sizes.key_buffers:
            self.issue_after_keys()
        # Each item transposes for the group behind its own, so the first group is transposed before the pipeline.
        self.transpose_group(0, 0)
        self.transpose_group(0, 1)

    def load_keys(self, group):
        """Load the cached keys of group number `group` from HBM into its buffer in `loaded_keys`.

        A group is the (sequence, kv head) pairs that are loaded together.
        """
        tile = self.loaded_keys[group % self.launch.sizes.key_buffers]
        self.launch.cache.load_keys(tile, self.launch.groups[group][0], self.launch.sizes)

    def load_values(self, group, queue):
        """Load the cached values of group number `group` from HBM into its tile in `value_tiles`, on queue `queue`.

        A group is the (sequence, kv head) pairs that are loaded together.

        Args:
            queue: a queue of `nki_kernels.dma`, such as STATIC.
        """
        tile = self.value_tiles[group % self.launch.sizes.value_buffers]
        self.launch.cache.load_values(tile, self.launch.groups[group][0], self.launch.sizes, queue)

    def load_first_new_values(self):
        """Load the new tokens' values of the first groups into `new_tiles`; do nothing if the caches hold them.

        One DMA brings all of them if every group consists of whole sequences of equal number, else each group takes
        its own. A group is the (sequence, kv head) pairs that are loaded together.
        """
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
        """Load the new tokens' values of group number `group` into its tile in `new_tiles`.

        Does nothing if the caches hold them. A group is the (sequence, kv head) pairs that are loaded together.
        """
        sizes = self.launch.sizes
        if not sizes.stored:
            tile = self.new_tiles[group % sizes.value_buffers]
            load_new_values(tile, self.rows.v, self.launch.groups[group][0], sizes, self.launch.step.scales)

    def load_later_keys(self, group):
        """Load the keys of group `group + sizes.key_buffers` into the buffer that `group` no longer needs.

        Does nothing if there is no such group. After the keys of the last group it calls `issue_after_keys`, and with
        `sizes.keys_first` it loads the first values before. A group is the (sequence, kv head) pairs that are loaded
        together.
        """
        sizes, count = self.launch.sizes, len(self.launch.groups)
        later = group + sizes.key_buffers
        if later < count:
            self.load_keys(later)
            if later + 1 == count:
                if sizes.keys_first:
                    self.load_first_values()
                self.issue_after_keys()

    def load_later_values(self, group):
        """Load the values of group `group + sizes.value_buffers` into the tiles that `group` no longer needs.

        Loads cached and new values. Does nothing if there is no such group. A group is the (sequence, kv head) pairs
        that are loaded together.
        """
        later = group + self.launch.sizes.value_buffers
        if later < len(self.launch.groups):
            self.load_values(later, SCALAR)
            self.load_new_values(later)

    def view_cached_values(self, group):
        """Return a view [128, unit, chunk, D] of the SBUF tile with the cached values of group number `group`.

        A unit is one kv head of one sequence; a group is the units that are loaded together; a chunk is 128
        positions.
        """
        tile = self.value_tiles[group % self.launch.sizes.value_buffers]
        return self.launch.cache.view_by_unit(tile, self.launch.groups[group][0])

    def unpack_values(self, group):
        """Convert the cached values of group number `group`, in pages of 4 bits, to whole numbers in their tile.

        A group is the (sequence, kv head) pairs that are loaded together.
        """
        tile = self.value_tiles[group % self.launch.sizes.value_buffers]
        self.launch.cache.unpack_values(tile, self.seen_keys.valid[group], self.launch.sizes)

    def transpose_group(self, group, half):
        """Transpose half of a group's keys from rows [position, D] to `key_tiles`: [D in tile, tile, unit, S] in SBUF.

        Does nothing for contiguous caches, whose keys need no transpose, and for a group beyond the last. After the
        second half it calls `load_later_keys`. On gen2, and of fp8, unseen keys are zeroed first. A unit is one kv
        head of one sequence; a group is the units that are loaded together; a chunk is 128 positions.

        Args:
            group: number of the group.
            half: 0 for the first half of the chunks, 1 for the second.
        """
        sizes, cache, groups = self.launch.sizes, self.launch.cache, self.launch.groups
        if not cache.transposes_keys or group >= len(groups):
            return
        box = groups[group][0]
        loaded = self.loaded_keys[group % sizes.key_buffers]
        if half == 0 and sizes.newest > 0:
            cache.widen_keys(loaded, sizes)
        rows = cache.view_by_unit(loaded, box)
        tile = self.key_tiles[group % sizes.scored_buffers]
        first, last = sizes.full * half // 2, sizes.full // 2 if half == 0 else sizes.cached
        if nisa.get_nc_version() == nisa.nc_version.gen2 or sizes.operand != sizes.dtype:
            # One key that is not a number would spoil all of a chunk.
            clear_values(rows, select_valid_keys(self.seen_keys.mark_seen_keys(box)), first, last, sizes)
        cache.transpose_keys(tile, rows, box, (first, last), sizes)
        if half == 1:
            self.load_later_keys(group)

    def transpose_next(self, item, half):
        """Transpose half of the next group's keys if `item` is the last item of its group, else do nothing.

        The halves are issued apart, so that exponentials do not wait for both: the Scalar engine computes them and
        copies transposed keys. On gen2 half 0 does nothing and half 1 transposes both, after the exponentials. There
        Vector, which finds the maximum, would first wait for the keys to clear them. A group is the (sequence, kv
        head) pairs that are loaded together; an item is a group with some of its queries.
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
        """Issue what follows the last load of keys: loads of output projection weights, if any, and stores of new keys.

        With `sizes.keys_first` the keys are not stored here. `decode.pipeline` stores them when all weights of the
        softmax are computed, so that no new tile takes the SBUF of what the stores still read.
        """
        sizes = self.launch.sizes
        if self.output_weights is not None:
            self.output_weights.load_first_heads()
        if not sizes.keys_first and not sizes.stored:
            self.store_keys()

    def store_keys(self):
        """Write the new tokens' keys to the cache in HBM, after the last load of keys in program order.

        Two cores wait for each other first: block tables may name any page beyond a sequence's last position, so that
        one core may still read what the other one writes.
        """
        launch, rows = self.launch, self.rows
        wait_for_other_core(launch.share.cores, launch.cache.k_cache, nisa.engine.gpsimd)
        launch.cache.store_keys(rows.key_rows, rows.key_addresses, launch.sizes, launch.divided)

    def store_values(self):
        """Write the new tokens' values to the cache in HBM, after both cores have loaded the cached ones."""
        launch, rows = self.launch, self.rows
        wait_for_other_core(launch.share.cores, launch.cache.v_cache, nisa.engine.gpsimd)
        launch.cache.store_values(rows.value_rows, rows.value_addresses, launch.sizes, launch.divided)
