"""collective_permute: data moves along explicit (source, target) pairs of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import dma_costs
from simulate.isa.book import collective
from simulate.isa.collective_plan import (
    check_in_hbm,
    check_tensors,
    expect_shape,
    list_signatures,
    plan_collective,
    single_tensors,
)
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics import cast


@collective
def collective_permute(
    hardware: Hardware,
    rank: int,
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    source_target_pairs: list[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> Plan:
    """Copy, for each (source, target) pair of ranks, the source's src to the target's dst.

    srcs and dsts have one tensor each, of one shape, in HBM. A rank that is no target keeps its dst, one that is in no
    pair takes no part (neither is documented). No rank is twice a source or twice a target, as in XLA's instruction of
    this name. Different dtypes go through float32.

    Raises RuleViolation.
    """
    check_tensors(hardware, "collective_permute", srcs, dsts, priority)
    single_tensors("collective_permute", srcs, dsts)
    check_in_hbm("collective_permute", srcs, dsts)
    src, dst = srcs[0], dsts[0]
    pairs = _pairs(source_target_pairs)
    source_of = {target: source for source, target in pairs}
    ranks = tuple(sorted({end for pair in pairs for end in pair}))
    expect_shape("collective_permute", len(ranks), src, dst, src.shape)
    if rank not in ranks:
        return Plan(
            engine=Engine.dma,
            reads=(),
            writes=(),
            domain=Domain.bits,
            compute=lambda: (),
            cost=dma_costs.collective(hardware, 1, 0, 0.0),
            name=name,
            trigger=Engine.sync,
        )

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        operands_by_rank = dict(zip(ranks, operands))
        return [
            [cast(operands_by_rank[source_of[member]][0].copy(), src.dtype, dst.dtype)]
            if member in source_of
            else []
            for member in ranks
        ]

    sources = {source for source, _ in pairs}
    return plan_collective(
        hardware,
        "collective_permute",
        ranks,
        srcs if rank in sources else (),
        dsts if rank in source_of else (),
        exchange,
        name,
        key=("collective_permute", pairs),
        **list_signatures(srcs=srcs, dsts=dsts),
    )


def _pairs(source_target_pairs: Any) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((int(source), int(target)) for source, target in source_target_pairs)
    except (TypeError, ValueError):
        pairs = ()
    distinct_ends(pairs, source_target_pairs)
    return pairs


@rule("NKW-PERMUTE-PAIRS", hint="[(0, 1), (1, 0)]")
def distinct_ends(pairs: tuple[tuple[int, int], ...], source_target_pairs: Any) -> None:
    """source_target_pairs lists (source, target) ranks, no source and no target twice.

    Raises RuleViolation also if the list is empty, or a rank is negative.
    """
    flat = [end for pair in pairs for end in pair]
    if (
        not pairs
        or min(flat) < 0
        or any(len({pair[end_index] for pair in pairs}) != len(pairs) for end_index in (0, 1))
    ):
        raise RuleViolation(distinct_ends, f"source_target_pairs={source_target_pairs!r:.80}")
