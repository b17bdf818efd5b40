"""all_reduce, all_gather and reduce_scatter: collectives over the ranks of a replica group.

A member's operands are either HBM tensors (any number, carried out together) or one two-dimensional SBUF tensor.
Positions in a group's list define the order in which chunks are placed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import collective
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Meeting, Plan
from simulate.memory import MemoryRegion, NKIObject, NkiTensor
from simulate.numerics import AluOperator, alu_operator, cast
from simulate.numerics import float32 as _FLOAT32

_REDUCTIONS = ("add", "minimum", "maximum")


@dataclass(frozen=True)
class ReplicaGroup(NKIObject):
    """Disjoint lists of ranks; each list carries out a collective of its own."""

    groups: Any

    def __post_init__(self) -> None:
        well_formed_group(self.groups)
        object.__setattr__(self, "groups", tuple(tuple(int(rank) for rank in group) for group in self.groups))

    def of(self, rank: int) -> tuple[int, ...]:
        """The list that holds `rank`."""
        for group in self.groups:
            if rank in group:
                return group
        raise RuleViolation(
            rank_in_group, f"rank {rank} calls, the groups are {[list(g) for g in self.groups]}"
        )


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
    """dst = op over the group's ranks of src, the same on every rank.

    Reduces in the order of the rank list, floats in float32 with one rounding at the end, integers exactly (the
    order on hardware depends on the algorithm chosen for the size). op: add, minimum or maximum.
    """
    group = _check(hardware, rank, "all_reduce", srcs, dsts, replica_group)
    operator = _reduction(op)
    _check_sizes("all_reduce", srcs, dsts, len(group), "same", 0)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        return [_reduce(operator, operands, srcs, dsts)] * len(operands)

    return _plan(hardware, "all_reduce", group, srcs, dsts, exchange, 1.0, name, op=operator.name)


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
    """dst = the group's srcs one after the other along collective_dim (HBM: 0; SBUF: 0 or 1)."""
    group = _check(hardware, rank, "all_gather", srcs, dsts, replica_group)
    gathers_along(srcs[0], collective_dim)
    _check_sizes("all_gather", srcs, dsts, len(group), "gather", collective_dim)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        whole = [
            cast(np.concatenate(parts, axis=collective_dim), src.dtype, dst.dtype)
            for parts, src, dst in zip(zip(*operands), srcs, dsts)
        ]
        return [whole] * len(operands)

    return _plan(
        hardware, "all_gather", group, srcs, dsts, exchange, 0.5, name, collective_dim=collective_dim
    )


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
    """dst = this rank's chunk, along dim 0, of op over the group's ranks of src."""
    group = _check(hardware, rank, "reduce_scatter", srcs, dsts, replica_group)
    operator = _reduction(op)
    scatters_along(collective_dim)
    _check_sizes("reduce_scatter", srcs, dsts, len(group), "scatter", collective_dim)

    def exchange(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        whole = _reduce(operator, operands, srcs, dsts)
        return [list(chunks) for chunks in zip(*(np.split(w, len(operands), axis=0) for w in whole))]

    return _plan(
        hardware,
        "reduce_scatter",
        group,
        srcs,
        dsts,
        exchange,
        0.5,
        name,
        op=operator.name,
        collective_dim=collective_dim,
    )


def _plan(
    hardware: Hardware,
    kind: str,
    group: tuple[int, ...],
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    exchange: Callable[[list[list[np.ndarray]]], list[list[np.ndarray]]],
    hops: float,
    name: str | None,
    **terms: Any,
) -> Plan:
    total = sum(max(src.size, dst.size) * src.dtype.itemsize for src, dst in zip(srcs, dsts))
    return Plan(
        engine=Engine.dma,
        reads=tuple(srcs),
        writes=tuple(dsts),
        domain=Domain.bits,
        compute=exchange,
        cost=costs.collective(hardware, len(group), total, hops),
        name=name,
        trigger=Engine.sync,
        meeting=Meeting(
            place=("collective", group),
            by_rank=True,
            members=group,
            terms={
                "operation": kind,
                "replica group": list(group),
                **terms,
                "srcs": [(src.shape, str(src.dtype)) for src in srcs],
                "dsts": [(dst.shape, str(dst.dtype)) for dst in dsts],
            },
            exchange=exchange,
        ),
    )


def _reduce(
    operator: AluOperator, operands: list[list[np.ndarray]], srcs: list[NkiTensor], dsts: list[NkiTensor]
) -> list[np.ndarray]:
    results = []
    for parts, src, dst in zip(zip(*operands), srcs, dsts):
        if src.dtype.is_integer:
            total = parts[0]
            for part in parts[1:]:
                total = _INTEGER[operator.name](total, part)
            results.append(cast(total, src.dtype, dst.dtype))
        else:
            total = parts[0].astype(np.float32)
            for part in parts[1:]:
                total = operator.function(total, part.astype(np.float32))
            results.append(cast(total, _FLOAT32, dst.dtype))
    return results


_INTEGER: dict[str, Callable[..., np.ndarray]] = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}


def _reduction(op: Any) -> AluOperator:
    operator = alu_operator(op)
    collective_reduction(operator)
    return operator


def _check(
    hardware: Hardware, rank: int, kind: str, srcs: Any, dsts: Any, replica_group: Any
) -> tuple[int, ...]:
    tensor_lists(kind, srcs, dsts)
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        for tensor in tensors:
            rules.is_tensor(operand, tensor)
            rules.lies_in(
                operand, tensor, MemoryRegion.private_hbm, MemoryRegion.shared_hbm, MemoryRegion.sbuf
            )
            rules.not_indirect(operand, tensor)
            rules.not_packed(operand, tensor)
            if tensor.buffer.on_chip:
                rules.check_tile(hardware, operand, tensor, MemoryRegion.sbuf)
    one_memory_space([*srcs, *dsts])
    is_replica_group(replica_group)
    return replica_group.of(rank)


def _check_sizes(
    kind: str, srcs: list[NkiTensor], dsts: list[NkiTensor], ranks: int, relation: str, dim: int
) -> None:
    for src, dst in zip(srcs, dsts):
        expected = list(src.shape)
        if relation == "gather":
            expected[dim] *= ranks
        elif relation == "scatter":
            if expected[dim] % ranks:
                raise RuleViolation(
                    collective_shapes, f"src {src.shape} does not divide into {ranks} chunks along dim {dim}"
                )
            expected[dim] //= ranks
        if dst.shape != tuple(expected):
            raise RuleViolation(
                collective_shapes,
                f"{kind} over {ranks} ranks: src {src.shape}, dst {dst.shape}",
                limit=f"dst of shape {tuple(expected)}",
            )


@rule("NKW-GROUP-FORM")
def well_formed_group(groups: Any) -> None:
    """A replica group is a list of disjoint, non-empty lists of ranks."""
    try:
        ranks = [int(rank) for group in groups for rank in group]
        sizes = [len(group) for group in groups]
    except TypeError:
        raise RuleViolation(
            well_formed_group, f"{groups!r:.80}", hint="nki.collectives.ReplicaGroup([[0, 1, 2, 3]])"
        ) from None
    if not sizes or 0 in sizes or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise RuleViolation(well_formed_group, f"{groups!r:.80}", hint="every rank once, no empty list")


@rule("NKW-GROUP-TYPE")
def is_replica_group(group: Any) -> None:
    """replica_group is a ReplicaGroup."""
    if not isinstance(group, ReplicaGroup):
        raise RuleViolation(is_replica_group, f"{group!r:.60}", hint="nki.collectives.ReplicaGroup([[0, 1]])")


@rule("NKW-GROUP-MEMBER")
def rank_in_group() -> None:
    """A rank that calls a collective is in one of the replica group's lists."""


@rule("NKW-COLLECTIVE-LISTS")
def tensor_lists(kind: str, srcs: Any, dsts: Any) -> None:
    """srcs and dsts are lists of equal, non-zero length."""
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(tensors, (list, tuple)) or not tensors:
            raise RuleViolation(
                tensor_lists, f"{operand}={type(tensors).__name__} for {kind}", hint=f"{operand}=[tensor]"
            )
    if len(srcs) != len(dsts):
        raise RuleViolation(tensor_lists, f"{len(srcs)} srcs, {len(dsts)} dsts")


@rule("NKW-COLLECTIVE-MEMORY")
def one_memory_space(tensors: list[NkiTensor]) -> None:
    """A collective works on HBM tensors or on one two-dimensional SBUF tensor, never on both."""
    on_chip = [t for t in tensors if t.buffer.on_chip]
    if on_chip and (len(on_chip) != len(tensors) or len(tensors) != 2 or any(t.ndim != 2 for t in on_chip)):
        raise RuleViolation(
            one_memory_space,
            ", ".join(t.describe() for t in tensors),
            hint="put all operands in HBM, or use one 2D SBUF src and one 2D SBUF dst",
        )


@rule("NKW-COLLECTIVE-OPERATOR")
def collective_reduction(operator: AluOperator) -> None:
    """A collective reduces with add, minimum or maximum."""
    if operator.name not in _REDUCTIONS:
        raise RuleViolation(collective_reduction, f"op={operator.name}", limit=", ".join(_REDUCTIONS))


@rule("NKW-COLLECTIVE-SHAPE")
def collective_shapes() -> None:
    """The shapes of src and dst fit the collective and the number of ranks."""


@rule("NKW-COLLECTIVE-GATHER-DIM")
def gathers_along(src: NkiTensor, dim: Any) -> None:
    """all_gather concatenates HBM tensors along dim 0 and SBUF tensors along dim 0 or 1."""
    allowed = (0, 1) if src.buffer.on_chip else (0,)
    if dim not in allowed:
        raise RuleViolation(gathers_along, f"collective_dim={dim} in {src.buffer.value}", limit=f"{allowed}")


@rule("NKW-COLLECTIVE-SCATTER-DIM")
def scatters_along(dim: Any) -> None:
    """reduce_scatter splits along dim 0."""
    if dim != 0:
        raise RuleViolation(scatters_along, f"collective_dim={dim}", limit="0")
