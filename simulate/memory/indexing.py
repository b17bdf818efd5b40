"""Checked indices and slices of a tensor: Python's rules, except that a slice beyond its dim is refused."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any

from nkw.errors import OutOfBounds
from simulate.memory.view_rules import index_within_tensor


def fill_ellipsis(keys: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """An index with its Ellipsis spelled out as full slices."""
    at = next(i for i, key in enumerate(keys) if isinstance(key, EllipsisType))
    missing = rank - (len(keys) - 1)
    return keys[:at] + (slice(None),) * max(missing, 0) + keys[at + 1 :]


def slice_bounds(part: slice, extent: int, dim: int) -> tuple[int, int, int]:
    """Start, end and step of a slice of a dim of size `extent`; raises OutOfBounds where it leaves the dim."""
    start, end, step = part.start, part.stop, part.step
    if start is None and end is None and step is None:
        return 0, extent, 1
    try:
        start = 0 if start is None else operator.index(start)
        end = extent if end is None else operator.index(end)
        step = 1 if step is None else operator.index(step)
    except TypeError:
        raise OutOfBounds(
            index_within_tensor,
            f"slice({part.start}, {part.stop}, {part.step}) on dim {dim}",
            hint="use Python ints",
        ) from None
    if start < 0:
        start += extent
    if end < 0:
        end += extent
    if not (0 <= start <= end <= extent and step >= 1):
        raise OutOfBounds(
            index_within_tensor,
            f"slice {_spelled(part)} on dim {dim} of size {extent}",
            limit="0 <= start <= end <= size, step >= 1",
            hint=f"clip the end: min({end}, {extent})"
            if end > extent
            else "count from the start of the dim, forwards",
        )
    return start, end, step


def _spelled(part: slice) -> str:
    """A slice as the source has it: `0:129` or `::2`."""
    ends = f"{'' if part.start is None else part.start}:{'' if part.stop is None else part.stop}"
    return ends if part.step is None else f"{ends}:{part.step}"


def index_of(part: Any, extent: int, dim: int) -> int:
    """An index into a dim of size `extent`, made non-negative; raises OutOfBounds where it leaves the dim."""
    try:
        index = operator.index(part)
    except TypeError:
        raise OutOfBounds(
            index_within_tensor,
            f"index {part!r:.60} of type {type(part).__name__} on dim {dim}",
            hint="use Python ints, slices, nl.ds or Ellipsis; run-time indices go through .ap or .select",
        ) from None
    if not -extent <= index < extent:
        raise OutOfBounds(
            index_within_tensor,
            f"index {index} on dim {dim} of size {extent}",
            limit=f"-{extent} to {extent - 1}",
        )
    return index % extent
