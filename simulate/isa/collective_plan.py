"""Functions that the planners of collectives share: rules of tensor lists, reductions, the plan with its rendezvous.

A rendezvous is the meeting of the ranks of a group; each rank is a member. A member's operands are either HBM tensors
(any number, exchanged together) or one two-dimensional SBUF tensor. Positions in a group's list of ranks define the
order of chunks. An exchange is a function from the operands of all members to the results of each. Its results never
share memory with a member's operands: members go on one after the other, and the first may overwrite what the next has
yet to take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import dma_costs, rules
from simulate.isa.enums import Engine
from simulate.isa.instructions.dma_copy import priority_on_chip
from simulate.isa.plan import Domain, Effects, Plan, Rendezvous, Synchronization
from simulate.isa.replica_group import is_replica_group
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import AluOperator, DType, alu_operator, cast, float32

Tensors = Sequence[NkiTensor]
Exchange = Callable[[list[list[np.ndarray]]], list[list[Any]]]

_EFFECTS = Effects(synchronization=Synchronization.collective)
_REDUCTIONS = ("add", "minimum", "maximum")
_INTEGER: dict[str, Callable[..., np.ndarray]] = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}


def members(
    hardware: Hardware,
    rank: int,
    operation: str,
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    priority: int | None,
) -> tuple[int, ...]:
    """Check the tensors and the group of a collective; return the group's list of ranks that contains `rank`.

    Args:
        hardware: Record of the chip.
        rank: The rank that calls.
        operation: Name of the collective, for messages.
        srcs: Tensors to send.
        dsts: Tensors to receive.
        replica_group: The group as the kernel gives it.
        priority: DMA priority, or None.

    Raises:
        RuleViolation: A tensor, the group or the priority breaks a rule, or no list of the group contains the rank.
    """
    check_tensors(hardware, operation, srcs, dsts, priority)
    is_replica_group(replica_group)
    return replica_group.find_group(rank)


def check_tensors(hardware: Hardware, operation: str, srcs: Any, dsts: Any, priority: int | None) -> None:
    """Check that srcs and dsts are lists of tensors that a collective can exchange; raise RuleViolation if not.

    They are of equal length, all in HBM or one 2D tensor each in SBUF, without packed dtypes or run-time addresses. The
    priority, if it is not None, must exist on the chip.
    """
    tensor_lists(operation, srcs, dsts)
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        for tensor in tensors:
            rules.is_tensor(operand, tensor)
            rules.lies_in(operand, tensor, *rules.HBM, MemoryRegion.sbuf)
            rules.not_indirect(operand, tensor)
            rules.not_packed(operand, tensor)
            if tensor.buffer.on_chip:
                rules.check_tile(hardware, operand, tensor, MemoryRegion.sbuf)
    one_memory_space([*srcs, *dsts])
    if priority is not None:
        priority_on_chip(hardware, priority)


def check_in_hbm(operation: str, srcs: Tensors, dsts: Tensors) -> None:
    """Raise RuleViolation if one of the tensors is in SBUF, for collectives that support HBM only."""
    for tensor in (*srcs, *dsts):
        rules.lies_in(f"a tensor of {operation}", tensor, *rules.HBM)


def plan_collective(
    hardware: Hardware,
    operation: str,
    group: tuple[int, ...],
    reads: Tensors,
    writes: Tensors,
    exchange: Exchange,
    name: str | None,
    key: Hashable = None,
    hops: float = 0.5,
    undocumented: tuple[RuleViolation, ...] = (),
    **terms: Any,
) -> Plan:
    """Return the plan of a collective for one rank: it waits for the other members, then all exchange their tensors.

    Args:
        hardware: Record of the chip.
        operation: Name of the collective.
        group: Ranks of the members, which must agree on operation and terms.
        reads: Tensors that this rank reads.
        writes: Tensors that this rank writes.
        exchange: Function from the operands of all members to the results of each.
        name: Name that the user gave to the instruction.
        key: Identity of the rendezvous; None for the operation's group.
        hops: Scale of payload and steps in the cost, as `dma_costs.collective` has it.
        undocumented: Violations of rules that the rules of the launch judge.
        terms: Further terms that the members must agree on.
    """
    total = max(sum(tensor.size * tensor.dtype.itemsize for tensor in tensors) for tensors in (reads, writes))
    return Plan(
        engine=Engine.dma,
        reads=tuple(reads),
        writes=tuple(writes),
        domain=Domain.bits,
        compute=exchange,
        cost=dma_costs.collective(hardware, len(group), total, hops),
        name=name,
        trigger=Engine.sync,
        rendezvous=Rendezvous(
            key=key or ("collective", group),
            by_rank=True,
            members=group,
            terms={"operation": operation, "replica group": list(group), **terms},
            exchange=exchange,
        ),
        undocumented=undocumented,
        effects=_EFFECTS,
    )


def list_signatures(**lists: Tensors) -> dict[str, Any]:
    """Return for each named list of tensors their (shape, dtype name) pairs: terms on which members must agree."""
    return {
        name: [(listed_tensor.shape, str(listed_tensor.dtype)) for listed_tensor in tensors]
        for name, tensors in lists.items()
    }


def reduction(op: Any) -> AluOperator:
    """Return the ALU operator of a reducing collective; raise RuleViolation unless it is add, minimum or maximum."""
    operator = alu_operator(op)
    collective_reduction(operator)
    return operator


def reduce_arrays(
    operator: AluOperator, arrays: Sequence[np.ndarray], source: DType, target: DType
) -> np.ndarray:
    """Return arrays reduced by an operator in their order, in the storage dtype of `target`.

    Integers are reduced in their own dtype, wrapping around. Floats are reduced in float32 and rounded once at the end.

    Args:
        operator: add, minimum or maximum.
        arrays: Arrays of equal shape, one per member.
        source: Dtype of the arrays.
        target: Dtype of the result.
    """
    if source.is_integer:
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = _INTEGER[operator.name](total, array)
        return cast(total, source, target)
    total = arrays[0].astype(np.float32)
    for array in arrays[1:]:
        total = operator.function(total, array.astype(np.float32))
    return cast(total, float32, target)


def expect_shape(operation: str, ranks: int, src: NkiTensor, dst: NkiTensor, expected: Sequence[int]) -> None:
    """Raise RuleViolation unless dst has the shape `expected`, which the collective gives for `ranks` ranks."""
    if dst.shape != tuple(expected):
        raise RuleViolation(
            collective_shapes,
            f"{operation} over {ranks} ranks: src {src.shape}, dst {dst.shape}",
            limit=f"dst of shape {tuple(expected)}",
        )


def compute_chunk_shape(src: NkiTensor, ranks: int, dim: int) -> list[int]:
    """Return the shape of one of `ranks` equal chunks of src along `dim`; raise RuleViolation if they are not equal."""
    if src.shape[dim] % ranks:
        raise RuleViolation(
            collective_shapes, f"src {src.shape} does not divide into {ranks} chunks along dim {dim}"
        )
    chunk = list(src.shape)
    chunk[dim] //= ranks
    return chunk


@rule("NKW-COLLECTIVE-LISTS", hint="give as many dsts as srcs")
def tensor_lists(operation: str, srcs: Any, dsts: Any) -> None:
    """srcs and dsts are lists of equal, non-zero length.

    Raises RuleViolation if one is no list or tuple, or empty, or their lengths differ.
    """
    for operand, tensors in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(tensors, (list, tuple)) or not tensors:
            raise RuleViolation(
                tensor_lists,
                f"{operand}={type(tensors).__name__} for {operation}",
                hint=f"{operand}=[tensor]",
            )
    if len(srcs) != len(dsts):
        raise RuleViolation(tensor_lists, f"{len(srcs)} srcs, {len(dsts)} dsts")


@rule("NKW-COLLECTIVE-ONE-TENSOR", limit="1", hint="issue the collective once for each tensor")
def single_tensors(operation: str, *lists: Tensors) -> None:
    """This collective takes one tensor per list.

    Raises RuleViolation if one of the lists has more or fewer tensors than one.
    """
    for tensors in lists:
        if len(tensors) != 1:
            raise RuleViolation(single_tensors, f"{len(tensors)} tensors in a list of {operation}")


@rule("NKW-COLLECTIVE-MEMORY", hint="put all operands in HBM, or use one 2D SBUF src and one 2D SBUF dst")
def one_memory_space(tensors: list[NkiTensor]) -> None:
    """A collective works on HBM tensors or on one two-dimensional SBUF tensor, never on both.

    Raises RuleViolation if a tensor is on chip, unless all tensors are one 2D src and one 2D dst in SBUF.
    """
    on_chip = [t for t in tensors if t.buffer.on_chip]
    if on_chip and (len(on_chip) != len(tensors) or len(tensors) != 2 or any(t.ndim != 2 for t in on_chip)):
        raise RuleViolation(one_memory_space, ", ".join(t.describe() for t in tensors))


@rule("NKW-COLLECTIVE-OPERATOR", hint="op=nl.add; for other operators all_gather, then reduce on each rank")
def collective_reduction(operator: AluOperator) -> None:
    """A collective reduces with add, minimum or maximum.

    Raises RuleViolation otherwise.
    """
    if operator.name not in _REDUCTIONS:
        raise RuleViolation(collective_reduction, f"op={operator.name}", limit=", ".join(_REDUCTIONS))


@rule(
    "NKW-COLLECTIVE-SHAPE",
    hint="allocate dst with the shape that the collective gives; pad a src that does not divide",
)
def collective_shapes() -> None:
    """The shapes of src and dst fit the collective and the number of ranks.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule(
    "NKW-COLLECTIVE-SCATTER-DIM", limit="0", hint="collective_dim=0; transpose or permute the tensor before"
)
def splits_along(dim: Any) -> None:
    """reduce_scatter and all_to_all split along dim 0.

    Raises RuleViolation otherwise.
    """
    if dim != 0:
        raise RuleViolation(splits_along, f"collective_dim={dim}")
