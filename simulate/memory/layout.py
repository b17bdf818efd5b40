"""Layouts: shape, strides and offset of a view over an allocation; computed once and shared by all equal views.

A kernel makes the same few views of the same few kinds of tiles over and over. A `Form` is the shape, dtype and memory
of allocations; a `Layout` is a shape, strides and an offset over a form, with the facts that follow from them. Both are
interned: views that share a Layout object have equal layouts. Equal layouts may still be two objects, because the
tables are emptied when they have grown large.
"""

from __future__ import annotations

from typing import Any

from simulate.memory import views
from simulate.memory.extents import Box, box_of, rows_of
from simulate.memory.regions import MemoryRegion
from simulate.numerics import DType

_MOST = 1 << 14  # layouts that are kept, of some 1.4 KB each with the slice that gave them

ByteView = tuple[bool, tuple[int, ...], tuple[int, ...], int, int]
"""A view in bytes: whether it covers all, shape, byte strides, byte offset, element size."""


_FOLLOWS = frozenset(("boxes", "byte_view", "rows"))


class Form:
    """The shape, dtype and memory of an allocation."""

    __slots__ = ("buffer", "dtype", "row_bytes", "shape", "size", "stored_shape")

    def __init__(self, shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion) -> None:
        shape = self.shape = tuple([int(size) for size in shape])  # not of numpy
        self.dtype = dtype
        self.buffer = buffer
        self.size = views.count(shape)
        row = views.count(shape[1:]) if buffer.on_chip else shape[-1]
        self.row_bytes = row * dtype.itemsize
        self.stored_shape = (*shape[:-1], shape[-1] * dtype.storage.itemsize)


class Layout:
    """A view of an allocation of some form, by its strides and offset in elements.

    Three attributes are computed when they are first read:

    byte_view  the view in bytes
    boxes      the box of the form's dims that it covers exactly, if it covers one, and a box that encloses it; the last
               dim counts bytes, and a view that reaches outside has neither
    rows       the box that encloses it as the stream records it: first and end row, first and end byte within a row;
               rows are partitions on chip, in HBM all dims but the last
    """

    __slots__ = ("boxes", "byte_view", "dtype", "form", "offset", "rows", "shape", "strides")

    boxes: tuple[Box | None, Box | None]
    byte_view: ByteView
    rows: tuple[int, int, int, int]

    def __init__(
        self, form: Form, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...], offset: int
    ) -> None:
        self.form = form
        self.shape = tuple(map(int, shape))  # ints of numpy would stay in the table
        self.dtype = dtype
        self.strides = tuple(map(int, strides))
        self.offset = int(offset)

    def __getattr__(self, name: str) -> Any:
        # Called for a slot that is still empty; afterwards it is read like any other.
        if name not in _FOLLOWS:
            raise AttributeError(name)
        form, shape, strides, offset = self.form, self.shape, self.strides, self.offset
        found: Any
        if name == "byte_view":
            width = self.dtype.storage.itemsize
            covers = (
                offset == 0 and views.count(shape) == form.size and views.touches_each_once(shape, strides)
            )
            found = covers, shape, tuple([stride * width for stride in strides]), offset * width, width
        elif name == "boxes":
            found = box_of(form.stored_shape, *self.byte_view[1:])
        else:
            width = self.dtype.itemsize
            found = rows_of(form.buffer.on_chip, form.row_bytes, width, shape, strides, offset)
        setattr(self, name, found)
        return found


_forms: dict[tuple[Any, ...], Form] = {}
_layouts: dict[tuple[Any, ...], Layout] = {}
_parts: dict[tuple[Any, ...], Layout] = {}


def form_of(shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion) -> Form:
    """The form of an allocation."""
    # A dtype that is kept as float32 equals the one that is not; the object tells them apart.
    key = (shape, id(dtype), buffer.value)
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= _MOST:
            _forms.clear()
        form = _forms[key] = Form(shape, dtype, buffer)
    return form


def layout_of(
    form: Form, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...], offset: int
) -> Layout:
    """The layout of a view."""
    key = (form, shape, id(dtype), strides, offset)
    layout = _layouts.get(key)
    if layout is None:
        if len(_layouts) >= _MOST:
            _layouts.clear()
        layout = _layouts[key] = Layout(form, shape, dtype, strides, offset)
    return layout


def part_key(layout: Layout, keys: Any) -> tuple[Any, ...] | None:
    """The cache key of an index or slice of a view: made of plain ints and slices of them only, else None."""
    parts: list[Any] = [layout]
    for part in keys if type(keys) is tuple else (keys,):
        kind = type(part)
        if kind is slice:
            start, stop, step = part.start, part.stop, part.step
            # 1.0 and True equal 1, and are no ints.
            if (
                (start is None or type(start) is int)
                and (stop is None or type(stop) is int)
                and (step is None or type(step) is int)
            ):
                parts.append((start, stop, step))
            else:
                return None
        elif kind is int:
            parts.append(part)
        else:
            return None
    return tuple(parts)


def known_part(key: tuple[Any, ...]) -> Layout | None:
    """The layout that an index or slice gave before."""
    return _parts.get(key)


def keep_part(key: tuple[Any, ...], layout: Layout) -> None:
    """Remember the layout that an index or slice gives."""
    if len(_parts) >= _MOST:
        _parts.clear()
    _parts[key] = layout
