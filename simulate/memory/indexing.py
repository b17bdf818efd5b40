"""Checked indices and slices of tensors, for `NkiTensor.__getitem__`: as in Python, but no slice may leave its dim."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any

from nkw.errors import OutOfBounds
from simulate.memory.view_rules import index_within_tensor


def fill_ellipsis(keys: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Return an index tuple with its Ellipsis replaced by as many full slices as make it `rank` entries long.

    Args:
        keys: The index, which has an Ellipsis.
        rank: The number of dims of the tensor.
    """
    position = next(i for i, key in enumerate(keys) if isinstance(key, EllipsisType))
    missing = rank - (len(keys) - 1)
    return keys[:position] + (slice(None),) * max(missing, 0) + keys[position + 1 :]


def normalise_slice(key: slice, extent: int, dim: int) -> tuple[int, int, int]:
    """Return start, end and step of a slice of a dim, with defaults filled in and negative bounds counted from the end.

    Args:
        key: The slice, of Python ints or None.
        extent: Size of the dim.
        dim: Number of the dim, for messages.

    Raises:
        OutOfBounds: A bound is beyond the dim, the end is before the start, the step is below 1, or one is no integer.
    """
    start, end, step = key.start, key.stop, key.step
    if start is None and end is None and step is None:
        return 0, extent, 1
    try:
        start = 0 if start is None else operator.index(start)
        end = extent if end is None else operator.index(end)
        step = 1 if step is None else operator.index(step)
    except TypeError:
        raise OutOfBounds(
            index_within_tensor,
            f"slice({key.start}, {key.stop}, {key.step}) on dim {dim}",
            hint="use Python ints",
        ) from None
    if start < 0:
        start += extent
    if end < 0:
        end += extent
    if not (0 <= start <= end <= extent and step >= 1):
        raise OutOfBounds(
            index_within_tensor,
            f"slice {_format_slice(key)} on dim {dim} of size {extent}",
            limit="0 <= start <= end <= size, step >= 1",
            hint=f"clip the end: min({end}, {extent})"
            if end > extent
            else "count from the start of the dim, forwards",
        )
    return start, end, step


def _format_slice(key: slice) -> str:
    """Return a slice as the source has it: `0:129` or `::2`."""
    ends = f"{'' if key.start is None else key.start}:{'' if key.stop is None else key.stop}"
    return ends if key.step is None else f"{ends}:{key.step}"


def normalise_index(key: Any, extent: int, dim: int) -> int:
    """Return an index into a dim as an int from 0 to extent - 1; a negative index counts from the end.

    Args:
        key: The index.
        extent: Size of the dim.
        dim: Number of the dim, for messages.

    Raises:
        OutOfBounds: The index is outside -extent to extent - 1, or is no integer.
    """
    try:
        index = operator.index(key)
    except TypeError:
        raise OutOfBounds(
            index_within_tensor,
            f"index {key!r:.60} of type {type(key).__name__} on dim {dim}",
            hint="use Python ints, slices, nl.ds or Ellipsis; run-time indices go through .ap or .select",
        ) from None
    if not -extent <= index < extent:
        raise OutOfBounds(
            index_within_tensor,
            f"index {index} on dim {dim} of size {extent}",
            limit=f"-{extent} to {extent - 1}",
        )
    return index % extent
