"""Base class of `NkiTensor`: a layout over a storage, access to its bytes, and the Python operators that it refuses.

"Read by Python" means that a kernel looks at elements; it is counted, because such a launch may depend on data.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import numpy as np

from nkw.errors import OutOfBounds, RuleViolation, Unsupported
from nkw.suggestions import FUNCTION_HINTS
from simulate.lines import find_assigned_or_empty, location
from simulate.memory import views
from simulate.memory.display import format_elements, format_html
from simulate.memory.layout import ByteView, Layout, intern_layout
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
    """Layout over a storage; `dynamic` is not None if a component of the address is read at run time."""

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
        """Create a tensor over a whole storage, or a placeholder; kernels allocate with nl.ndarray instead.

        Args:
            shape: Shape of the tensor.
            dtype: Its dtype.
            storage: Its storage; None makes a placeholder for a signature, without bytes.
            buffer: Memory of a placeholder.
            name: Name of the tensor, by default that of the storage.
            address: (partition, byte) of a placeholder, None if it has none.
        """
        if storage is None:
            element_type = as_dtype(dtype)
            storage = Storage(shape, element_type, buffer, name, np.empty(0, np.uint8), address, fresh=True)
            dtype = element_type
        self._set_view(shape, dtype, storage, None, 0, None)
        if name:
            self.name = name

    @classmethod
    def from_storage(
        cls: type[_Tensor],
        shape: tuple[int, ...],
        dtype: DType,
        storage: Storage,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        dynamic: Any = None,
    ) -> _Tensor:
        """Return a view of a storage by its strides and offset in elements; the default strides are row-major."""
        tensor = cls.__new__(cls)
        tensor._set_view(shape, dtype, storage, strides, offset, dynamic)
        return tensor

    @classmethod
    def from_layout(cls: type[_Tensor], layout: Layout, storage: Storage, dynamic: Any = None) -> _Tensor:
        """Return a view of a storage by a layout, which must be one over the storage's form."""
        tensor = cls.__new__(cls)
        tensor._set_layout(layout, storage, dynamic)
        return tensor

    def _set_view(
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
        self._set_layout(intern_layout(storage.form, shape, dtype, strides, offset), storage, dynamic)

    def _set_layout(self, layout: Layout, storage: Storage, dynamic: Any) -> None:
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
    def covers_storage(self) -> bool:
        """Whether the view covers every byte of its storage, each once; False for a run-time address."""
        return self.dynamic is None and self.layout.byte_view[0]

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> MemoryRegion:
        """Memory of the tensor."""
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
        """Number of elements per partition; of an HBM tensor, per index of dim 0."""
        return views.count(self.shape[1:])

    def is_contiguous(self) -> bool:
        """Return whether the elements are contiguous in row-major order, on chip within each partition.

        Dims of size 1 do not count.
        """
        first = 1 if self.buffer.on_chip else 0
        return views.is_row_major(self.shape[first:], self.strides[first:])

    def is_indirect(self) -> bool:
        """Return whether a component of the address is read at run time."""
        return self.dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        """Return the access pattern as [stride, count] pairs in elements, one for each dim, outermost first."""
        return [[stride, extent] for stride, extent in zip(self.strides, self.shape)]

    def check_bounds(self) -> None:
        """Raise OutOfBounds if the view has no elements or reaches outside its storage.

        Does nothing for an address that is read at run time, which is checked when an instruction uses it.
        """
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
        """Return the explicit name, shape, dtype and memory as text; unlike `describe` it reads no source file."""
        return _format_summary(self.name, self)

    def describe(self) -> str:
        """Return the text for errors and reports: name or variable, shape, dtype, memory, line of the allocation."""
        line = self.storage.line
        line_text = f" (allocated at {location(line).file_line})" if line is not None else ""
        return _format_summary(self.label, self) + line_text

    @property
    def label(self) -> str:
        """Explicit name, else the variable that the allocating line assigns; empty if there is neither."""
        return self.name or find_assigned_or_empty(self.storage.line)

    # -- its bytes ----------------------------------------------------------------------------------------------

    @property
    def array(self) -> np.ndarray:
        """Elements as a NumPy view of the simulated memory, in the dtype's storage type; counts as a read by Python.

        Raises Unsupported in a dry launch, whose memory has no bytes.
        """
        VALUE_READS.count += 1
        return self.uncounted_array

    @property
    def uncounted_array(self) -> np.ndarray:
        """Elements as a NumPy view of the simulated memory, for the simulator itself: not counted as a read by Python.

        Raises Unsupported in a dry launch, whose memory has no bytes.
        """
        array = self._array
        if array is None:
            if not self.storage.uncounted_array.size:  # NumPy accepts a view of any size over no bytes
                raise Unsupported(
                    "NKW-DRY-VALUES", f"a dry run has no values of {self.describe()} to look at"
                )
            _, shape, strides, offset, _ = self.layout.byte_view
            array = np.ndarray(shape, self.dtype.storage, self.storage.uncounted_array, offset, strides)
            self._array = array
        return array

    def forget_array(self) -> None:
        """Drop the cached NumPy view, because the storage has got new bytes."""
        self._array = None

    def float32(self) -> np.ndarray:
        """Return the elements converted to a float32 array, which must not be written; counts as a read by Python."""
        VALUE_READS.count += 1
        return self.uncounted_float32()

    def uncounted_float32(self) -> np.ndarray:
        """Return the elements converted to a float32 array, which must not be written; not counted as a read by Python.

        Of a float32 tensor the array is a view of its memory. Conversions of other tiles on chip are cached until the
        allocation is written again: a weight tile is converted once for all matmuls that read it.
        """
        if self.dtype.storage is _FLOAT32 and self.dtype is not tfloat32:
            return self.uncounted_array
        cache = self.storage.float_views
        converted = cache.get(self.layout)
        if converted is None:
            converted = to_float32(self.uncounted_array, self.dtype)
            if self.storage.buffer.on_chip:
                cache[self.layout] = converted
        return converted

    def byte_view(self) -> ByteView:
        """Return this view in bytes: whether it covers all, shape, byte strides, byte offset, element size.

        The first entry is False for an address that is read at run time.
        """
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
            return format_html(self.describe(), "its address is read at run time")
        VALUE_READS.count += 1
        if self.storage.uncounted_array.nbytes < self.storage.nbytes:
            return format_html(self.describe(), "no values: the launch is dry")
        states = self.storage.validity.states(*self.byte_view()[1:])
        first_dim = "partition" if self.buffer.on_chip else "row"
        return format_elements(self.describe(), self.uncounted_array, states, self.dtype, first_dim)

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuleViolation(
            no_python_on_tensors,
            f"a Python operator on {self.describe()}",
            hint="nisa.tensor_tensor, nisa.tensor_scalar or nisa.activation; a predicate tile instead of `if`",
        )

    def __bool__(self) -> bool:
        """Return True, as `if bias:` expects; raise RuleViolation for a tile of one element, which may be meant."""
        if self.size == 1 and self.buffer.on_chip:
            self._refuse()
        return True

    def __array_ufunc__(self, function: np.ufunc, *_: Any, **__: Any) -> NoReturn:
        """Raise RuleViolation for NumPy's element-wise functions and operators, which are Python on tensors as well."""
        self._refuse_numpy(function)

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        """Raise RuleViolation for all other functions of NumPy, which would take the tensor for an object."""
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


def _format_summary(name: str, tensor: TensorBytes) -> str:
    return f"{name}{' ' if name else ''}{tensor.shape} {tensor.dtype} in {tensor.buffer.value}"
