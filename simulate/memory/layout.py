"""Layouts: shape, strides and offset of a view over an allocation, computed once and shared by equal views.

A kernel takes the same few views of the same few forms of tiles again and again. A `Form` is the shape, dtype and
memory of allocations; a `Layout` is a shape, strides and an offset over a form, with the facts that follow from them.
Both are interned: views that share a Layout object have equal layouts. Equal layouts may still be two objects, because
the tables are emptied when they have grown large.
"""

from __future__ import annotations

from typing import Any

from simulate.memory import views
from simulate.memory.extents import Box, find_boxes, find_rows
from simulate.memory.regions import MemoryRegion
from simulate.numerics import DType

_MOST = 1 << 14
"""Largest number of layouts in a table, of about 1.4 KB each with the key of their slice."""

ByteView = tuple[bool, tuple[int, ...], tuple[int, ...], int, int]
"""View in bytes: whether it covers the whole allocation, shape, byte strides, byte offset, element size."""


_DERIVED = frozenset(("boxes", "byte_view", "rows"))


class Form:
    """Shape, dtype and memory of an allocation, shared by all allocations that have them in common.

    Attributes:
        shape: Shape in elements.
        dtype: Dtype of the elements.
        buffer: Memory.
        size: Number of elements.
        row_bytes: Bytes of a row on the chip: of a partition in SBUF and PSUM, of the last dim in HBM.
        stored_shape: The shape with the last dim in bytes of the host.
    """

    __slots__ = ("buffer", "dtype", "row_bytes", "shape", "size", "stored_shape")

    def __init__(self, shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion) -> None:
        shape = self.shape = tuple([int(size) for size in shape])  # Python ints, not those of NumPy
        self.dtype = dtype
        self.buffer = buffer
        self.size = views.count(shape)
        row = views.count(shape[1:]) if buffer.on_chip else shape[-1]
        self.row_bytes = row * dtype.itemsize
        self.stored_shape = (*shape[:-1], shape[-1] * dtype.storage.itemsize)


class Layout:
    """View of an allocation of some form, by its strides and offset in elements.

    Three attributes are computed when they are first read:

    byte_view: the view in bytes of the host, see `ByteView`.

    boxes: the box that the view covers exactly, or None, and a box that encloses the view, see `extents.find_boxes`;
    both are None for a view that reaches outside its allocation.

    rows: the box of rows by bytes that encloses the view, see `extents.find_rows`.
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
        # Called for a slot that is still empty; afterwards Python reads the slot directly.
        if name not in _DERIVED:
            raise AttributeError(name)
        form, shape, strides, offset = self.form, self.shape, self.strides, self.offset
        derived: Any
        if name == "byte_view":
            width = self.dtype.storage.itemsize
            covers = (
                offset == 0 and views.count(shape) == form.size and views.touches_each_once(shape, strides)
            )
            derived = covers, shape, tuple([stride * width for stride in strides]), offset * width, width
        elif name == "boxes":
            derived = find_boxes(form.stored_shape, *self.byte_view[1:])
        else:
            width = self.dtype.itemsize
            derived = find_rows(form.buffer.on_chip, form.row_bytes, width, shape, strides, offset)
        setattr(self, name, derived)
        return derived


_forms: dict[tuple[Any, ...], Form] = {}
_layouts: dict[tuple[Any, ...], Layout] = {}
_sliced_layouts: dict[tuple[Any, ...], Layout] = {}


def intern_form(shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion) -> Form:
    """Return the one `Form` of these properties, a new one at the first call."""
    # A dtype that is stored as float32 equals the exact dtype; the ids of the objects differ.
    key = (shape, id(dtype), buffer.value)
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= _MOST:
            _forms.clear()
        form = _forms[key] = Form(shape, dtype, buffer)
    return form


def intern_layout(
    form: Form, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...], offset: int
) -> Layout:
    """Return the one `Layout` of these properties over a form; strides and offset count elements."""
    key = (form, shape, id(dtype), strides, offset)
    layout = _layouts.get(key)
    if layout is None:
        if len(_layouts) >= _MOST:
            _layouts.clear()
        layout = _layouts[key] = Layout(form, shape, dtype, strides, offset)
    return layout


def build_slice_key(layout: Layout, keys: Any) -> tuple[Any, ...] | None:
    """Return the cache key of `view[keys]` for `find_sliced`; None unless `keys` are plain ints and slices of ints."""
    key_items: list[Any] = [layout]
    for dim_key in keys if type(keys) is tuple else (keys,):
        key_type = type(dim_key)
        if key_type is slice:
            start, stop, step = dim_key.start, dim_key.stop, dim_key.step
            # 1.0 and True equal 1, and are no ints.
            if (
                (start is None or type(start) is int)
                and (stop is None or type(stop) is int)
                and (step is None or type(step) is int)
            ):
                key_items.append((start, stop, step))
            else:
                return None
        elif key_type is int:
            key_items.append(dim_key)
        else:
            return None
    return tuple(key_items)


def find_sliced(key: tuple[Any, ...]) -> Layout | None:
    """Return the layout that `store_sliced` stored under a key, None if there is none."""
    return _sliced_layouts.get(key)


def store_sliced(key: tuple[Any, ...], layout: Layout) -> None:
    """Store the layout of a slice under its key; a full table of 16,384 entries is emptied before."""
    if len(_sliced_layouts) >= _MOST:
        _sliced_layouts.clear()
    _sliced_layouts[key] = layout
