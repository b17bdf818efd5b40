"""Pictures of characters: rectangles on a grid, where a cell shows the rectangle that covers most of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

EMPTY = "."


def draw_grid(
    rectangles: Iterable[tuple[str, int, int, int, int]], across: int, up: int, columns: int, rows: int
) -> list[str]:
    """Draw rectangles as rows of characters, top row first.

    Args:
        rectangles: (mark, left, right, bottom, top), where a mark is one character. The edges are in units of the
            axes: 0 to `across` from left to right, and 0 to `up` from bottom to top.
        across: Length of the horizontal axis.
        up: Length of the vertical axis.
        columns: Width of the picture in characters.
        rows: Height of the picture in characters.

    Returns:
        `rows` strings. A cell shows the mark that covers most of it, the first among equals, or "." if no rectangle
        touches it. Any coverage suffices, so that small rectangles stay visible.
    """
    planes: dict[str, np.ndarray] = {}
    for mark, left, right, bottom, top in rectangles:
        plane = planes.get(mark)
        if plane is None:
            plane = planes[mark] = np.zeros((rows, columns))
        first_row, row_coverage = _compute_coverage(bottom, top, up, rows)
        first_column, column_coverage = _compute_coverage(left, right, across, columns)
        plane[
            first_row : first_row + len(row_coverage), first_column : first_column + len(column_coverage)
        ] += np.outer(row_coverage, column_coverage)
    if not planes:
        return [EMPTY * columns] * rows
    marks = np.array([EMPTY, *planes])
    stack = np.stack([np.zeros((rows, columns)), *planes.values()])
    picture = marks[np.argmax(stack, axis=0)]
    return ["".join(row) for row in picture[::-1]]


def _compute_coverage(start: int, end: int, length: int, cells: int) -> tuple[int, np.ndarray]:
    """Return the index of the first cell that an interval touches, and the covered share of each touched cell.

    Args:
        start: Begin of the interval.
        end: End of the interval.
        length: Length of the axis, in the same units.
        cells: Number of equal cells into which the axis is divided.
    """
    scale = cells / length
    low, high = start * scale, min(end * scale, cells)
    first = min(int(low), cells - 1)
    last = max(first, min(int(np.ceil(high)), cells) - 1)
    edges = np.arange(first, last + 2)
    return first, np.clip(np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1]), 0, 1)
