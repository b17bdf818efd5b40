"""Sizes of a launch of `ssd`, and how its heads are taken together."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.tiles import BANK

TOGETHER = 8
"""Heads whose masked scores lie in SBUF together: 10 KiB of a partition in bfloat16."""


class Sizes(nl.NKIObject):
    """What one core has: the heads `own` of all, with `depth` elements each, and where their columns begin.

    Packs have up to `most` heads. `narrow` steps take sums of decays with the heads on the partitions.
    """

    def __init__(self, u, state, heads, groups, own, steps_first, gate_first, dt_limits):
        self.dtype = u.dtype
        self.states = state.shape[1]
        self.inner = state.shape[2]
        self.heads = heads
        self.depth = state.shape[2] // heads
        self.groups = groups
        self.first_head = own[0]
        self.own = own[1] - own[0]
        self.left = own[0] * self.depth
        self.width = self.own * self.depth
        self.steps_first = steps_first + own[0]
        self.gate_first = gate_first + own[0] * self.depth
        self.dt_limits = dt_limits
        self.most = max(1, min(TOGETHER, BANK // self.depth, heads // groups, self.own))
        self.narrow = u.dtype != nl.float32

    def group_of(self, head):
        """The group of one of the own heads."""
        return (self.first_head + head) * self.groups // self.heads

    def packs(self):
        """Ranges of up to 8 own heads of one group, whose columns fit in a bank of PSUM."""
        return self.packs_of(self.most)

    def packs_of(self, most):
        """Ranges of up to `most` own heads of one group."""
        found = []
        first = 0
        while first < self.own:
            last = first + 1
            while last < self.own and last - first < most and self.group_of(last) == self.group_of(first):
                last += 1
            found.append((first, last))
            first = last
        return found
