"""Sizes of a launch of `ssd`, and how its heads are taken together."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.tiles import BANK

TOGETHER = 8
"""Heads whose masked scores lie in SBUF together: 10 KiB of a partition in bfloat16."""


@dataclass
class Inputs(nl.NKIObject):
    """The tensors of `ssd`, which describes them."""

    u: nl.NkiTensor
    steps: nl.NkiTensor
    dt_bias: nl.NkiTensor
    a_log: nl.NkiTensor
    d: nl.NkiTensor
    gate: nl.NkiTensor


class Sizes(nl.NKIObject):
    """Sizes of one core: `local_heads` heads of all, with `depth` elements each, and where their columns begin.

    Packs have up to `most` heads. `narrow` steps take sums of decays with the heads on the partitions.
    """

    def __init__(self, u, state, heads, groups, head_range, steps_first, gate_first, dt_limits):
        self.dtype = u.dtype
        self.states = state.shape[1]
        self.inner = state.shape[2]
        self.heads = heads
        self.depth = state.shape[2] // heads
        self.groups = groups
        self.first_head = head_range[0]
        self.local_heads = head_range[1] - head_range[0]
        self.left = head_range[0] * self.depth
        self.width = self.local_heads * self.depth
        self.steps_first = steps_first + head_range[0]
        self.gate_first = gate_first + head_range[0] * self.depth
        self.dt_limits = dt_limits
        self.most = max(1, min(TOGETHER, BANK // self.depth, heads // groups, self.local_heads))
        self.narrow = u.dtype != nl.float32

    def group_of(self, head):
        """Return the group of one of the local heads."""
        return (self.first_head + head) * self.groups // self.heads

    def packs(self):
        """Return ranges of up to 8 local heads of one group, whose columns fit in a bank of PSUM."""
        return self.split_heads(self.most)

    def split_heads(self, most):
        """Return ranges of up to `most` local heads of one group."""
        result = []
        first = 0
        while first < self.local_heads:
            last = first + 1
            while (
                last < self.local_heads
                and last - first < most
                and self.group_of(last) == self.group_of(first)
            ):
                last += 1
            result.append((first, last))
            first = last
        return result
