"""Tracing: an instruction's `compute` is called with operands that record numpy calls instead of computing.

A planner states the meaning of its instruction once, in `compute`. Called with `Tracer` operands, its numpy calls
become operations; views, reshapes and transposes become arithmetic on provenance and cost nothing at run time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from simulate.numerics import DType, as_dtype
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import View
from simulate.replay.fusion.opcodes import Matmul, Reduce, Select, Ufunc, Widen
from simulate.replay.fusion.provenance import Provenance, concatenate


class Untraceable(Exception):
    """Exception for a use of numpy that no operation expresses; the instruction then runs its `compute` as it is."""


class Tracer(NDArrayOperatorsMixin):
    """Stand-in for an array in `compute`: it has no data, only the provenance and dtype of its elements.

    Calls of numpy append operations to `builder`; methods follow `numpy.ndarray`. `value_dtype` is the chip's dtype,
    or a numpy dtype for a value inside one instruction.
    """

    __array_priority__ = 1000

    def __init__(self, builder: Builder, provenance: Provenance, dtype: DType | np.dtype[Any]) -> None:
        self.builder = builder
        self.provenance = provenance
        self.value_dtype = dtype

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the elements."""
        return self.value_dtype.storage if isinstance(self.value_dtype, DType) else self.value_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.provenance.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.provenance.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.provenance.size

    @property
    def T(self) -> Tracer:
        """Transposed array, as `numpy.ndarray.T`."""
        return self._derive(self.provenance.transpose())

    def _derive(self, provenance: Provenance) -> Tracer:
        """Return a tracer of the same dtype with another provenance."""
        return Tracer(self.builder, provenance, self.value_dtype)

    def reshape(self, *shape: Any) -> Tracer:
        """Return a tracer with another shape, as `numpy.ndarray.reshape` does."""
        return self._derive(self.provenance.reshape(*shape))

    def transpose(self, *axes: Any) -> Tracer:
        """Return a tracer with permuted axes, as `numpy.ndarray.transpose` does."""
        return self._derive(self.provenance.transpose(*axes))

    def view(self, dtype: Any) -> Tracer:
        """Return this tracer. Raises Untraceable if `dtype` is another dtype."""
        if np.dtype(dtype) != self.dtype:
            raise Untraceable("a view of another dtype")
        return self

    def copy(self) -> Tracer:
        """Return a tracer of the same elements to whose elements may be assigned."""
        return self._derive(self.provenance.copy())

    def __getitem__(self, key: Any) -> Tracer:
        if not isinstance(key, (int, slice, tuple, type(None), type(Ellipsis))):
            raise Untraceable("an index array")
        return self._derive(self.provenance[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set the selected elements to those of a number, array or tracer, by changing provenance only.

        Raises Untraceable for another dtype, and if a view was derived from this tracer, which would have to change
        as well.
        """
        if isinstance(value, (int, float)):
            value = np.full((1,) * self.ndim, value, self.dtype)
        other = as_tracer(self.builder, value)
        if other.dtype != self.dtype:
            raise Untraceable("an assignment that converts")
        if self.provenance.aliased:
            raise Untraceable("an assignment to elements that another view aliases")
        self.provenance[key] = other.provenance

    def astype(self, dtype: Any, copy: bool = True) -> Tracer:
        """Return booleans as float32, or this tracer for its own dtype. Raises Untraceable for other conversions."""
        target_dtype = np.dtype(dtype)
        if target_dtype == self.dtype:
            return self
        if self.dtype != np.bool_ or target_dtype != np.float32:
            raise Untraceable("a conversion")
        view = self.builder.read(self.provenance, self.value_dtype)
        return self._trace_result(self.builder.add_op(Widen(self.value_dtype), [view], view.shape, float32))

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Return the tracer of a ufunc's result, of its `reduce`, or of np.matmul; `out` is assigned to.

        Raises Untraceable for other methods and options.
        """
        if method == "reduce":
            return self._trace_reduction(function, inputs[0], **options)
        out = options.pop("out", (None,))[0]
        if out is not None:
            result = self.__array_ufunc__(function, method, *inputs, **options)
            out[...] = result
            return out
        dtype = options.pop("dtype", None)
        if method != "__call__" or options or function.nout != 1:
            raise Untraceable(f"{function.__name__}.{method} with {', '.join(options)}")
        if function is np.matmul:
            return self._trace_product(*(as_tracer(self.builder, operand) for operand in inputs))
        if function.signature is not None:
            raise Untraceable(function.__name__)
        return self._trace_element_wise(function, inputs, None if dtype is None else np.dtype(dtype))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the tracer of np.where, np.broadcast_to or np.concatenate. Raises Untraceable for other functions."""
        if function is np.where and len(args) == 3 and not kwargs:
            return self._trace_where(*(as_tracer(self.builder, operand) for operand in args))
        if function is np.broadcast_to and not kwargs:
            return self._derive(self.provenance.broadcast_to(args[1]))
        if function is np.concatenate:
            arrays = [as_tracer(self.builder, array) for array in args[0]]
            if all(array.dtype == self.dtype for array in arrays):
                return self._derive(concatenate([array.provenance for array in arrays], *args[1:], **kwargs))
        raise Untraceable(function.__name__)

    def _trace_result(self, view: View) -> Tracer:
        """Return the tracer of an operation's result."""
        return Tracer(self.builder, Provenance(view), view.value.dtype)

    def _read_view(self, operand: Tracer) -> View:
        """Return a view of a tracer's elements in its dtype."""
        return self.builder.read(operand.provenance, operand.value_dtype)

    def _trace_element_wise(self, function: np.ufunc, inputs: Any, dtype: np.dtype[Any] | None) -> Tracer:
        """Append an element-wise ufunc and return the tracer of its result; numbers are part of the opcode."""
        scalars, arrays = [], []
        samples: list[Any] = []
        for position, operand in enumerate(inputs):
            if isinstance(operand, (bool, int, float, np.generic)):
                scalars.append((position, f"{type(operand).__name__} {operand!r}", operand))
                samples.append(operand)
            else:
                arrays.append(as_tracer(self.builder, operand))
                samples.append(np.ones((1,), arrays[-1].dtype))
        with np.errstate(all="ignore"):
            result = function(*samples, dtype=dtype)
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        opcode = Ufunc(function, tuple(scalars), dtype)
        result_dtype = _get_value_dtype(result.dtype)
        return self._trace_result(
            self.builder.add_op(opcode, [self._read_view(array) for array in arrays], shape, result_dtype)
        )

    def _trace_reduction(
        self,
        function: np.ufunc,
        operand: Any,
        axis: Any = 0,
        dtype: Any = None,
        keepdims: bool = False,
        **options: Any,
    ) -> Tracer:
        """Append a ufunc's reduction over `axis` and return the tracer of its result.

        Raises Untraceable for a reduction in another dtype and for further options.
        """
        if options:
            raise Untraceable(f"reduce with {', '.join(options)}")
        array = as_tracer(self.builder, operand)
        sum_dtype = np.dtype(dtype or array.dtype)
        if sum_dtype != array.dtype:
            raise Untraceable("a reduction that converts")
        axes = axis if isinstance(axis, tuple) else (axis,)
        axes = tuple(sorted(dim % array.ndim for dim in axes))
        shape = tuple(
            1 if dim in axes else extent
            for dim, extent in enumerate(array.shape)
            if keepdims or dim not in axes
        )
        opcode = Reduce(function, axes if len(axes) > 1 else axes[0], sum_dtype, keepdims)
        return self._trace_result(
            self.builder.add_op(opcode, [self._read_view(array)], shape, _get_value_dtype(sum_dtype))
        )

    def _trace_product(self, left: Tracer, right: Tracer) -> Tracer:
        """Append a matmul and return its result's tracer. Raises Untraceable unless both are float32 matrices."""
        if left.ndim != 2 or right.ndim != 2 or left.dtype != np.float32 or right.dtype != np.float32:
            raise Untraceable("a matrix product of other than float32 matrices")
        operands = [self.builder.gather_view(matrix.provenance, float32) for matrix in (left, right)]
        shape = (left.shape[0], right.shape[1])
        return self._trace_result(self.builder.add_op(Matmul(), operands, shape, float32))

    def _trace_where(self, condition: Tracer, chosen: Tracer, other: Tracer) -> Tracer:
        """Append a selection and return its result's tracer. Raises Untraceable for different dtypes."""
        if chosen.dtype != other.dtype or condition.dtype != np.bool_:
            raise Untraceable("np.where of operands that differ")
        shape = np.broadcast_shapes(condition.shape, chosen.shape, other.shape)
        operands = [self._read_view(operand) for operand in (condition, chosen, other)]
        return self._trace_result(self.builder.add_op(Select(), operands, shape, chosen.value_dtype))


def as_tracer(builder: Builder, value: Any) -> Tracer:
    """Return a tracer unchanged, and an array as the tracer of a constant. Raises Untraceable for any other object."""
    if isinstance(value, Tracer):
        return value
    if not isinstance(value, (np.ndarray, np.generic)):
        raise Untraceable(f"a {type(value).__name__}")
    array = np.asarray(value)
    dtype = _get_value_dtype(array.dtype)
    return Tracer(builder, Provenance(builder.add_constant(array, dtype)), dtype)


def _get_value_dtype(dtype: np.dtype[Any]) -> DType | np.dtype[Any]:
    """Return the chip's dtype for a numpy dtype; bool and 64-bit integers, which the chip lacks, stay numpy dtypes."""
    if dtype == np.bool_ or (dtype.kind in "iu" and dtype.itemsize == 8):
        return dtype
    return as_dtype(dtype)
