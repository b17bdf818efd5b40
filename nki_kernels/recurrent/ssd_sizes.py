"""Sizes of a launch of `ssd`, and how its heads are taken together.

The local heads are those that one call of `ssd_prompts` or `ssd_step` takes: of one core, and for prompts of
one panel.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.recurrent.slots import SequenceTable
from nki_kernels.tiles import BANK

TOGETHER = 8
"""Heads whose masked scores lie in SBUF together: 10 KiB of a partition in bfloat16."""


@dataclass
class Inputs(nl.NKIObject):
    """The tensors of `ssd`, whose file describes them."""

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
    """Sizes for the local heads of a core, and where their columns begin.

    dtype: of u. states: N. inner: columns of all heads, H P. heads: H. depth: P. first_head: the first local
    head of all, local_heads: their number. left: the first column of the local heads in x, y and states,
    width: their number of columns. steps_first, gate_first: their first column in steps and gate. dt_limits:
    the least and the largest time step, which may be None. most: heads of a pack at most. narrow: whether the
    launch is in bfloat16, where sums of decays are made with the heads on the partitions.
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

    def find_group(self, head):
        """Return the index of a head's group among all groups; `head` counts from this core's first head."""
        return (self.first_head + head) * self.groups // self.heads

    def list_packs(self):
        """Return a list of ranges (first, end) of this core's heads: packs, which are computed together.

        A pack has up to `most` heads, of one group. Heads count from this core's first head.
        """
        return self.split_heads(self.most)

    def split_heads(self, most):
        """Return a list of ranges (first, end) of up to `most` of this core's heads, each within one group.

        Heads count from this core's first head.
        """
        result = []
        first = 0
        while first < self.local_heads:
            end = min(self.local_heads, first + most)
            last = first + 1
            while last < end and self.find_group(last) == self.find_group(first):
                last += 1
            result.append((first, last))
            first = last
        return result


def plan_sizes(inputs, groups, head_range, steps_first, gate_first, dt_limits):
    """Return the Sizes of heads (first, end).

    Args:
        head_range: (first, end) among all heads.
        steps_first: column of head 0 in steps.
        gate_first: column of head 0 in gate.
        dt_limits: (least, largest) time step; the latter may be None.
    """
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
