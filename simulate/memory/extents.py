"""Boxes: which part of an allocation a view covers, as one interval per dim."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

Box = tuple[tuple[int, int], ...]
"""First and end coordinate in every dim; the last dim counts bytes."""


def box_of(
    sizes: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], offset: int, width: int
) -> tuple[Box | None, Box | None]:
    """The box that a view covers exactly, if it covers one, and a box that encloses it; None for one outside.

    `sizes` are the dims of an allocation in row-major order, the last one in bytes; the view has elements of `width`
    bytes, strides and offset in bytes.
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
    """Grow a box from the first element, one dim of the view after the other, shortest stride first."""
    first = []
    rest = offset
    for step in steps:
        coordinate, rest = divmod(rest, step)
        first.append(coordinate)
    extents = [1] * len(sizes)
    moves = [(stride, extent) for stride, extent in zip(strides, shape) if extent > 1 and stride != 0]
    for stride, extent in sorted([(1, width), *moves]):
        for dim in range(len(sizes)):
            # The outermost dim along which the stride continues the box; dims of size 1 are passed over.
            if sizes[dim] > 1 and stride == steps[dim] * extents[dim]:
                break
        else:
            if extent == 1:
                continue
            return None
        extents[dim] *= extent
        while extents[dim] > sizes[dim]:
            # Whole rows one after another are a box of the dim above.
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
    """Whether a box lies inside another one."""
    for (low, high), (first, end) in zip(outer, inner):  # noqa: SIM110  (all() takes twice as long)
        if first < low or end > high:
            return False
    return True


def meets(box: Box, other: Box) -> bool:
    """Whether two boxes have a byte in common."""
    for (low, high), (first, end) in zip(box, other):  # noqa: SIM110  (all() takes twice as long)
        if first >= high or end <= low:
            return False
    return True


def joined(box: Box, other: Box) -> Box | None:
    """The two disjoint boxes as one, where they touch in one dim and are equal in all others."""
    at = -1
    for dim, (mine, theirs) in enumerate(zip(box, other)):
        if mine != theirs:
            if at >= 0 or (mine[1] != theirs[0] and theirs[1] != mine[0]):
                return None
            at = dim
    low, high = min(box[at][0], other[at][0]), max(box[at][1], other[at][1])
    return (*box[:at], (low, high), *box[at + 1 :])


def rows_of(
    on_chip: bool,
    row_bytes: int,
    width: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
) -> tuple[int, int, int, int]:
    """First and end row, first and end byte within a row, of a box of rows by bytes that encloses a view.

    `width` is the bytes of an element; strides and offset count elements.
    """
    row = row_bytes // width
    first, start = divmod(offset, row) if row else (0, 0)
    if on_chip:
        low, high = _reach(start, shape[1:], strides[1:])
        return first, first + shape[0], low * width, (high + 1) * width
    if not row:
        # An element is wider than a row: take all of the rows it touches.
        low, high = _reach(offset, shape, strides)
        return low * width // row_bytes, -(-(high + 1) * width // row_bytes), 0, row_bytes
    across = [stride % row == 0 for stride in strides]
    first, last = _reach(
        first, compress(shape, across), (stride // row for stride in compress(strides, across))
    )
    within = [not each for each in across]
    low, high = _reach(start, compress(shape, within), compress(strides, within))
    if low < 0 or high >= row:
        # The pattern wraps over an end of a row: take all of the rows it touches.
        first, last, low, high = first + low // row, last + high // row, 0, row - 1
    return first, last + 1, low * width, (high + 1) * width


def _reach(start: int, shape: Iterable[int], strides: Iterable[int]) -> tuple[int, int]:
    """The lowest and the highest place of a pattern that begins at `start`."""
    low = high = start
    for extent, stride in zip(shape, strides):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high
