"""reduce_scatter: every rank gets its chunk of the reduction of the tensors of all ranks of its group."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.book import collective
from simulate.isa.collective_plan import (
    compute_chunk_shape,
    expect_shape,
    list_signatures,
    members,
    plan_collective,
    reduce_arrays,
    reduction,
    splits_along,
)
from simulate.isa.plan import Plan
from simulate.isa.replica_group import ReplicaGroup
from simulate.memory import NkiTensor


@collective
def reduce_scatter(
    hardware: Hardware,
    rank: int,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Write to dst this rank's chunk, along dim 0, of op over the src of every rank of the group.

    The rank at position r of the group gets chunk r; dim 0 of src divides by the number of ranks. collective_dim is 0.
    Reduces as all_reduce: floats in float32 with one rounding at the end, integers exactly. op: add, minimum or
    maximum.

    Raises RuleViolation.
    """
    group = members(hardware, rank, "reduce_scatter", srcs, dsts, replica_group, priority)
    operator = reduction(op)
    splits_along(collective_dim)
    for src, dst in zip(srcs, dsts):
        expect_shape("reduce_scatter", len(group), src, dst, compute_chunk_shape(src, len(group), 0))

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        totals = [
            reduce_arrays(operator, rank_arrays, s.dtype, d.dtype)
            for rank_arrays, s, d in zip(zip(*operands), srcs, dsts)
        ]
        return [list(chunks) for chunks in zip(*(np.split(w, len(operands), axis=0) for w in totals))]

    return plan_collective(
        hardware,
        "reduce_scatter",
        group,
        srcs,
        dsts,
        exchange,
        name,
        op=operator.name,
        collective_dim=collective_dim,
        **list_signatures(srcs=srcs, dsts=dsts),
    )
