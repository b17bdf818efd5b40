"""Where the elements of a tile come from: one number for each, its value and its place in it.

Instructions that only move data are carried out on these numbers instead of on data. So what a later instruction
reads is known element by element, through any chain of loads, copies, transposes and views; if the numbers follow each
other in even steps, the operand is a strided view of one value, and nothing needs to move. Most tiles come from one
such view; of those only the view is kept, and moving it is arithmetic on its strides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.memory import views
from simulate.replay.fusion.graph import NotFused, Value, View

_PLACES = 1 << 40  # more elements than a value has
_PIECES_MAX = 256

Table = np.ndarray
"""The number of each element; -1 where nothing was written."""


class Cells:
    """The elements of a tile, as a view of one value while it can be one, else as a table.

    `shared` says that other cells were made of this view, or it of others: numpy would let an assignment to one show in
    the others, which views that are kept apart do not.
    """

    __slots__ = ("_table", "shared", "view")

    def __init__(self, held: View | Table, shared: bool = False) -> None:
        self.shared = shared
        self.view: View | None = None
        self._table: Table | None = None
        if isinstance(held, View):
            strides = tuple(0 if extent == 1 else step for extent, step in zip(held.shape, held.strides))
            self.view = View(held.value, held.offset, held.shape, strides)
        else:
            self._table = held

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy's."""
        return self.view.shape if self.view is not None else self.table().shape

    @property
    def ndim(self) -> int:
        """As numpy's."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """As numpy's."""
        return views.count(self.shape)

    def table(self) -> Table:
        """The number of every element; to be written to only where there is no view."""
        if self._table is not None:
            return self._table
        assert self.view is not None
        return table_of(self.view)

    def transpose(self, *axes: Any) -> Cells:
        """As numpy's."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        order = tuple(order) if order and order != (None,) else tuple(reversed(range(self.ndim)))
        if self.view is None or sorted(order) != list(range(self.ndim)):
            return Cells(self.table().transpose(*axes))
        shape, strides = self.view.shape, self.view.strides
        return self._moved(tuple(shape[d] for d in order), tuple(strides[d] for d in order))

    def reshape(self, *shape: Any) -> Cells:
        """As numpy's."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        wanted = views.resolve_sizes(tuple(sizes), self.size)
        if self.view is not None and wanted is not None:
            strides = views.regroup(self.view.shape, self.view.strides, wanted)
            if strides is not None:
                return self._moved(wanted, strides)
        return Cells(self.table().reshape(*shape))

    def broadcast_to(self, shape: Any) -> Cells:
        """As np.broadcast_to."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        added = len(sizes) - self.ndim
        if self.view is None or added < 0:
            return Cells(np.broadcast_to(self.table(), sizes))
        strides = [0] * added
        for extent, old, stride in zip(sizes[added:], self.view.shape, self.view.strides):
            if old not in (1, extent):
                return Cells(np.broadcast_to(self.table(), sizes))
            strides.append(stride)
        return self._moved(sizes, tuple(strides))

    def copy(self) -> Cells:
        """A table of its own, to be written to."""
        return Cells(self.table().copy())

    def __getitem__(self, key: Any) -> Cells:
        found = None if self.view is None else _indexed(self.view, key)
        return Cells(self.table()[key]) if found is None else self._moved(*found)

    def __setitem__(self, key: Any, other: Cells) -> None:
        if self.view is not None:
            self._table, self.view = self.table(), None
        self.table()[key] = other.table()

    def _moved(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None) -> Cells:
        assert self.view is not None
        self.shared = True
        start = self.view.offset if offset is None else offset
        return Cells(View(self.view.value, start, shape, strides), shared=True)


def _indexed(view: View, key: Any) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, strides and offset of a part of a view; None for a key that numpy has to judge."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(each is not None and each is not ... and type(each) not in (int, slice) for each in keys):
        return None
    used = sum(each is not None and each is not ... for each in keys)
    dots = [place for place, each in enumerate(keys) if each is ...]
    if used > len(view.shape) or len(dots) > 1:
        return None
    at = dots[0] if dots else len(keys)
    keys[at : at + 1] = [slice(None)] * (len(view.shape) - used)
    shape: list[int] = []
    strides: list[int] = []
    offset, dim = view.offset, 0
    for each in keys:
        if each is None:
            shape.append(1)
            strides.append(0)
            continue
        extent, stride = view.shape[dim], view.strides[dim]
        dim += 1
        if isinstance(each, int):
            if not -extent <= each < extent:
                return None
            offset += each % extent * stride
            continue
        chosen = range(*each.indices(extent))
        if not chosen:
            return None
        offset += chosen.start * stride
        shape.append(len(chosen))
        strides.append(chosen.step * stride)
    return tuple(shape), tuple(strides), offset


def table_of(view: View) -> Table:
    """The numbers of the elements of a view."""
    cells = np.full((1,) * len(view.shape), view.value.number * _PLACES + view.offset, np.int64)
    for dim, (extent, stride) in enumerate(zip(view.shape, view.strides)):
        steps = np.arange(extent, dtype=np.int64) * stride
        cells = cells + steps.reshape(tuple(extent if d == dim else 1 for d in range(len(view.shape))))
    return cells


def concatenated(parts: list[Cells], *args: Any, **kwargs: Any) -> Cells:
    """As np.concatenate."""
    return Cells(np.concatenate([part.table() for part in parts], *args, **kwargs))


def values_of(cells: Cells, values: list[Value]) -> list[Value]:
    """The values that elements belong to."""
    if cells.view is not None:
        return [cells.view.value]
    table = cells.table()
    low, high = int(table.min()) // _PLACES, int(table.max()) // _PLACES
    if low == high:
        return [values[low]]
    return [values[number] for number in np.unique(table // _PLACES)]


def as_view(cells: Cells, values: list[Value]) -> View | None:
    """The view of one value that shows exactly these elements, if there is one.

    Raises NotFused for elements that nothing wrote, which an instruction may carry along.
    """
    return cells.view if cells.view is not None else _written_view(cells.table(), values)


def _written_view(table: Table, values: list[Value]) -> View | None:
    if table.flat[0] < 0:
        raise NotFused("an operand is written in part")
    return view_of(table, values)


def view_of(table: Table, values: list[Value]) -> View | None:
    """The view of one value that shows exactly the elements of a table, if there is one."""
    first = int(table.flat[0])
    if first < 0:
        return None
    origin = (0,) * table.ndim
    expected = np.full((1,) * table.ndim, first, np.int64)
    strides = []
    for dim, extent in enumerate(table.shape):
        if extent == 1:
            strides.append(0)
            continue
        stride = int(table[origin[:dim] + (1,) + origin[dim + 1 :]]) - first
        strides.append(stride)
        steps = np.arange(extent, dtype=np.int64) * stride
        expected = expected + steps.reshape(tuple(extent if d == dim else 1 for d in range(table.ndim)))
    if not np.array_equal(table, expected):
        return None
    number, offset = divmod(first, _PLACES)
    if int(table.min()) // _PLACES != number or int(table.max()) // _PLACES != number:
        return None
    return View(values[number], offset, table.shape, tuple(strides))


def pieces(cells: Cells, values: list[Value]) -> list[tuple[tuple[slice, ...], View]]:
    """Boxes that make up the whole, each a view of one value. Raises NotFused if there are too many."""
    waiting = [tuple(slice(0, extent) for extent in cells.shape)]
    if cells.view is not None:
        return [(waiting[0], cells.view)]
    found: list[tuple[tuple[slice, ...], View]] = []
    table = cells.table()
    while waiting:
        box = waiting.pop()
        part = table[box]
        view = _written_view(part, values)
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


def _break(table: Table) -> tuple[int, int]:
    """A dim and an index at which to cut: where another value begins, else where the steps change, else half-way."""
    steps_change: tuple[int, int] | None = None
    for dim in range(table.ndim):
        line = table[tuple(slice(None) if d == dim else 0 for d in range(table.ndim))]
        other = np.flatnonzero(np.diff(line // _PLACES))
        if other.size:
            return dim, int(other[0]) + 1
        uneven = np.flatnonzero(np.diff(line, 2))
        if uneven.size and steps_change is None:
            steps_change = dim, int(uneven[0]) + 2 if uneven[0] else 1
    if steps_change is not None:
        return steps_change
    largest = int(np.argmax(table.shape))
    return largest, table.shape[largest] // 2
