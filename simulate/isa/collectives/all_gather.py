"""all_gather: every rank gets the tensors of all ranks of its group, concatenated in the order of the group's list."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa.book import collective
from simulate.isa.collective_plan import expect_shape, list_signatures, members, plan_collective
from simulate.isa.plan import Plan
from simulate.isa.replica_group import ReplicaGroup
from simulate.memory import NkiTensor
from simulate.numerics import cast


@collective
def all_gather(
    hardware: Hardware,
    rank: int,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Write to dst the srcs of the group's ranks, concatenated along collective_dim in the order of the rank list.

    collective_dim is 0 for tensors in HBM, 0 or 1 in SBUF. dst has src's shape with that dim times the number of ranks.
    Tensor i of srcs goes to tensor i of dsts. Different dtypes go through float32.

    Raises RuleViolation.
    """
    group = members(hardware, rank, "all_gather", srcs, dsts, replica_group, priority)
    gathers_along(srcs[0], collective_dim)
    for src, dst in zip(srcs, dsts):
        gathered_shape = list(src.shape)
        gathered_shape[collective_dim] *= len(group)
        expect_shape("all_gather", len(group), src, dst, gathered_shape)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        gathered = [
            cast(np.concatenate(rank_arrays, axis=collective_dim), src.dtype, dst.dtype)
            for rank_arrays, src, dst in zip(zip(*operands), srcs, dsts)
        ]
        return [gathered] * len(operands)

    return plan_collective(
        hardware,
        "all_gather",
        group,
        srcs,
        dsts,
        exchange,
        name,
        collective_dim=collective_dim,
        **list_signatures(srcs=srcs, dsts=dsts),
    )


@rule("NKW-COLLECTIVE-GATHER-DIM", hint="collective_dim=0")
def gathers_along(src: NkiTensor, dim: Any) -> None:
    """all_gather concatenates HBM tensors along dim 0 and SBUF tensors along dim 0 or 1.

    Raises RuleViolation otherwise.
    """
    allowed = (0, 1) if src.buffer.on_chip else (0,)
    if dim not in allowed:
        raise RuleViolation(gathers_along, f"collective_dim={dim} in {src.buffer.value}", limit=f"{allowed}")
