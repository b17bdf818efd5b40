"""Provenance: for each element of a tile, the element of an earlier value that it is a copy of.

An element id is one integer: the number of the value and the position in it. Instructions that only move data run on
ids instead of data, so the source of every operand is known through any chain of loads, copies, transposes and views.
Where the ids of an operand have constant steps, the operand is a strided view of one value, and no data moves. Most
tiles are such a view; only the view is kept then, and moving it is arithmetic on strides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.memory import views
from simulate.replay.fusion.graph import NotFused, Value, View
from simulate.run.indirect import element_ids

_ELEMENTS_MAX = 1 << 40  # an id is value number * this + position; no value has so many elements
_BOXES_MAX = 256

ElementIds = np.ndarray
"""The id of each element; -1 where no instruction wrote."""


class Provenance:
    """The provenance of a tile's elements: a view of one value while there is one, else an array of ids.

    `aliased` tells that another Provenance was derived from this view, or this one from another. In numpy an
    assignment to one of the two would change both; these two objects would differ.
    """

    __slots__ = ("_element_ids", "aliased", "view")

    def __init__(self, source: View | ElementIds, aliased: bool = False) -> None:
        self.aliased = aliased
        self.view: View | None = None
        self._element_ids: ElementIds | None = None
        if isinstance(source, View):
            strides = tuple(0 if extent == 1 else step for extent, step in zip(source.shape, source.strides))
            self.view = View(source.value, source.offset, source.shape, strides)
        else:
            self._element_ids = source

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy's."""
        return self.view.shape if self.view is not None else self.element_ids().shape

    @property
    def ndim(self) -> int:
        """As numpy's."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """As numpy's."""
        return views.count(self.shape)

    def element_ids(self) -> ElementIds:
        """The id of every element; only without a view may the array be written to."""
        if self._element_ids is not None:
            return self._element_ids
        assert self.view is not None
        return element_ids_of(self.view)

    def transpose(self, *axes: Any) -> Provenance:
        """As numpy's."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        order = tuple(order) if order and order != (None,) else tuple(reversed(range(self.ndim)))
        if self.view is None or sorted(order) != list(range(self.ndim)):
            return Provenance(self.element_ids().transpose(*axes))
        shape, strides = self.view.shape, self.view.strides
        return self._over(tuple(shape[d] for d in order), tuple(strides[d] for d in order))

    def reshape(self, *shape: Any) -> Provenance:
        """As numpy's."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        wanted = views.resolve_sizes(tuple(sizes), self.size)
        if self.view is not None and wanted is not None:
            strides = views.regroup(self.view.shape, self.view.strides, wanted)
            if strides is not None:
                return self._over(wanted, strides)
        return Provenance(self.element_ids().reshape(*shape))

    def broadcast_to(self, shape: Any) -> Provenance:
        """As np.broadcast_to."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        added = len(sizes) - self.ndim
        if self.view is None or added < 0:
            return Provenance(np.broadcast_to(self.element_ids(), sizes))
        strides = [0] * added
        for extent, old, stride in zip(sizes[added:], self.view.shape, self.view.strides):
            if old not in (1, extent):
                return Provenance(np.broadcast_to(self.element_ids(), sizes))
            strides.append(stride)
        return self._over(sizes, tuple(strides))

    def copy(self) -> Provenance:
        """A copy as an array of ids, which may be written to."""
        return Provenance(self.element_ids().copy())

    def __getitem__(self, key: Any) -> Provenance:
        found = None if self.view is None else _indexed(self.view, key)
        return Provenance(self.element_ids()[key]) if found is None else self._over(*found)

    def __setitem__(self, key: Any, other: Provenance) -> None:
        if self.view is not None:
            self._element_ids, self.view = self.element_ids(), None
        self.element_ids()[key] = other.element_ids()

    def _over(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None
    ) -> Provenance:
        assert self.view is not None
        self.aliased = True
        start = self.view.offset if offset is None else offset
        return Provenance(View(self.view.value, start, shape, strides), aliased=True)


def _indexed(view: View, key: Any) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, strides and offset of the part of a view under a key; None for a key that is left to numpy."""
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


def element_ids_of(view: View) -> ElementIds:
    """The ids of the elements of a view."""
    return element_ids(view.shape, view.strides, view.value.number * _ELEMENTS_MAX + view.offset)


def concatenate(parts: list[Provenance], *args: Any, **kwargs: Any) -> Provenance:
    """As np.concatenate."""
    return Provenance(np.concatenate([part.element_ids() for part in parts], *args, **kwargs))


def source_values(provenance: Provenance, values: list[Value]) -> list[Value]:
    """The values that the elements are copies from."""
    if provenance.view is not None:
        return [provenance.view.value]
    ids = provenance.element_ids()
    low, high = int(ids.min()) // _ELEMENTS_MAX, int(ids.max()) // _ELEMENTS_MAX
    if low == high:
        return [values[low]]
    return [values[number] for number in np.unique(ids // _ELEMENTS_MAX)]


def as_view(provenance: Provenance, values: list[Value]) -> View | None:
    """The view of one value with exactly these elements; None if there is none.

    Raises NotFused for elements that no instruction wrote; an instruction may move such elements.
    """
    return provenance.view if provenance.view is not None else _defined_view(provenance.element_ids(), values)


def _defined_view(ids: ElementIds, values: list[Value]) -> View | None:
    if ids.flat[0] < 0:
        raise NotFused("an operand has elements that no instruction wrote")
    return view_of(ids, values)


def view_of(ids: ElementIds, values: list[Value]) -> View | None:
    """The view of one value whose elements have exactly these ids; None if there is none."""
    first = int(ids.flat[0])
    if first < 0:
        return None
    origin = (0,) * ids.ndim
    strides = [
        0 if extent == 1 else int(ids[origin[:dim] + (1,) + origin[dim + 1 :]]) - first
        for dim, extent in enumerate(ids.shape)
    ]
    if not np.array_equal(ids, element_ids(ids.shape, tuple(strides), first)):
        return None
    number, offset = divmod(first, _ELEMENTS_MAX)
    if int(ids.min()) // _ELEMENTS_MAX != number or int(ids.max()) // _ELEMENTS_MAX != number:
        return None
    return View(values[number], offset, ids.shape, tuple(strides))


def boxes_of(provenance: Provenance, values: list[Value]) -> list[tuple[tuple[slice, ...], View]]:
    """Boxes that tile the whole, each with the view of one value that it is. Raises NotFused for too many boxes."""
    waiting = [tuple(slice(0, extent) for extent in provenance.shape)]
    if provenance.view is not None:
        return [(waiting[0], provenance.view)]
    found: list[tuple[tuple[slice, ...], View]] = []
    ids = provenance.element_ids()
    while waiting:
        box = waiting.pop()
        part = ids[box]
        view = _defined_view(part, values)
        if view is not None:
            found.append((box, view))
            continue
        if len(found) + len(waiting) > _BOXES_MAX:
            raise NotFused(f"an operand consists of more than {_BOXES_MAX} views of values")
        dim, at = _split_at(part)
        middle = box[dim].start + at
        waiting.append((*box[:dim], slice(middle, box[dim].stop), *box[dim + 1 :]))
        waiting.append((*box[:dim], slice(box[dim].start, middle), *box[dim + 1 :]))
    return found


def _split_at(ids: ElementIds) -> tuple[int, int]:
    """Dim and index of the split: where another value begins, else where the step changes, else the middle."""
    steps_change: tuple[int, int] | None = None
    for dim in range(ids.ndim):
        line = ids[tuple(slice(None) if d == dim else 0 for d in range(ids.ndim))]
        other = np.flatnonzero(np.diff(line // _ELEMENTS_MAX))
        if other.size:
            return dim, int(other[0]) + 1
        uneven = np.flatnonzero(np.diff(line, 2))
        if uneven.size and steps_change is None:
            steps_change = dim, int(uneven[0]) + 2 if uneven[0] else 1
    if steps_change is not None:
        return steps_change
    largest = int(np.argmax(ids.shape))
    return largest, ids.shape[largest] // 2
