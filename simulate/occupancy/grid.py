"""A picture made of characters: rectangles on a grid, each cell showing the rectangle that covers most of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

EMPTY = "."


def grid(
    rectangles: Iterable[tuple[str, int, int, int, int]], across: int, up: int, columns: int, rows: int
) -> list[str]:
    """Rows of characters, the highest first.

    A rectangle is (mark, left, right, bottom, top) within 0 … `across` by 0 … `up`. A cell shows the mark that covers
    the largest part of it, the first of equals; any part is enough, so that nothing vanishes by being small.
    """
    planes: dict[str, np.ndarray] = {}
    for mark, left, right, bottom, top in rectangles:
        plane = planes.get(mark)
        if plane is None:
            plane = planes[mark] = np.zeros((rows, columns))
        first_row, row_parts = _parts(bottom, top, up, rows)
        first_column, column_parts = _parts(left, right, across, columns)
        plane[first_row : first_row + len(row_parts), first_column : first_column + len(column_parts)] += (
            np.outer(row_parts, column_parts)
        )
    if not planes:
        return [EMPTY * columns] * rows
    marks = np.array([EMPTY, *planes])
    stack = np.stack([np.zeros((rows, columns)), *planes.values()])
    picture = marks[np.argmax(stack, axis=0)]
    return ["".join(row) for row in picture[::-1]]


def _parts(start: int, end: int, whole: int, cells: int) -> tuple[int, np.ndarray]:
    """The first cell that start … end touches, and how much of that and every following cell it covers."""
    scale = cells / whole
    low, high = start * scale, min(end * scale, cells)
    first = min(int(low), cells - 1)
    last = max(first, min(int(np.ceil(high)), cells) - 1)
    edges = np.arange(first, last + 2)
    return first, np.clip(np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1]), 0, 1)
