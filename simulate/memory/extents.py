"""Boxes: the elements of an allocation that a view covers, as one interval for each dim."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

Box = tuple[tuple[int, int], ...]
"""First coordinate and end in every dim; the last dim counts bytes."""


def find_boxes(
    sizes: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], offset: int, width: int
) -> tuple[Box | None, Box | None]:
    """Return the box that a view covers exactly, if there is one, and a box that encloses it.

    Both are None for a view that reaches outside of its allocation.

    Args:
        sizes: Dims of the allocation in row-major order, the last in bytes.
        shape: Shape of the view.
        strides: Strides of the view in bytes.
        offset: Offset of the view in bytes.
        width: Bytes of an element.
    """
    low = high = offset
    for extent, stride in zip(shape, strides):
        if extent < 1:
            return None, None
        reach = (extent - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    end = high + width
    steps = [1]
    for size in sizes[:0:-1]:
        steps.insert(0, steps[0] * size)
    if low < 0 or end > steps[0] * sizes[0]:
        return None, None
    exact = _exact(sizes, steps, shape, strides, offset, width)
    if exact is not None:
        return exact, exact
    rows = (low // steps[0], (end - 1) // steps[0] + 1)
    return None, (rows, *((0, size) for size in sizes[1:]))


def _exact(
    sizes: tuple[int, ...],
    steps: list[int],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    width: int,
) -> Box | None:
    """Return the box that a view covers exactly, None if it covers no box.

    The box grows from the first element, dim by dim of the view, shortest stride first.
    """
    first = []
    remainder = offset
    for step in steps:
        coordinate, remainder = divmod(remainder, step)
        first.append(coordinate)
    extents = [1] * len(sizes)
    moves = [(stride, extent) for stride, extent in zip(strides, shape) if extent > 1 and stride != 0]
    for stride, extent in sorted([(1, width), *moves]):
        for dim in range(len(sizes)):
            # The outermost dim along which the stride continues the box; dims of size 1 are skipped.
            if sizes[dim] > 1 and stride == steps[dim] * extents[dim]:
                break
        else:
            if extent == 1:
                continue
            return None
        extents[dim] *= extent
        while extents[dim] > sizes[dim]:
            # Consecutive full rows are a box of the dim above.
            above = dim - 1
            while above >= 0 and sizes[above] == 1:
                above -= 1
            if above < 0 or first[dim] or extents[dim] % sizes[dim] or extents[above] != 1:
                return None
            extents[above], extents[dim] = extents[dim] // sizes[dim], sizes[dim]
            dim = above
    box = tuple((start, start + extent) for start, extent in zip(first, extents))
    return box if all(end <= size for (_, end), size in zip(box, sizes)) else None


def contains(outer: Box, inner: Box) -> bool:
    """Return whether a box lies inside another box."""
    for (low, high), (first, end) in zip(outer, inner):  # noqa: SIM110  (all() takes twice as long)
        if first < low or end > high:
            return False
    return True


def meets(box: Box, other: Box) -> bool:
    """Return whether two boxes have a byte in common."""
    for (low, high), (first, end) in zip(box, other):  # noqa: SIM110  (all() takes twice as long)
        if first >= high or end <= low:
            return False
    return True


def join_boxes(box: Box, other: Box) -> Box | None:
    """Return two disjoint boxes as one box if they touch in one dim and are equal in all others; else None."""
    axis = -1
    for dim, (span, other_span) in enumerate(zip(box, other)):
        if span != other_span:
            if axis >= 0 or (span[1] != other_span[0] and other_span[1] != span[0]):
                return None
            axis = dim
    low, high = min(box[axis][0], other[axis][0]), max(box[axis][1], other[axis][1])
    return (*box[:axis], (low, high), *box[axis + 1 :])


def find_rows(
    on_chip: bool,
    row_bytes: int,
    width: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
) -> tuple[int, int, int, int]:
    """Return the box of rows by bytes that encloses a view: first and end row, first and end byte within a row.

    Args:
        on_chip: Whether rows are partitions; else they are all dims but the last.
        row_bytes: Bytes of a row.
        width: Bytes of an element.
        shape: Shape of the view.
        strides: Strides of the view in elements.
        offset: Offset of the view in elements.
    """
    row = row_bytes // width
    first, start = divmod(offset, row) if row else (0, 0)
    if on_chip:
        low, high = _reach(start, shape[1:], strides[1:])
        return first, first + shape[0], low * width, (high + 1) * width
    if not row:
        # An element is wider than a row, so the box has all rows that it touches.
        low, high = _reach(offset, shape, strides)
        return low * width // row_bytes, -(-(high + 1) * width // row_bytes), 0, row_bytes
    across = [stride % row == 0 for stride in strides]
    first, last = _reach(
        first, compress(shape, across), (stride // row for stride in compress(strides, across))
    )
    within = [not is_across for is_across in across]
    low, high = _reach(start, compress(shape, within), compress(strides, within))
    if low < 0 or high >= row:
        # The pattern wraps over an end of a row, so the box has all rows that it touches.
        first, last, low, high = first + low // row, last + high // row, 0, row - 1
    return first, last + 1, low * width, (high + 1) * width


def _reach(start: int, shape: Iterable[int], strides: Iterable[int]) -> tuple[int, int]:
    """Return the lowest and the highest position of a pattern that begins at `start`."""
    low = high = start
    for extent, stride in zip(shape, strides):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high
