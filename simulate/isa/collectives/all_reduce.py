"""all_reduce: every rank gets the reduction of the tensors of all ranks of its group."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.book import collective
from simulate.isa.collective_plan import (
    expect_shape,
    list_signatures,
    members,
    plan_collective,
    reduce_arrays,
    reduction,
)
from simulate.isa.plan import Plan
from simulate.isa.replica_group import ReplicaGroup
from simulate.memory import NkiTensor


@collective
def all_reduce(
    hardware: Hardware,
    rank: int,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Write to dst op over the src of every rank of the group; the same result on every rank, of src's shape.

    Reduces in the order of the rank list, floats in float32 with one rounding at the end, integers exactly (the order
    on hardware depends on the algorithm chosen for the size). op: add, minimum or maximum. Tensor i of srcs goes to
    tensor i of dsts.

    Raises RuleViolation.
    """
    group = members(hardware, rank, "all_reduce", srcs, dsts, replica_group, priority)
    operator = reduction(op)
    for src, dst in zip(srcs, dsts):
        expect_shape("all_reduce", len(group), src, dst, src.shape)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        totals = [
            reduce_arrays(operator, rank_arrays, s.dtype, d.dtype)
            for rank_arrays, s, d in zip(zip(*operands), srcs, dsts)
        ]
        return [totals] * len(operands)

    return plan_collective(
        hardware,
        "all_reduce",
        group,
        srcs,
        dsts,
        exchange,
        name,
        hops=1.0,
        op=operator.name,
        **list_signatures(srcs=srcs, dsts=dsts),
    )
