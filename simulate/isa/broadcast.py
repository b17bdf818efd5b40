"""Operands that are one value for all elements: a number, or a (P, 1) tile with one per partition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.immediates import float32_number
from simulate.isa.shapes import column
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator


def operand_tiles(
    hardware: Hardware, operand: str, value: Any, like: NkiTensor, *dtypes: str
) -> tuple[NkiTensor, ...]:
    """Return the tile to read for an operand, or none for a number; without `dtypes` every dtype is allowed."""
    if not isinstance(value, NkiTensor):
        float32_number(operand, value)
        return ()
    rules.check_tile(hardware, operand, value)
    rules.is_column(operand, value, like)
    rules.not_packed(operand, value)
    if dtypes:
        rules.dtype_among(operand, value, *dtypes)
    return (value,)


def broadcast_value(value: Any, operands: Iterator[np.ndarray], ndim: int) -> np.ndarray | np.float32:
    """Return what `compute` broadcasts over an `ndim`-dimensional tile; if it is a tile, the next operand."""
    return column(next(operands), ndim) if isinstance(value, NkiTensor) else np.float32(value)


@rule("NKW-ARITHMETIC-OPERATOR", hint="nl.add, nl.multiply, nl.maximum, nl.greater, …")
def arithmetic_on_vector(hardware: Hardware, operand: str, operator: AluOperator) -> None:
    """The instruction takes an arithmetic operator of the Vector engine."""
    rules.operator_on_chip(hardware, operand, operator)
    if rules.is_bitvec(operator) or "vector" not in operator.engines:
        raise RuleViolation(arithmetic_on_vector, f"{operand}={operator.name}")
