"""`Stage`: one operator of an instruction, such as op0 of tensor_scalar, with the second operand of that operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.broadcast import check_operand, take_broadcast_value
from simulate.isa.immediates import parse_float32, parse_integer
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator


@dataclass(frozen=True, slots=True)
class Stage:
    """Operator applied to each element of a tile: operator(values, operand), or operator(operand, values) if `reverse`.

    Attributes:
        operator: The operator; a unary one has no operand.
        operand: A number, a (P, 1) tile with one value per partition, or None.
        reverse: Whether the operand is the first argument.
        reads: The operand if it is a tile, else empty; the tiles that the instruction must read for the stage.
    """

    operator: AluOperator
    operand: NkiTensor | float | None
    reverse: bool
    reads: tuple[NkiTensor, ...]

    def apply(self, values: np.ndarray, operands: Iterator[np.ndarray]) -> np.ndarray:
        """Return the operator's result for each element of the array `values`.

        Args:
            values: Elements of the tile; dim 0 is the partition.
            operands: Arrays of the instruction's remaining operands. The stage takes the next one if its operand is a
                tile.
        """
        function = self.operator.function
        if self.operator.arity == 1:
            return function(values)
        other: Any
        if rules.is_bitvec(self.operator) and not self.reads:
            other = self.operand
        else:
            other = take_broadcast_value(self.operand, operands, values.ndim)
        return function(other, values) if self.reverse else function(values, other)


def stage(
    hardware: Hardware,
    number: int,
    operator: AluOperator,
    operand: Any,
    reverse: bool,
    data: NkiTensor,
    *dtypes: str,
) -> Stage:
    """Check the operand of an operator and return the `Stage`.

    An arithmetic operator takes a number or a (P, 1) tile of float32 (or of `dtypes`, if any are given). A bitvec
    operator takes an integer or a (P, 1) tile of data's dtype, a unary operator None or 0.

    Args:
        hardware: Record of the chip.
        number: 0 for op0, 1 for op1; names the operand in messages.
        operator: The operator.
        operand: The operand as the kernel gives it.
        reverse: Whether the operand is the operator's first argument.
        data: Tile to which the operator is applied.
        dtypes: Dtypes of a tile operand of an arithmetic operator.

    Raises:
        RuleViolation: The operand does not fit the operator or the data.
    """
    name = f"operand{number}"
    if operator.arity == 1:
        unary_has_no_operand(name, operand, operator)
        return Stage(operator, None, False, ())
    if not rules.is_bitvec(operator):
        if not isinstance(operand, NkiTensor):
            operand = parse_float32(name, operand)
        return Stage(
            operator,
            operand,
            bool(reverse),
            check_operand(hardware, name, operand, data, *(dtypes or ("float32",))),
        )
    if isinstance(operand, NkiTensor):
        reads = check_operand(hardware, name, operand, data, str(data.dtype))
        return Stage(operator, operand, bool(reverse), reads)
    return Stage(operator, _bits(name, operand, data), bool(reverse), ())


def _bits(name: str, value: Any, data: NkiTensor) -> int:
    width = 8 * data.dtype.itemsize
    bits = parse_integer(value, -(2 ** (width - 1)), 2**width - 1)
    if bits is None:
        raise RuleViolation(
            bitvec_operand_is_integer,
            f"{name}={value!r:.60} for {data.dtype} data",
            limit=f"an integer of {width} bits",
            hint=f"an integer, or a (P, 1) {data.dtype} tile",
        )
    return bits


@rule("NKW-BITVEC-OPERAND")
def bitvec_operand_is_integer() -> None:
    """The number beside bitvec data is an integer of as many bits.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-UNARY-OPERAND")
def unary_has_no_operand(name: str, operand: Any, operator: AluOperator) -> None:
    """An operator of one operand leaves its operand slot None or 0.

    Raises RuleViolation for a tile or another number; the caller applies it to operators of one operand.
    """
    if operand is not None and (isinstance(operand, NkiTensor) or operand != 0):
        seen = operand.describe() if isinstance(operand, NkiTensor) else f"{operand!r:.60}"
        raise RuleViolation(unary_has_no_operand, f"{name}={seen} with {operator.name}", hint=f"{name}=None")
