"""What one core takes of a launch on two: kv heads where their number is even, else sequences, else slots.

A *slot* is a place for a position in a cache. Cores that divide the slots of one sequence merge their outputs; each
writes the new keys and values whose slots are its own, so no core writes what the other one reads.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.sizes import Sizes
from nki_kernels.tiles import PARTITIONS, blocks

CORES = 2
"""Physical cores of a logical core that is divided."""


LEAST_SLOTS = 8192
"""Slots of all kv heads that are worth dividing: an exchange of partial outputs takes as long as 4096 slots."""


class Share(nl.NKIObject):
    """A range of sequences, of kv heads and of slots, one of as many as there are `cores`.

    `merged`: whether the other core has slots of the same sequences and heads.
    """

    def __init__(self, sequences, kv_heads, slots):
        self.cores = 1
        self.merged = False
        self.sequences = sequences
        self.kv_heads = kv_heads
        self.slots = slots

    def rows(self, tensor, sequences):
        """The rows of the share's sequences, of a tensor with as many rows for each of `sequences`; None stays."""
        if tensor is None:
            return None
        each = tensor.shape[0] // sequences
        return tensor[self.sequences[0] * each : self.sequences[1] * each]

    def columns(self, tensor, kv_heads):
        """The columns of the share's kv heads, of a tensor with as many columns for each of `kv_heads`; None stays."""
        if tensor is None:
            return None
        each = tensor.shape[1] // kv_heads
        return tensor[:, self.kv_heads[0] * each : self.kv_heads[1] * each]

    def part(self, tensor, sizes):
        """Rows and columns of the share, of a tensor of the new tokens' heads; `sizes` are those of the launch."""
        return self.columns(self.rows(tensor, sizes.sequences), sizes.kv_heads)

    def pages(self, block_tables, sizes):
        """The pages of the share's sequences that hold its slots."""
        if block_tables is None:
            return None
        first, end = self.slots
        return self.rows(block_tables, sizes.sequences)[:, first // sizes.block : end // sizes.block]

    def caches(self, k_cache, v_cache, slots, block_tables, sizes):
        """Both caches whole, and the slots and block tables of the share."""
        return k_cache, v_cache, self.rows(slots, sizes.sequences), self.pages(block_tables, sizes)

    def of_keys(self, k_cache, paged, cache_rows=None):
        """The share's part of the keys; of pages and of rows, which hold all sequences, its kv heads."""
        head, last = self.kv_heads
        if paged:
            return k_cache[:, :, head:last, :]
        first, end = self.sequences if cache_rows is None else (0, k_cache.shape[0])
        return k_cache[first:end, head:last, :, self.slots[0] : self.slots[1]]

    def of_values(self, v_cache):
        """The share's part of the values of contiguous caches."""
        head, last = self.kv_heads
        first, end = self.sequences
        return v_cache[first:end, head:last, self.slots[0] : self.slots[1], :]


def sizes_of_share(sizes, share, k_cache, block_tables, cache_rows=None):
    """The sizes of a share, of a launch with `sizes`."""
    tokens = (share.sequences[1] - share.sequences[0]) * sizes.new
    own_share = sizes.own_heads // sizes.kv_heads
    width = (share.kv_heads[1] - share.kv_heads[0]) * own_share * sizes.depth
    keys = share.of_keys(k_cache, sizes.paged, cache_rows)
    pages, rows = share.pages(block_tables, sizes), share.rows(cache_rows, sizes.sequences)
    return Sizes(tokens, width, sizes.dtype, keys, pages, sizes.ranks, sizes.stored, rows)


def share_of_core(sizes):
    """What this core takes of a launch; None where nothing is left for it."""
    everything = Share((0, sizes.sequences), (0, sizes.kv_heads), (0, sizes.capacity))
    if nl.num_programs() != CORES:
        return everything
    core = nl.program_id(0)
    if sizes.kv_heads % CORES == 0:
        everything.kv_heads = halves(sizes.kv_heads, 1)[core]
    elif sizes.sequences > 1:
        everything.sequences = halves(sizes.sequences, 1)[core]
    else:
        parts = halves(sizes.capacity, slots_together(sizes))
        if sizes.ranks > 1 or sizes.capacity * sizes.kv_heads < LEAST_SLOTS or parts[1][0] == parts[1][1]:
            return everything if core == 0 else None
        everything.slots = parts[core]
        everything.merged = True
    everything.cores = CORES
    return everything


def wait_for_other_core(cores, tensor, engine):
    """Order what both of two cores do with a tensor in HBM before it, before what they do with it after.

    `engine` waits: the one that triggers what comes after.
    """
    if cores == CORES:
        nisa.core_barrier(data=tensor, cores=(0, 1), engine=engine)


def halves(size, together):
    """Two ranges that cover `size`, the first a multiple of `together` and as long; the second may be empty."""
    middle = min(size, blocks(blocks(size, together), CORES) * together)
    return [(0, middle), (middle, size)]


def slots_together(sizes):
    """Slots that are not divided: a chunk, and whole pages."""
    together = PARTITIONS
    while sizes.paged and together % sizes.block > 0:
        together += PARTITIONS
    return together
