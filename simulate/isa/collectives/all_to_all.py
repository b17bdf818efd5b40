"""all_to_all: the rank at position s of its group sends chunk r of its tensor to the rank at position r."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.book import collective
from simulate.isa.collective_plan import (
    check_in_hbm,
    compute_chunk_shape,
    expect_shape,
    list_signatures,
    members,
    plan_collective,
    splits_along,
)
from simulate.isa.plan import Plan
from simulate.isa.replica_group import ReplicaGroup
from simulate.memory import NkiTensor
from simulate.numerics import cast


@collective
def all_to_all(
    hardware: Hardware,
    rank: int,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Exchange chunks of dim 0: chunk s of dst is this rank's chunk of the src of the group's rank at position s.

    HBM only. A tensor has one chunk per rank of the group: dim 0 divides by the number of ranks, and dst has src's
    shape. collective_dim is 0. Different dtypes go through float32.

    Raises RuleViolation.
    """
    group = members(hardware, rank, "all_to_all", srcs, dsts, replica_group, priority)
    check_in_hbm("all_to_all", srcs, dsts)
    splits_along(collective_dim)
    for src, dst in zip(srcs, dsts):
        compute_chunk_shape(src, len(group), 0)
        expect_shape("all_to_all", len(group), src, dst, src.shape)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        results: list[list[np.ndarray]] = [[] for _ in operands]
        for rank_arrays, src, dst in zip(zip(*operands), srcs, dsts):
            chunks = [np.split(rank_array, len(operands), axis=0) for rank_array in rank_arrays]
            for position, result in enumerate(results):
                rank_chunks = np.concatenate([chunk[position] for chunk in chunks], axis=0)
                result.append(cast(rank_chunks, src.dtype, dst.dtype))
        return results

    return plan_collective(
        hardware,
        "all_to_all",
        group,
        srcs,
        dsts,
        exchange,
        name,
        collective_dim=collective_dim,
        **list_signatures(srcs=srcs, dsts=dsts),
    )
