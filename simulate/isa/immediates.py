"""Compile-time numbers as the engines get them: float32, or integers of a given range."""

from __future__ import annotations

import operator
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.numerics import float32

# Kernels write the largest float32 with eight digits, 3.4028235e38, which lies above it and rounds to it.
_ROUNDS_TO_INFINITY = float32.max + 2.0 ** (127 - 24)  # half a unit in the last place


def parse_float32(operand: str, value: Any) -> np.float32:
    """Return a compile-time number as float32; one that rounds to the largest float32 is accepted.

    Raises:
        RuleViolation: The value is no number, or is finite and beyond the range of float32.
    """
    is_number(operand, value)
    if not _rounds_to_float32(value):
        raise RuleViolation(fits_float32, f"{operand}={value!r:.60}", limit=f"{float32.max}")
    return np.float32(value)


def _rounds_to_float32(value: Any) -> bool:
    try:
        number = float(value)
    except OverflowError:  # a Python integer beyond float64
        return False
    return not isfinite(number) or abs(number) < _ROUNDS_TO_INFINITY


def parse_integer(value: Any, low: int, high: int) -> int | None:
    """Return the value as a Python integer, or None if it is no integer or outside low … high."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if low <= number <= high else None


@rule("NKW-FLOAT32-RANGE", hint="use float('inf')")
def fits_float32() -> None:
    """A compile-time number reaches an engine as float32: infinite, NaN, or within float32's range.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-NUMBER", hint="a Python number or a (P, 1) tile")
def is_number(operand: str, value: Any) -> None:
    """An operand that is no tile is a compile-time number.

    Raises RuleViolation if the value is no real number; callers apply it to values that are no tiles.
    """
    if not isinstance(value, Real):
        raise RuleViolation(is_number, f"{operand} is {type(value).__name__} {value!r:.60}")
