"""Sizes of a launch of `ssd`, and how its heads are taken together."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.recurrent.slots import SequenceTable
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
    state: nl.NkiTensor
    table: SequenceTable


@dataclass
class Sizes(nl.NKIObject):
    """Sizes of one core: `local_heads` heads of all, with `depth` elements each, and where their columns begin.

    dt_limits: the least and the largest time step, which may be None. Packs have up to `most` heads. `narrow` steps
    take sums of decays with the heads on the partitions.
    """

    dtype: object
    states: int
    inner: int
    heads: int
    depth: int
    groups: int
    first_head: int
    local_heads: int
    left: int
    width: int
    steps_first: int
    gate_first: int
    dt_limits: tuple
    most: int
    narrow: bool

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
            end = min(self.local_heads, first + most)
            last = first + 1
            while last < end and self.group_of(last) == self.group_of(first):
                last += 1
            result.append((first, last))
            first = last
        return result


def plan_sizes(inputs, groups, head_range, steps_first, gate_first, dt_limits):
    """Return the sizes of heads (first, end)."""
    (first, end), heads, inner = head_range, inputs.dt_bias.shape[1], inputs.state.shape[2]
    depth, dtype = inner // heads, inputs.u.dtype
    return Sizes(
        dtype=dtype,
        states=inputs.state.shape[1],
        inner=inner,
        heads=heads,
        depth=depth,
        groups=groups,
        first_head=first,
        local_heads=end - first,
        left=first * depth,
        width=(end - first) * depth,
        steps_first=steps_first + first,
        gate_first=gate_first + first * depth,
        dt_limits=dt_limits,
        most=max(1, min(TOGETHER, BANK // depth, heads // groups, end - first)),
        narrow=dtype != nl.float32,
    )
