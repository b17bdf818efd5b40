"""The share of one core in a launch on two: kv heads where their number is even, else sequences, else slots.

`decode.attend` and `attention_block_decode` call `find_core_share`, and cut arguments, sizes and caches to the share.
Kv heads in pages lie behind one another, and cores that divide them move small pieces. So they are not divided there.

A *slot* of a cache holds a position. Cores that divide the slots of one sequence merge their outputs; each core
writes the new keys and values of its own slots, so no core writes what the other one reads.
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
    """Part of a launch that one core computes: ranges (first, end) of sequences, of kv heads and of cache slots.

    `cores`: number of cores that have a share. `merged`: whether the other core has other slots of the same sequences
    and heads, so that partial outputs are merged.
    """

    sequences: object
    kv_heads: object
    slots: object
    cores: int = 1
    merged: bool = False

    def select_rows(self, tensor, sequences):
        """Return a view of the rows of the share's sequences, or None for None.

        A share is one core's part of a launch.

        Args:
            tensor: a tensor with equally many rows for each of `sequences`, in order.
            sequences: number of sequences of the whole launch.
        """
        if tensor is None:
            return None
        count = tensor.shape[0] // sequences
        return tensor[self.sequences[0] * count : self.sequences[1] * count]

    def select_columns(self, tensor, kv_heads):
        """Return a view of the columns of the share's kv heads, or None for None.

        A share is one core's part of a launch.

        Args:
            tensor: a tensor with equally many columns for each of `kv_heads`, in order.
            kv_heads: number of kv heads of the whole launch.
        """
        if tensor is None:
            return None
        count = tensor.shape[1] // kv_heads
        return tensor[:, self.kv_heads[0] * count : self.kv_heads[1] * count]

    def select_heads(self, tensor, sizes):
        """Return a view of the share's rows and columns of a tensor [T, heads * D] of new tokens, or None for None.

        A share is one core's part of a launch.

        Args:
            sizes: the `Sizes` of the whole launch.
        """
        return self.select_columns(self.select_rows(tensor, sizes.sequences), sizes.kv_heads)


def compute_share_sizes(sizes, share, cache):
    """Return the `Sizes` of a share.

    A share is one core's part of a launch.

    Args:
        sizes: the `Sizes` of the whole launch.
        cache: the cache, cut to the share.
    """
    tokens = (share.sequences[1] - share.sequences[0]) * sizes.new
    local_share = sizes.local_heads // sizes.kv_heads
    width = (share.kv_heads[1] - share.kv_heads[0]) * local_share * sizes.depth
    return Sizes(tokens, width, sizes.dtype, cache, sizes.ranks, sizes.stored)


def find_core_share(sizes):
    """Return this core's `Share` of a launch, or None if the other core computes all of it.

    On one core the share is the whole launch. Two cores divide the kv heads if their number is even and the cache
    does not keep them together. Else they divide the sequences if there are several, else the slots of the one
    sequence. Slots that are few (LEAST_SLOTS) or divided over ranks stay with core 0; core 1 gets None.
    """
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
    """Issue a barrier if `cores` is 2: both cores' earlier accesses to a tensor precede the later ones of either.

    Args:
        tensor: the tensor in HBM that both cores access.
        engine: the engine that waits, the one that triggers the later accesses.
    """
    if cores == CORES:
        nisa.core_barrier(data=tensor, cores=(0, 1), engine=engine)


def split_in_halves(size, together):
    """Return two ranges (start, end) that cover 0 … `size`; the second may be shorter, or empty.

    The first range ends at a multiple of `together`, or at `size`.
    """
    middle = min(size, blocks(blocks(size, together), CORES) * together)
    return [(0, middle), (middle, size)]
