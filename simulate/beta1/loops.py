"""Loops and the SPMD grid of Beta 1.

Python runs every loop, so the stream has the instructions of all iterations. The programs of a grid run one after
another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nkw.errors import InvalidArgument
from simulate.beta1.program import current
from simulate.nki.affine import iterate_independently


class LoopVariable(int):
    """Integer of a loop variable in one iteration; `first` tells whether it is the loop's first iteration."""

    first: bool

    def __new__(cls, value: int, first: bool) -> LoopVariable:
        """Create the integer `value` with the attribute `first`."""
        self = super().__new__(cls, value)
        self.first = first
        return self


class nc(int):
    """Size of a grid dim over physical cores, `nl.nc(2)`; all programs run one after another on one core."""


def affine_range(*bounds: int, **_: Any) -> Iterator[LoopVariable]:
    """Yield the integers of `range(*bounds)`, for a loop whose iterations do not depend on each other.

    Options for the compiler's schedule change nothing. Instructions are recorded with their iteration, so that
    detectors find a dependence.
    """
    for number, value in enumerate(iterate_independently(range(*bounds))):
        yield LoopVariable(value, number == 0)


def sequential_range(*bounds: int, **_: Any) -> Iterator[LoopVariable]:
    """Yield the integers of `range(*bounds)`, for a loop whose iterations depend on earlier ones."""
    for number, value in enumerate(range(*bounds)):
        yield LoopVariable(value, number == 0)


static_range = sequential_range
"""A loop that is unrolled, as every loop is here."""


def spmd_dim(*sizes: int) -> int:
    """Return the size of one grid dim made of several: the product of their sizes."""
    return math.prod(sizes)


def program_id(axis: int) -> int:
    """Return the position of the running program on an axis of the grid. Raises InvalidArgument for an unknown axis."""
    return _select_axis(current().ids, axis, "program_id")


def num_programs(axes: Any = 0) -> Any:
    """Return the size of the grid on an axis, or a tuple of sizes for several axes.

    Raises InvalidArgument for an unknown axis.
    """
    sizes = current().sizes
    if isinstance(axes, (tuple, list)):
        return tuple(_select_axis(sizes, axis, "num_programs") for axis in axes)
    return _select_axis(sizes, axes, "num_programs")


def program_ndim() -> int:
    """Return the number of axes of the grid; 0 for a kernel launched without one."""
    return len(current().sizes)


def _select_axis(values: tuple[int, ...], axis: Any, name: str) -> int:
    """Return the element of `values` for an axis; without a grid, id 0 or size 1 for axis 0.

    Args:
        values: Ids or sizes by axis.
        axis: The axis.
        name: The function that was called: "program_id", or another for sizes.

    Raises:
        InvalidArgument: The grid has no such axis.
    """
    if not isinstance(axis, int) or not 0 <= axis < max(len(values), 1):
        raise InvalidArgument(
            "NKW-GRID", f"{name}({axis!r:.40}); the launch grid has {len(values)} axes, numbered from 0"
        )
    return values[axis] if values else (0 if name == "program_id" else 1)
