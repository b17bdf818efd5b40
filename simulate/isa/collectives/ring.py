"""collective_permute_implicit and its reducing form: every rank sends to its successor in a ring.

The documents leave the order of the ring to the topology. Here it is the order of the group's list, whose last rank is
followed by the first; that is also the order for groups that follow the physical ring. A ring has up to four channels,
each with tensors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa.book import collective
from simulate.isa.collective_plan import (
    check_tensors,
    expect_shape,
    list_signatures,
    plan_collective,
    reduce_arrays,
    reduction,
    single_tensors,
)
from simulate.isa.plan import Plan
from simulate.isa.replica_group import ReplicaGroup, is_replica_group
from simulate.memory import NkiTensor
from simulate.numerics import cast

Channels = Sequence[Sequence[NkiTensor]]

CHANNELS_MAX = 4


@collective
def collective_permute_implicit(
    hardware: Hardware,
    rank: int,
    srcs_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    channel_ids: list[int] = [0],  # noqa: B006  (the documented default, never changed)
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Send src to the successor in the ring and receive the predecessor's src in dst, on every channel.

    srcs_by_channel and dsts_by_channel have a list of one tensor for each channel, src and dst of one shape, in HBM or
    2D in SBUF. channel_ids: 0, 1, ..., at most 4 (2 for groups that are not all devices of a node, which a simulated
    group cannot know). Different dtypes go through float32.

    Raises RuleViolation.
    """
    operation = "collective_permute_implicit"
    group = _group(
        hardware, rank, operation, (srcs_by_channel,), dsts_by_channel, replica_group, channel_ids, priority
    )
    srcs, dsts = _first(srcs_by_channel), _first(dsts_by_channel)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        by_sender = [
            [cast(array.copy(), src.dtype, dst.dtype) for array, src, dst in zip(arrays, srcs, dsts)]
            for arrays in operands
        ]
        return by_sender[-1:] + by_sender[:-1]

    return plan_collective(
        hardware, operation, group, srcs, dsts, exchange, name, **list_signatures(srcs=srcs, dsts=dsts)
    )


@collective
def collective_permute_implicit_reduce(
    hardware: Hardware,
    rank: int,
    srcs0_by_channel: list[list[NkiTensor]],
    srcs1_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: list[int] = [0],  # noqa: B006  (the documented default, never changed)
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Send op(src0, src1) to the successor in the ring and receive the predecessor's result in dst, on every channel.

    As collective_permute_implicit, with op add, minimum or maximum: floats in float32 with one rounding, integers
    exactly. src0 and src1 have one dtype.

    Raises RuleViolation.
    """
    operation = "collective_permute_implicit_reduce"
    sources = (srcs0_by_channel, srcs1_by_channel)
    group = _group(hardware, rank, operation, sources, dsts_by_channel, replica_group, channel_ids, priority)
    operator = reduction(op)
    left, right, dsts = (_first(channels) for channels in (*sources, dsts_by_channel))
    for first, second in zip(left, right):
        one_source_dtype(first, second)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        count = len(dsts)
        by_sender = [
            [
                reduce_arrays(
                    operator,
                    (arrays[channel], arrays[count + channel]),
                    left[channel].dtype,
                    dsts[channel].dtype,
                )
                for channel in range(count)
            ]
            for arrays in operands
        ]
        return by_sender[-1:] + by_sender[:-1]

    return plan_collective(
        hardware,
        operation,
        group,
        (*left, *right),
        dsts,
        exchange,
        name,
        op=operator.name,
        **list_signatures(srcs=(*left, *right), dsts=dsts),
    )


def _group(
    hardware: Hardware,
    rank: int,
    operation: str,
    sources: tuple[Channels, ...],
    dsts: Channels,
    replica_group: Any,
    channel_ids: Any,
    priority: int | None,
) -> tuple[int, ...]:
    consecutive_channels(channel_ids, *sources, dsts)
    is_replica_group(replica_group)
    group = replica_group.find_group(rank)
    for channels in sources:
        for srcs, targets in zip(channels, dsts):
            check_tensors(hardware, operation, srcs, targets, priority)
            single_tensors(operation, srcs, targets)
            expect_shape(operation, len(group), srcs[0], targets[0], srcs[0].shape)
    return group


def _first(channels: Channels) -> tuple[NkiTensor, ...]:
    return tuple(tensors[0] for tensors in channels)


@rule("NKW-RING-CHANNELS", hint="channel_ids=[0], srcs_by_channel=[[src]], dsts_by_channel=[[dst]]")
def consecutive_channels(channel_ids: Any, *by_channel: Any) -> None:
    """channel_ids is 0, 1, ... up to 3, and every list by channel has one entry for each.

    Raises RuleViolation otherwise.
    """
    count = len(channel_ids) if isinstance(channel_ids, (list, tuple)) else 0
    lists = all(isinstance(channels, (list, tuple)) and len(channels) == count for channels in by_channel)
    if not (1 <= count <= CHANNELS_MAX and lists and list(channel_ids) == list(range(count))):
        raise RuleViolation(
            consecutive_channels,
            f"channel_ids={channel_ids!r:.40}, lists of "
            + ", ".join(
                str(len(c)) if isinstance(c, (list, tuple)) else type(c).__name__ for c in by_channel
            ),
        )


@rule("NKW-RING-DTYPE", hint="cast one of them")
def one_source_dtype(first: NkiTensor, second: NkiTensor) -> None:
    """The two sources of a channel have one dtype.

    Raises RuleViolation otherwise.
    """
    if first.dtype != second.dtype:
        raise RuleViolation(one_source_dtype, f"src0 is {first.dtype}, src1 is {second.dtype}")
