"""Provenance: for each element of a tile, the element of an earlier value that it is a copy of.

An element id is one integer, made of the number of the value and the position in the value. Instructions that only
move data run on ids instead of data. So the source of every operand is known through any chain of loads, copies,
transposes and views. If the ids of an operand have constant steps, the operand is a strided view of one value, and no
data moves. Most tiles are such views. For them only the view is stored, and moving it is arithmetic on strides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulate.memory import views
from simulate.replay.fusion.graph import NotFused, Value, View
from simulate.run.indirect import build_element_ids

_ELEMENTS_MAX = 1 << 40  # an id is value number * this + position; no value has so many elements
_BOXES_MAX = 256

ElementIds = np.ndarray
"""Element ids as an int64 array; -1 marks elements that no instruction wrote."""


class Provenance:
    """Provenance of an array's elements: a view of one value if there is one, otherwise an array of element ids.

    Methods follow `numpy.ndarray`. `aliased` is set if another Provenance was derived from this view, or this one
    from another. In numpy an assignment to one of the two arrays would change both; these two objects would differ.
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
        """Shape of the tile."""
        return self.view.shape if self.view is not None else self.get_element_ids().shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return views.count(self.shape)

    def get_element_ids(self) -> ElementIds:
        """Return the id of every element; it may be written to only if `view` is None."""
        if self._element_ids is not None:
            return self._element_ids
        assert self.view is not None
        return compute_element_ids(self.view)

    def transpose(self, *axes: Any) -> Provenance:
        """Return the provenance with permuted axes, as `numpy.ndarray.transpose` does."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        order = tuple(order) if order and order != (None,) else tuple(reversed(range(self.ndim)))
        if self.view is None or sorted(order) != list(range(self.ndim)):
            return Provenance(self.get_element_ids().transpose(*axes))
        shape, strides = self.view.shape, self.view.strides
        return self._derive(tuple(shape[d] for d in order), tuple(strides[d] for d in order))

    def reshape(self, *shape: Any) -> Provenance:
        """Return the provenance in another shape, as `numpy.ndarray.reshape` does."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        resolved = views.resolve_sizes(tuple(sizes), self.size)
        if self.view is not None and resolved is not None:
            strides = views.regroup(self.view.shape, self.view.strides, resolved)
            if strides is not None:
                return self._derive(resolved, strides)
        return Provenance(self.get_element_ids().reshape(*shape))

    def broadcast_to(self, shape: Any) -> Provenance:
        """Return the provenance broadcast to a shape, as `numpy.broadcast_to` does."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        added = len(sizes) - self.ndim
        if self.view is None or added < 0:
            return Provenance(np.broadcast_to(self.get_element_ids(), sizes))
        strides = [0] * added
        for extent, old, stride in zip(sizes[added:], self.view.shape, self.view.strides):
            if old not in (1, extent):
                return Provenance(np.broadcast_to(self.get_element_ids(), sizes))
            strides.append(stride)
        return self._derive(sizes, tuple(strides))

    def copy(self) -> Provenance:
        """Return a copy, stored as an array of ids, to which may be assigned."""
        return Provenance(self.get_element_ids().copy())

    def __getitem__(self, key: Any) -> Provenance:
        indexed = None if self.view is None else _index_view(self.view, key)
        return Provenance(self.get_element_ids()[key]) if indexed is None else self._derive(*indexed)

    def __setitem__(self, key: Any, other: Provenance) -> None:
        if self.view is not None:
            self._element_ids, self.view = self.get_element_ids(), None
        self.get_element_ids()[key] = other.get_element_ids()

    def _derive(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None
    ) -> Provenance:
        """Return the provenance of another view of the same value; both are marked as aliased."""
        assert self.view is not None
        self.aliased = True
        start = self.view.offset if offset is None else offset
        return Provenance(View(self.view.value, start, shape, strides), aliased=True)


def _index_view(view: View, key: Any) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Return shape, strides and offset of the elements that a key selects from a view.

    Returns None for a key that numpy has to apply to the ids: index arrays, empty slices and invalid indices.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(index is not None and index is not ... and type(index) not in (int, slice) for index in keys):
        return None
    used = sum(index is not None and index is not ... for index in keys)
    ellipses = [position for position, index in enumerate(keys) if index is ...]
    if used > len(view.shape) or len(ellipses) > 1:
        return None
    gap = ellipses[0] if ellipses else len(keys)
    keys[gap : gap + 1] = [slice(None)] * (len(view.shape) - used)
    shape: list[int] = []
    strides: list[int] = []
    offset, dim = view.offset, 0
    for index in keys:
        if index is None:
            shape.append(1)
            strides.append(0)
            continue
        extent, stride = view.shape[dim], view.strides[dim]
        dim += 1
        if isinstance(index, int):
            if not -extent <= index < extent:
                return None
            offset += index % extent * stride
            continue
        selected = range(*index.indices(extent))
        if not selected:
            return None
        offset += selected.start * stride
        shape.append(len(selected))
        strides.append(selected.step * stride)
    return tuple(shape), tuple(strides), offset


def compute_element_ids(view: View) -> ElementIds:
    """Return the id of every element of a view, int64 in its shape."""
    return build_element_ids(view.shape, view.strides, view.value.number * _ELEMENTS_MAX + view.offset)


def concatenate(provenances: list[Provenance], *args: Any, **kwargs: Any) -> Provenance:
    """Return the concatenation of provenances, as `numpy.concatenate` does with arrays."""
    return Provenance(
        np.concatenate([provenance.get_element_ids() for provenance in provenances], *args, **kwargs)
    )


def find_source_values(provenance: Provenance, values: list[Value]) -> list[Value]:
    """Return the values that the elements of a provenance are copies of; `values` has all values by number."""
    if provenance.view is not None:
        return [provenance.view.value]
    ids = provenance.get_element_ids()
    low, high = int(ids.min()) // _ELEMENTS_MAX, int(ids.max()) // _ELEMENTS_MAX
    if low == high:
        return [values[low]]
    return [values[number] for number in np.unique(ids // _ELEMENTS_MAX)]


def as_view(provenance: Provenance, values: list[Value]) -> View | None:
    """Return the view of one value with exactly the elements of a provenance, in order; None if there is none.

    Raises:
        NotFused: The first element was written by no instruction. Instructions may only move such elements.
    """
    return (
        provenance.view
        if provenance.view is not None
        else _find_defined_view(provenance.get_element_ids(), values)
    )


def _find_defined_view(ids: ElementIds, values: list[Value]) -> View | None:
    """Return the view of one value with these ids, or None. Raises NotFused if the first element is unwritten."""
    if ids.flat[0] < 0:
        raise NotFused("an operand has elements that no instruction wrote")
    return find_view(ids, values)


def find_view(ids: ElementIds, values: list[Value]) -> View | None:
    """Return the view of one value whose elements have exactly these ids, in order; None if there is none."""
    first = int(ids.flat[0])
    if first < 0:
        return None
    origin = (0,) * ids.ndim
    strides = [
        0 if extent == 1 else int(ids[origin[:dim] + (1,) + origin[dim + 1 :]]) - first
        for dim, extent in enumerate(ids.shape)
    ]
    if not np.array_equal(ids, build_element_ids(ids.shape, tuple(strides), first)):
        return None
    value_number, offset = divmod(first, _ELEMENTS_MAX)
    if int(ids.min()) // _ELEMENTS_MAX != value_number or int(ids.max()) // _ELEMENTS_MAX != value_number:
        return None
    return View(values[value_number], offset, ids.shape, tuple(strides))


def split_into_boxes(provenance: Provenance, values: list[Value]) -> list[tuple[tuple[slice, ...], View]]:
    """Split an array into boxes, each of which is a view of one value.

    Returns:
        The slices of each box in the array, and its view; the boxes are disjoint and cover the array.

    Raises:
        NotFused: There are more than 256 boxes, or no instruction wrote the first element of a box.
    """
    waiting = [tuple(slice(0, extent) for extent in provenance.shape)]
    if provenance.view is not None:
        return [(waiting[0], provenance.view)]
    boxes: list[tuple[tuple[slice, ...], View]] = []
    ids = provenance.get_element_ids()
    while waiting:
        box = waiting.pop()
        box_ids = ids[box]
        view = _find_defined_view(box_ids, values)
        if view is not None:
            boxes.append((box, view))
            continue
        if len(boxes) + len(waiting) > _BOXES_MAX:
            raise NotFused(f"an operand consists of more than {_BOXES_MAX} views of values")
        dim, split = _choose_split(box_ids)
        middle = box[dim].start + split
        waiting.append((*box[:dim], slice(middle, box[dim].stop), *box[dim + 1 :]))
        waiting.append((*box[:dim], slice(box[dim].start, middle), *box[dim + 1 :]))
    return boxes


def _choose_split(ids: ElementIds) -> tuple[int, int]:
    """Return the dim and the index at which to split an array of ids into two.

    It is where another value begins, else where the step changes, else the middle of the largest dim.
    """
    steps_change: tuple[int, int] | None = None
    for dim in range(ids.ndim):
        line = ids[tuple(slice(None) if d == dim else 0 for d in range(ids.ndim))]
        boundaries = np.flatnonzero(np.diff(line // _ELEMENTS_MAX))
        if boundaries.size:
            return dim, int(boundaries[0]) + 1
        uneven = np.flatnonzero(np.diff(line, 2))
        if uneven.size and steps_change is None:
            steps_change = dim, int(uneven[0]) + 2 if uneven[0] else 1
    if steps_change is not None:
        return steps_change
    largest = int(np.argmax(ids.shape))
    return largest, ids.shape[largest] // 2
