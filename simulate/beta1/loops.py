"""Loops and the SPMD grid of Beta 1: unrolled loops, and programs that run one after another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nkw.errors import InvalidArgument
from simulate.beta1.program import current
from simulate.nki.affine import iterate_independently


class LoopVariable(int):
    """The variable of a loop: an integer, and whether this is the first iteration."""

    first: bool

    def __new__(cls, value: int, first: bool) -> LoopVariable:
        """Create the value of a loop variable in one iteration."""
        self = super().__new__(cls, value)
        self.first = first
        return self


class nc(int):
    """`nl.nc(2)`: a grid dim over physical cores; the programs of all cores run one after another."""


def affine_range(*bounds: int, **_: Any) -> Iterator[LoopVariable]:
    """Iterate without carried dependences; options for the compiler's schedule change nothing."""
    for number, value in enumerate(iterate_independently(range(*bounds))):
        yield LoopVariable(value, number == 0)


def sequential_range(*bounds: int, **_: Any) -> Iterator[LoopVariable]:
    """Iterate with carried dependences."""
    for number, value in enumerate(range(*bounds)):
        yield LoopVariable(value, number == 0)


static_range = sequential_range
"""A loop that is unrolled, as every loop is here."""


def spmd_dim(*sizes: int) -> int:
    """Return one grid dim made of several: as many programs as their product."""
    return math.prod(sizes)


def program_id(axis: int) -> int:
    """Return the index of this program on an axis of the grid."""
    return _on_axis(current().ids, axis, "program_id")


def num_programs(axes: Any = 0) -> Any:
    """Return the size of the grid on an axis, or on several axes."""
    sizes = current().sizes
    if isinstance(axes, (tuple, list)):
        return tuple(_on_axis(sizes, axis, "num_programs") for axis in axes)
    return _on_axis(sizes, axes, "num_programs")


def program_ndim() -> int:
    """Return the number of axes of the grid."""
    return len(current().sizes)


def _on_axis(values: tuple[int, ...], axis: Any, name: str) -> int:
    if not isinstance(axis, int) or not 0 <= axis < max(len(values), 1):
        raise InvalidArgument(
            "NKW-GRID", f"{name}({axis!r:.40}); the launch grid has {len(values)} axes, numbered from 0"
        )
    return values[axis] if values else (0 if name == "program_id" else 1)
