"""Affine values of iota and affine_select: element (p, i) is offset + p * channel_multiplier + pattern value i."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.isa.immediates import parse_integer
from simulate.memory import NkiTensor
from simulate.memory.registers import VirtualRegister

_PAIRS_MAX = 4


def affine(
    dst: NkiTensor, pattern: Any, offset: Any, channel_multiplier: Any
) -> tuple[tuple[NkiTensor, ...], Callable[[Sequence[np.ndarray]], np.ndarray]]:
    """Return the register cells that the instruction must read, and a function from them to int32 (P, elements).

    The arithmetic is int32; overflow, which is not documented, wraps around (two's complement).

    Args:
        dst: Tile with P partitions; p counts from its first partition [not documented].
        pattern: Up to four [step, num] pairs, the outermost first. The product of the nums is dst's elements per
            partition.
        offset: An int32 number or a register. The tuple of cells is empty for a number.
        channel_multiplier: An int32 number.

    Raises:
        RuleViolation: A number is no int32, or the pattern has another form or number of values.
    """
    pairs = _pairs(dst, pattern)
    multiplier = _int32("channel_multiplier", channel_multiplier)
    register = isinstance(offset, VirtualRegister)
    start = 0 if register else _int32("offset", offset)
    partitions = dst.shape[0]

    def values(cells: Sequence[np.ndarray]) -> np.ndarray:
        first = int(cells[0].reshape(())) if cells else start
        row = np.zeros((1,), np.int64)
        for step, num in pairs:
            row = (row[:, None] + step * np.arange(num, dtype=np.int64)).reshape(-1)
        column = first + multiplier * np.arange(partitions, dtype=np.int64)
        return column.astype(np.int32)[:, None] + row.astype(np.int32)

    return ((offset.cell,) if register else ()), values


def _int32(name: str, value: Any) -> int:
    number = parse_integer(value, -(2**31), 2**31 - 1)
    if number is None:
        raise RuleViolation(affine_is_int32, f"{name}={value!r:.60}")
    return number


def _pairs(dst: NkiTensor, pattern: Any) -> list[tuple[int, int]]:
    try:
        pairs = [(operator.index(step), operator.index(num)) for step, num in pattern]
    except (TypeError, ValueError):
        pairs = []
    if not 1 <= len(pairs) <= _PAIRS_MAX or any(num < 1 for _, num in pairs):
        raise RuleViolation(
            pattern_is_pairs,
            f"pattern={pattern!r:.60}",
            limit=f"1 to {_PAIRS_MAX} pairs, nums of 1 or more",
            hint=f"pattern=[[1, {dst.free_size}]]",
        )
    count = 1
    for step, num in pairs:
        _int32("step", step)
        count *= num
    if count != dst.free_size:
        raise RuleViolation(
            pattern_covers,
            f"pattern {[list(pair) for pair in pairs]} has {count} values, dst has {dst.free_size} elements",
        )
    return pairs


@rule(
    "NKW-AFFINE-INT32",
    limit="an integer of 32 bits",
    hint="pass a Python int; a run-time offset goes through a register",
)
def affine_is_int32() -> None:
    """Offset, channel_multiplier and steps are int32 numbers (the offset: or a register).

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-AFFINE-PATTERN")
def pattern_is_pairs() -> None:
    """An affine pattern is a list of up to four [step, num] pairs, the outermost first.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """


@rule("NKW-AFFINE-COUNT", hint="make the product of the nums the elements per partition")
def pattern_covers() -> None:
    """An affine pattern has one value for each element of a partition.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """
