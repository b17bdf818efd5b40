"""tensor_reduce: reduce the trailing free dims of a tile."""

from __future__ import annotations

import operator as python_operator
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import JOINS_COLUMNS, Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator, alu_operator


@instruction
def tensor_reduce(
    hardware: Hardware,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: int | tuple[int, ...],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Plan:
    """Reduce the trailing dims `axis` of data by op into dst, on the Vector engine.

    data: [P, ...] @ SBUF or PSUM. dst: [P, ...] @ SBUF or PSUM with one element per partition and element not
    reduced. axis: dims as written, 0 being the partition dim, which cannot be reduced; one dim or several that follow
    each other up to the last. keepdims decides whether dst keeps dims of size 1;
    as operands are matched by element counts, both kinds of dst are taken either way.

    Arithmetic operators compute in float32 (numpy's order of summation; the hardware's is not documented) and round
    once; `negate` multiplies by -1 before. Bitvec operators work on raw bits of integers of one size, without
    negate. `subtract` gives the first element minus the rest, as folding does [not documented].

    Raises RuleViolation. Cost: one element per cycle; bfloat16 add and maximum at the record's rate.
    """
    rules.check_unpacked(hardware, indirect=True, dst=dst, data=data)
    axes = _axes(data, axis)
    rules.same_partitions("dst", dst, "data", data)
    indirection.check(hardware, Engine.vector, dst, data)
    operator = alu_operator(op)
    rules.operator_on_chip(hardware, "op", operator)
    vector_reduces(operator)
    keeps_unreduced(dst, data, axes)
    bitvec = rules.is_bitvec(operator)
    if bitvec:
        rules.bitvec_takes_integers(operator, dst=dst, data=data)
        no_negated_bits(operator, negate)
    reduce, element = operator.reduce, dst.dtype.storage
    assert reduce is not None

    def compute(values: np.ndarray) -> tuple[np.ndarray]:
        result = reduce(values, axes)
        if bitvec:
            return (result.view(element),)
        return (np.negative(result) if negate else result,)

    return Plan(
        engine=Engine.vector,
        reads=(data,),
        writes=(dst,),
        domain=Domain.bits if bitvec else Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, data.free_size, _pace(dst, data, operator)),
        name=name,
        propagate=propagation.reduced,
        effects=JOINS_COLUMNS,
        undocumented=rules.violations(
            *rules.flags(negate=negate, keepdims=keepdims), (dims_count_from_front, axis)
        ),
    )


def _pace(dst: NkiTensor, data: NkiTensor, operator: AluOperator) -> str | None:
    bfloat16 = dst.dtype == "bfloat16" and data.dtype == "bfloat16"
    fast = bfloat16 and operator.name in ("add", "maximum")
    return "vector_reduce_16bit" if fast else None


def _axes(data: NkiTensor, axis: Any) -> tuple[int, ...]:
    try:
        requested = [python_operator.index(a) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    except TypeError:
        requested = []
    axes = tuple(sorted(a + data.ndim if a < 0 else a for a in requested))
    trailing_dims(data, axis, axes)
    return axes


@rule(
    "NKW-REDUCE-AXIS",
    hint="permute the view so that the reduced dims come last; reduce partitions with a matmul",
)
def trailing_dims(data: NkiTensor, axis: Any, axes: tuple[int, ...]) -> None:
    """tensor_reduce reduces a run of free dims that ends with the last; the partition dim cannot be reduced.

    Raises RuleViolation otherwise.
    """
    if not axes or 0 in axes or axes != tuple(range(data.ndim - len(axes), data.ndim)):
        allowed = [tuple(range(start, data.ndim)) for start in range(data.ndim - 1, 0, -1)]
        raise RuleViolation(
            trailing_dims,
            f"axis={axis!r:.40} of data {data.shape}",
            limit=" or ".join(str(a) for a in allowed),
        )


@rule("NKW-REDUCE-COUNT")
def keeps_unreduced(dst: NkiTensor, data: NkiTensor, axes: tuple[int, ...]) -> None:
    """dst has one element per partition for each element that is not reduced.

    Raises RuleViolation otherwise.
    """
    kept = int(np.prod(data.shape[1 : axes[0]], dtype=np.int64))
    if dst.free_size != kept:
        raise RuleViolation(
            keeps_unreduced,
            f"dst has {dst.free_size} elements per partition, data {data.shape} without dims {axes} has {kept}",
            hint=f"dst of shape ({data.shape[0]}, {kept})",
        )


@rule("NKW-REDUCE-OPERATOR", hint="nl.add, nl.maximum or nl.minimum")
def vector_reduces(operator: AluOperator) -> None:
    """tensor_reduce takes add, subtract, multiply, maximum, minimum or a logical or bitwise and, or, xor.

    Raises RuleViolation for any other operator.
    """
    if not operator.reducible or "vector" not in operator.engines:
        raise RuleViolation(vector_reduces, f"op={operator.name}")


@rule("NKW-REDUCE-NEGATE", hint="negate=False")
def no_negated_bits(operator: AluOperator, negate: bool) -> None:
    """negate multiplies by -1, which bitvec operators do not do.

    Raises RuleViolation if negate is True; the planner applies it to bitvec operators.
    """
    if negate:
        raise RuleViolation(no_negated_bits, f"negate=True with {operator.name}")


@rule("NKW-REDUCE-AXIS-NEGATIVE", limit="dims counted from 0, the partition dim")
def dims_count_from_front(axis: Any) -> None:
    """axis names dims as written: the reference documents no negative numbers.

    Raises RuleViolation if a number is negative.
    """
    numbers = axis if isinstance(axis, (tuple, list)) else (axis,)
    if any(number < 0 for number in numbers):
        raise RuleViolation(
            dims_count_from_front, f"axis={axis!r:.40}", hint="axis=data.ndim - 1 for the last dim"
        )
