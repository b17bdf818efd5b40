"""Where the elements of a tile come from: one number for each, its value and its place in it.

Instructions that only move data are carried out on these numbers instead of on data. So what a later instruction
reads is known element by element, through any chain of loads, copies, transposes and views; if the numbers follow each
other in even steps, the operand is a strided view of one value, and nothing needs to move.
"""

from __future__ import annotations

import numpy as np

from simulate.run.fusion.graph import NotFused, Value, View

_PLACES = 1 << 40  # more elements than a value has
_PIECES_MAX = 256

Cells = np.ndarray


def cells_of(view: View) -> Cells:
    """The elements of a view."""
    cells = np.full((1,) * len(view.shape), view.value.number * _PLACES + view.offset, np.int64)
    for dim, (extent, stride) in enumerate(zip(view.shape, view.strides)):
        steps = np.arange(extent, dtype=np.int64) * stride
        cells = cells + steps.reshape(tuple(extent if d == dim else 1 for d in range(len(view.shape))))
    return cells


def values_of(cells: Cells, values: list[Value]) -> list[Value]:
    """The values that elements belong to."""
    low, high = int(cells.min()) // _PLACES, int(cells.max()) // _PLACES
    if low == high:
        return [values[low]]
    return [values[number] for number in np.unique(cells // _PLACES)]


def as_view(cells: Cells, values: list[Value]) -> View | None:
    """The view of one value that shows exactly these elements, if there is one.

    Raises NotFused for elements that nothing wrote, which an instruction may carry along.
    """
    first = int(cells.flat[0])
    if first < 0:
        raise NotFused("an operand is written in part")
    origin = (0,) * cells.ndim
    expected = np.full((1,) * cells.ndim, first, np.int64)
    strides = []
    for dim, extent in enumerate(cells.shape):
        if extent == 1:
            strides.append(0)
            continue
        stride = int(cells[origin[:dim] + (1,) + origin[dim + 1 :]]) - first
        strides.append(stride)
        steps = np.arange(extent, dtype=np.int64) * stride
        expected = expected + steps.reshape(tuple(extent if d == dim else 1 for d in range(cells.ndim)))
    if not np.array_equal(cells, expected):
        return None
    number, offset = divmod(first, _PLACES)
    if int(cells.min()) // _PLACES != number or int(cells.max()) // _PLACES != number:
        return None
    return View(values[number], offset, cells.shape, tuple(strides))


def pieces(cells: Cells, values: list[Value]) -> list[tuple[tuple[slice, ...], View]]:
    """Boxes that make up the whole, each a view of one value. Raises NotFused if there are too many."""
    found: list[tuple[tuple[slice, ...], View]] = []
    waiting = [tuple(slice(0, extent) for extent in cells.shape)]
    while waiting:
        box = waiting.pop()
        part = cells[box]
        view = as_view(part, values)
        if view is not None:
            found.append((box, view))
            continue
        if len(found) + len(waiting) > _PIECES_MAX:
            raise NotFused("an operand is put together from too many pieces")
        dim, at = _break(part)
        middle = box[dim].start + at
        waiting.append((*box[:dim], slice(middle, box[dim].stop), *box[dim + 1 :]))
        waiting.append((*box[:dim], slice(box[dim].start, middle), *box[dim + 1 :]))
    return found


def _break(cells: Cells) -> tuple[int, int]:
    """A dim and an index at which to cut: where another value begins, else where the steps change, else half-way."""
    steps_change: tuple[int, int] | None = None
    for dim in range(cells.ndim):
        line = cells[tuple(slice(None) if d == dim else 0 for d in range(cells.ndim))]
        other = np.flatnonzero(np.diff(line // _PLACES))
        if other.size:
            return dim, int(other[0]) + 1
        uneven = np.flatnonzero(np.diff(line, 2))
        if uneven.size and steps_change is None:
            steps_change = dim, int(uneven[0]) + 2 if uneven[0] else 1
    if steps_change is not None:
        return steps_change
    largest = int(np.argmax(cells.shape))
    return largest, cells.shape[largest] // 2
