"""What one core takes of a launch on two: kv heads where their number is even, else sequences, else slots.

Kv heads in pages lie behind one another, and cores that divide them move small pieces. So they are not divided there.

A *slot* of a cache holds a position. Cores that divide the slots of one sequence merge their outputs; each
writes the new keys and values whose slots are its own, so no core writes what the other one reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.sizes import Sizes
from nki_kernels.tiles import blocks

CORES = 2
"""Physical cores of a logical core that is divided."""


LEAST_SLOTS = 8192
"""Slots of all kv heads that are worth dividing: an exchange of partial outputs takes as long as 4096 slots."""


@dataclass
class Share(nl.NKIObject):
    """A range of sequences, of kv heads and of slots, one of as many as there are `cores`.

    `merged`: whether the other core has slots of the same sequences and heads.
    """

    sequences: object
    kv_heads: object
    slots: object
    cores: int = 1
    merged: bool = False

    def select_rows(self, tensor, sequences):
        """Return the rows of the share's sequences, of a tensor with as many for each of `sequences`; None stays."""
        if tensor is None:
            return None
        count = tensor.shape[0] // sequences
        return tensor[self.sequences[0] * count : self.sequences[1] * count]

    def select_columns(self, tensor, kv_heads):
        """Return the columns of the share's kv heads, of a tensor with as many for each of `kv_heads`; None stays."""
        if tensor is None:
            return None
        count = tensor.shape[1] // kv_heads
        return tensor[:, self.kv_heads[0] * count : self.kv_heads[1] * count]

    def select_heads(self, tensor, sizes):
        """Return rows and columns of the share, of a tensor of new tokens' heads; `sizes` are those of the launch."""
        return self.select_columns(self.select_rows(tensor, sizes.sequences), sizes.kv_heads)


def compute_share_sizes(sizes, share, cache):
    """Return the sizes of a share, of a launch with `sizes`; `cache` is that of the share."""
    tokens = (share.sequences[1] - share.sequences[0]) * sizes.new
    local_share = sizes.local_heads // sizes.kv_heads
    width = (share.kv_heads[1] - share.kv_heads[0]) * local_share * sizes.depth
    return Sizes(tokens, width, sizes.dtype, cache, sizes.ranks, sizes.stored)


def find_core_share(sizes):
    """Return what this core takes of a launch; None where nothing is left for it."""
    sequences, kv_heads, slots = (0, sizes.sequences), (0, sizes.kv_heads), (0, sizes.capacity)
    core = nl.program_id(0)
    if nl.num_programs() != CORES:
        return Share(sequences, kv_heads, slots)
    if sizes.kv_heads % CORES == 0 and not sizes.keeps_heads_together:
        return Share(sequences, split_in_halves(sizes.kv_heads, 1)[core], slots, CORES)
    if sizes.sequences > 1:
        return Share(split_in_halves(sizes.sequences, 1)[core], kv_heads, slots, CORES)
    divided = split_in_halves(sizes.capacity, sizes.slots_together)
    few = sizes.capacity * sizes.kv_heads < LEAST_SLOTS or divided[1][0] == divided[1][1]
    if sizes.ranks > 1 or few:
        return Share(sequences, kv_heads, slots) if core == 0 else None
    return Share(sequences, kv_heads, divided[core], CORES, True)


def wait_for_other_core(cores, tensor, engine):
    """Order accesses of both cores to a tensor in HBM before this call before their accesses after it.

    `engine` waits: the one that triggers what comes after.
    """
    if cores == CORES:
        nisa.core_barrier(data=tensor, cores=(0, 1), engine=engine)


def split_in_halves(size, together):
    """Return two ranges that cover `size`, the first a multiple of `together` and as long; the second may be empty."""
    middle = min(size, blocks(blocks(size, together), CORES) * together)
    return [(0, middle), (middle, size)]
