"""One stage of an ALU: its operator, the second operand that it repeats over the elements, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.broadcast import broadcast_value, operand_tiles
from simulate.isa.immediates import float32_number, integer_within
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator


@dataclass(frozen=True, slots=True)
class Stage:
    """operator(values, operand), or operator(operand, values) with `reverse`; a unary operator has no operand.

    `reads` holds the operand if it is a tile.
    """

    operator: AluOperator
    operand: NkiTensor | float | None
    reverse: bool
    reads: tuple[NkiTensor, ...]

    def apply(self, values: np.ndarray, operands: Iterator[np.ndarray]) -> np.ndarray:
        """Apply the stage to a tile; its own tile, if it has one, comes from `operands`."""
        function = self.operator.function
        if self.operator.arity == 1:
            return function(values)
        other: Any
        if rules.is_bitvec(self.operator) and not self.reads:
            other = self.operand
        else:
            other = broadcast_value(self.operand, operands, values.ndim)
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
    """Check the operand of stage `number` (op0 or op1) over `data`, and build the stage.

    An arithmetic operator takes a number or a (P, 1) tile of float32 (or of `dtypes`, where given), a bitvec operator
    an integer or a (P, 1) tile of the data's dtype, a unary operator None or 0.
    """
    name = f"operand{number}"
    if operator.arity == 1:
        unary_has_no_operand(name, operand, operator)
        return Stage(operator, None, False, ())
    if not rules.is_bitvec(operator):
        if not isinstance(operand, NkiTensor):
            operand = float32_number(name, operand)
        return Stage(
            operator,
            operand,
            bool(reverse),
            operand_tiles(hardware, name, operand, data, *(dtypes or ("float32",))),
        )
    if isinstance(operand, NkiTensor):
        reads = operand_tiles(hardware, name, operand, data, str(data.dtype))
        return Stage(operator, operand, bool(reverse), reads)
    return Stage(operator, _bits(name, operand, data), bool(reverse), ())


def _bits(name: str, value: Any, data: NkiTensor) -> int:
    width = 8 * data.dtype.itemsize
    bits = integer_within(value, -(2 ** (width - 1)), 2**width - 1)
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
    """The number beside bitvec data is an integer of as many bits."""


@rule("NKW-UNARY-OPERAND")
def unary_has_no_operand(name: str, operand: Any, operator: AluOperator) -> None:
    """An operator of one operand leaves its operand slot None or 0."""
    if operand is not None and (isinstance(operand, NkiTensor) or operand != 0):
        seen = operand.describe() if isinstance(operand, NkiTensor) else f"{operand!r:.60}"
        raise RuleViolation(unary_has_no_operand, f"{name}={seen} with {operator.name}", hint=f"{name}=None")
