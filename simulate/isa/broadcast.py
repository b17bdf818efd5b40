"""Operands with one value for all elements of a partition: a number, or a (P, 1) tile; and a rule of operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.immediates import parse_float32
from simulate.isa.shapes import column
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator


def check_operand(
    hardware: Hardware, operand: str, value: Any, like: NkiTensor, *dtypes: str
) -> tuple[NkiTensor, ...]:
    """Check such an operand; return (the tile,) to read it, or an empty tuple for a number.

    Args:
        hardware: Record of the chip.
        operand: Name of the operand, for messages.
        value: The operand as the kernel gives it.
        like: Tile whose number of partitions a (P, 1) tile must have.
        dtypes: Dtypes that a tile may have; none for any that is not packed.

    Raises:
        RuleViolation: The number is no float32 number, or the tile breaks a rule.
    """
    if not isinstance(value, NkiTensor):
        parse_float32(operand, value)
        return ()
    rules.check_tile(hardware, operand, value)
    rules.is_column(operand, value, like)
    rules.not_packed(operand, value)
    if dtypes:
        rules.dtype_among(operand, value, *dtypes)
    return (value,)


def take_broadcast_value(value: Any, operands: Iterator[np.ndarray], ndim: int) -> np.ndarray | np.float32:
    """Return the value of such an operand for NumPy to broadcast over a tile of `ndim` dims.

    Args:
        value: The operand as the kernel gives it. A number is returned as float32.
        operands: Arrays of the instruction's remaining operands, of which the next is taken if `value` is a tile.
        ndim: Number of dims of the tile.
    """
    return column(next(operands), ndim) if isinstance(value, NkiTensor) else np.float32(value)


@rule("NKW-ARITHMETIC-OPERATOR", hint="nl.add, nl.multiply, nl.maximum, nl.greater, …")
def arithmetic_on_vector(hardware: Hardware, operand: str, operator: AluOperator) -> None:
    """The instruction takes an arithmetic operator of the Vector engine.

    Raises RuleViolation otherwise.
    """
    rules.operator_on_chip(hardware, operand, operator)
    if rules.is_bitvec(operator) or "vector" not in operator.engines:
        raise RuleViolation(arithmetic_on_vector, f"{operand}={operator.name}")
