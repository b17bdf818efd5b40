"""Boxes: the bytes of an allocation that a view covers, as one half-open interval for each dim of the allocation.

The simulator compares boxes to find out whether two views share bytes, and whether written bytes include a view.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

Box = tuple[tuple[int, int], ...]
"""First coordinate and end in every dim; the last dim counts bytes."""


def find_boxes(
    sizes: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], offset: int, width: int
) -> tuple[Box | None, Box | None]:
    """Return the box that a view covers exactly, or None if it covers no box, and a box that encloses the view.

    If the view is an exact box, both boxes are equal. Otherwise the enclosing box has the full size in every dim but
    the first. Both are None for a view without elements and for one that reaches outside its allocation.

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
    exact = _find_exact_box(sizes, steps, shape, strides, offset, width)
    if exact is not None:
        return exact, exact
    rows = (low // steps[0], (end - 1) // steps[0] + 1)
    return None, (rows, *((0, size) for size in sizes[1:]))


def _find_exact_box(
    sizes: tuple[int, ...],
    steps: list[int],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    width: int,
) -> Box | None:
    """Return the box that a view covers exactly, None if the bytes that it covers are no box.

    The box grows from the first element, dim by dim of the view, shortest stride first. Arguments are those of
    `find_boxes`, and `steps`: the bytes between neighbours along each dim of the allocation.
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
    """Return whether `inner` is inside `outer` in every dim; both count in the dims of one allocation."""
    for (low, high), (first, end) in zip(outer, inner):  # noqa: SIM110  (all() takes twice as long)
        if first < low or end > high:
            return False
    return True


def meets(box: Box, other: Box) -> bool:
    """Return whether two boxes of one allocation have a byte in common."""
    for (low, high), (first, end) in zip(box, other):  # noqa: SIM110  (all() takes twice as long)
        if first >= high or end <= low:
            return False
    return True


def join_boxes(box: Box, other: Box) -> Box | None:
    """Return the union of two disjoint boxes as one box, or None unless they differ and touch in one dim only."""
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
    """Return a box of rows by bytes that encloses a view: (first row, end row, first byte, end byte).

    The bytes count within a row, and ends are exclusive. On chip a row is a partition; in HBM all dims but the last
    count rows. The byte interval is the whole row if the view's pattern wraps over the end of a row.

    Args:
        on_chip: Whether the allocation is in SBUF or PSUM.
        row_bytes: Bytes of a row.
        width: Bytes of an element.
        shape: Shape of the view.
        strides: Strides of the view in elements.
        offset: Offset of the view in elements.
    """
    row = row_bytes // width
    first, start = divmod(offset, row) if row else (0, 0)
    if on_chip:
        low, high = _find_reach(start, shape[1:], strides[1:])
        return first, first + shape[0], low * width, (high + 1) * width
    if not row:
        # An element is wider than a row, so the box has all rows that it touches.
        low, high = _find_reach(offset, shape, strides)
        return low * width // row_bytes, -(-(high + 1) * width // row_bytes), 0, row_bytes
    across = [stride % row == 0 for stride in strides]
    first, last = _find_reach(
        first, compress(shape, across), (stride // row for stride in compress(strides, across))
    )
    within = [not is_across for is_across in across]
    low, high = _find_reach(start, compress(shape, within), compress(strides, within))
    if low < 0 or high >= row:
        # The pattern wraps over an end of a row, so the box has all rows that it touches.
        first, last, low, high = first + low // row, last + high // row, 0, row - 1
    return first, last + 1, low * width, (high + 1) * width


def _find_reach(start: int, shape: Iterable[int], strides: Iterable[int]) -> tuple[int, int]:
    """Return the lowest and the highest element offset, both included, of a pattern that begins at offset `start`."""
    low = high = start
    for extent, stride in zip(shape, strides):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high
