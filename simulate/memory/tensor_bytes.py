"""The base class of `NkiTensor`: a layout over a storage, its bytes, and the Python operators that it refuses."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import numpy as np

from nkw.errors import OutOfBounds, RuleViolation, Unsupported
from nkw.suggestions import FUNCTION_HINTS
from simulate.lines import location, named
from simulate.memory import views
from simulate.memory.display import html, html_of_values
from simulate.memory.layout import ByteView, Layout, layout_of
from simulate.memory.objects import VALUE_READS, NKIObject
from simulate.memory.regions import MemoryRegion
from simulate.memory.storage import Storage
from simulate.memory.view_rules import no_python_on_tensors, view_within_storage
from simulate.numerics import (
    ACTIVATION_FUNCTIONS,
    ALU_OPERATORS,
    DType,
    as_dtype,
    float32,
    tfloat32,
    to_float32,
)

_FLOAT32 = float32.storage
_Tensor = TypeVar("_Tensor", bound="TensorBytes")


class TensorBytes(NKIObject):
    """A layout over a storage; `dynamic` is not None where a part of the address is read at run time."""

    __slots__ = ("_array", "dtype", "dynamic", "layout", "name", "offset", "shape", "storage", "strides")

    dynamic: Any

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        storage: Storage | None,
        buffer: MemoryRegion = MemoryRegion.sbuf,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> None:
        """A tensor over a whole storage; kernels allocate with nl.ndarray instead.

        `storage=None` makes a placeholder for a signature: it has no bytes and takes `buffer`, `name` and `address`.
        With a storage `buffer` and `address` are ignored, and the storage's name is the default of `name`.
        """
        if storage is None:
            kind = as_dtype(dtype)
            storage = Storage(shape, kind, buffer, name, np.empty(0, np.uint8), address, fresh=True)
            dtype = kind
        self._be(shape, dtype, storage, None, 0, None)
        if name:
            self.name = name

    @classmethod
    def over(
        cls: type[_Tensor],
        shape: tuple[int, ...],
        dtype: DType,
        storage: Storage,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        dynamic: Any = None,
    ) -> _Tensor:
        """A view of a storage by its strides and offset in elements; row-major from the start unless given."""
        tensor = cls.__new__(cls)
        tensor._be(shape, dtype, storage, strides, offset, dynamic)
        return tensor

    @classmethod
    def laid(cls: type[_Tensor], layout: Layout, storage: Storage, dynamic: Any = None) -> _Tensor:
        """A view of a storage by its layout, which is one over the storage's form."""
        tensor = cls.__new__(cls)
        tensor._lie(layout, storage, dynamic)
        return tensor

    def _be(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        storage: Storage,
        strides: tuple[int, ...] | None,
        offset: int,
        dynamic: Any,
    ) -> None:
        if strides is None:
            strides = views.row_major(shape)
        self._lie(layout_of(storage.form, shape, dtype, strides, offset), storage, dynamic)

    def _lie(self, layout: Layout, storage: Storage, dynamic: Any) -> None:
        self.layout = layout
        self.shape = layout.shape
        self.dtype = layout.dtype
        self.strides = layout.strides
        self.offset = layout.offset
        self.storage = storage
        self.dynamic = dynamic
        self.name = storage.name
        self._array: np.ndarray | None = None

    @property
    def whole(self) -> bool:
        """Whether the view covers every byte of its storage, each once."""
        return self.dynamic is None and self.layout.byte_view[0]

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> MemoryRegion:
        """The memory the tensor lies in."""
        return self.storage.buffer

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return views.count(self.shape)

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        return views.count(self.shape[1:])

    def is_contiguous(self) -> bool:
        """Whether the elements follow each other; the partition stride on chip and dims of size 1 do not count."""
        first = 1 if self.buffer.on_chip else 0
        return views.is_row_major(self.shape[first:], self.strides[first:])

    def is_indirect(self) -> bool:
        """Whether a part of the address is read at run time."""
        return self.dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        """The access pattern as [stride, count] pairs in elements, outermost first."""
        return [[stride, extent] for stride, extent in zip(self.strides, self.shape)]

    def check_bounds(self) -> None:
        """Raise OutOfBounds for a view that reaches outside its storage; run-time addresses are checked at run time."""
        if self.dynamic is not None:
            return
        low = high = self.offset
        for extent, stride in zip(self.shape, self.strides):
            if extent < 1:
                raise OutOfBounds(
                    view_within_storage, f"shape {self.shape}", hint="every dim has a size of 1 or more"
                )
            reach = (extent - 1) * stride
            low, high = low + min(reach, 0), high + max(reach, 0)
        elements = self.storage.nbytes // self.dtype.storage.itemsize
        if low < 0 or high >= elements:
            raise OutOfBounds(
                view_within_storage,
                f"elements {low} to {high} of {self.describe()}",
                limit=f"0 to {elements - 1}",
            )

    def summary(self) -> str:
        """Its name if it was given one, shape, dtype and memory; needs no source."""
        return _summary(self.name, self)

    def describe(self) -> str:
        """What errors and reports call it: variable or name, shape, dtype, memory, and the line that allocated it."""
        line = self.storage.line
        place = f" (allocated at {location(line).file_line})" if line is not None else ""
        return _summary(self.label, self) + place

    @property
    def label(self) -> str:
        """The name it was given, else the variable that its line assigns; empty for a nameless tensor."""
        return self.name or named(self.storage.line)

    # -- its bytes ----------------------------------------------------------------------------------------------

    @property
    def array(self) -> np.ndarray:
        """The elements in the dtype's storage type, as a numpy view of the simulated memory; counts as a value read.

        Raises Unsupported in a dry launch, whose memory has no bytes.
        """
        VALUE_READS.count += 1
        return self.uncounted_array

    @property
    def uncounted_array(self) -> np.ndarray:
        """The elements as in `array`, for the simulator itself: a launch may read them and still be replayed."""
        array = self._array
        if array is None:
            if not self.storage.uncounted_array.size:  # numpy lays a view of any size over no bytes
                raise Unsupported(
                    "NKW-DRY-VALUES", f"a dry run has no values of {self.describe()} to look at"
                )
            _, shape, strides, offset, _ = self.layout.byte_view
            array = np.ndarray(shape, self.dtype.storage, self.storage.uncounted_array, offset, strides)
            self._array = array
        return array

    def forget_array(self) -> None:
        """Drop the cached array: the storage has got other bytes."""
        self._array = None

    def float32(self) -> np.ndarray:
        """Return the elements as a read-only float32 array; counts as a value read."""
        VALUE_READS.count += 1
        return self.uncounted_float32()

    def uncounted_float32(self) -> np.ndarray:
        """Return the elements as in `float32`, for the simulator itself.

        Conversions of narrow types are kept until the allocation is written again: a weight tile is converted once
        however many matmuls it feeds.
        """
        if self.dtype.storage is _FLOAT32 and self.dtype is not tfloat32:
            return self.uncounted_array
        kept = self.storage.float_views
        found = kept.get(self.layout)
        if found is None:
            found = to_float32(self.uncounted_array, self.dtype)
            if self.storage.buffer.on_chip:
                kept[self.layout] = found
        return found

    def byte_view(self) -> ByteView:
        """This view in bytes: whether it covers all, shape, byte strides, byte offset, element size."""
        if self.dynamic is None:
            return self.layout.byte_view
        return (False, *self.layout.byte_view[1:])

    # -- Python -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if self.dynamic is not None:
            return f"<{self.summary()}, address read at run time>"
        VALUE_READS.count += 1
        if self.storage.uncounted_array.nbytes < self.storage.nbytes:
            return f"<{self.summary()} (dry run: no values)>"
        values = self.uncounted_array
        if not self.storage.validity.written(*self.byte_view()):
            return f"<{self.summary()}, not fully written>"
        return f"<{self.summary()}>\n{np.array2string(values, threshold=200)}"

    def _repr_html_(self) -> str:
        if self.dynamic is not None:
            return html(self.describe(), "its address is read at run time")
        VALUE_READS.count += 1
        if self.storage.uncounted_array.nbytes < self.storage.nbytes:
            return html(self.describe(), "no values: the launch is dry")
        states = self.storage.validity.states(*self.byte_view()[1:])
        first_dim = "partition" if self.buffer.on_chip else "row"
        return html_of_values(self.describe(), self.uncounted_array, states, self.dtype, first_dim)

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuleViolation(
            no_python_on_tensors,
            f"a Python operator on {self.describe()}",
            hint="nisa.tensor_tensor, nisa.tensor_scalar or nisa.activation; a predicate tile instead of `if`",
        )

    def __bool__(self) -> bool:
        """Whether there is a tensor, as `if bias:` asks; refused for a tile of one element, its value may be meant."""
        if self.size == 1 and self.buffer.on_chip:
            self._refuse()
        return True

    def __array_ufunc__(self, function: np.ufunc, *_: Any, **__: Any) -> NoReturn:
        """numpy's element-wise functions and operators are Python on tensors as well."""
        self._refuse_numpy(function)

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        """Refuse the other functions of numpy, which would take the tensor for an object."""
        self._refuse_numpy(function)

    def _refuse_numpy(self, function: Any) -> NoReturn:
        name = str(getattr(function, "__name__", function))
        hint = FUNCTION_HINTS.get(
            name, "nisa.activation, nisa.tensor_tensor, nisa.tensor_reduce or a function of nl"
        )
        if name in ACTIVATION_FUNCTIONS or name in ALU_OPERATORS:
            hint = f"nl.{name}, as a function of tiles or as op=nl.{name} of an instruction"
        raise RuleViolation(no_python_on_tensors, f"numpy.{name} on {self.describe()}", hint=hint)

    for _name in (
        "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow matmul neg and or xor invert lshift rshift "
        "iadd isub imul itruediv lt le gt ge float int"
    ).split():
        locals()[f"__{_name}__"] = _refuse
    del _name


def _summary(name: str, tensor: TensorBytes) -> str:
    return f"{name}{' ' if name else ''}{tensor.shape} {tensor.dtype} in {tensor.buffer.value}"
