"""Tracing: an instruction's `compute`, called with operands that record numpy calls instead of computing.

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
    """A numpy feature for which there is no operation."""


class Tracer(NDArrayOperatorsMixin):
    """An array without data: the provenance of its elements, and their dtype."""

    __array_priority__ = 1000

    def __init__(self, builder: Builder, provenance: Provenance, dtype: DType | np.dtype[Any]) -> None:
        self.builder = builder
        self.provenance = provenance
        self.value_dtype = dtype

    @property
    def dtype(self) -> np.dtype[Any]:
        """As numpy's."""
        return self.value_dtype.storage if isinstance(self.value_dtype, DType) else self.value_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy's."""
        return self.provenance.shape

    @property
    def ndim(self) -> int:
        """As numpy's."""
        return self.provenance.ndim

    @property
    def size(self) -> int:
        """As numpy's."""
        return self.provenance.size

    @property
    def T(self) -> Tracer:
        """As numpy's."""
        return self._over(self.provenance.transpose())

    def _over(self, provenance: Provenance) -> Tracer:
        return Tracer(self.builder, provenance, self.value_dtype)

    def reshape(self, *shape: Any) -> Tracer:
        """As numpy's."""
        return self._over(self.provenance.reshape(*shape))

    def transpose(self, *axes: Any) -> Tracer:
        """As numpy's."""
        return self._over(self.provenance.transpose(*axes))

    def view(self, dtype: Any) -> Tracer:
        """As numpy's; raises Untraceable for another dtype."""
        if np.dtype(dtype) != self.dtype:
            raise Untraceable("a view of another dtype")
        return self

    def copy(self) -> Tracer:
        """As numpy's: the same elements, with provenance that may be written to."""
        return self._over(self.provenance.copy())

    def __getitem__(self, key: Any) -> Tracer:
        if not isinstance(key, (int, slice, tuple, type(None), type(Ellipsis))):
            raise Untraceable("an index array")
        return self._over(self.provenance[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set the provenance of a part. Raises Untraceable for a conversion and for aliased provenance."""
        if isinstance(value, (int, float)):
            value = np.full((1,) * self.ndim, value, self.dtype)
        other = as_tracer(self.builder, value)
        if other.dtype != self.dtype:
            raise Untraceable("an assignment that converts")
        if self.provenance.aliased:
            raise Untraceable("an assignment to elements that another view aliases")
        self.provenance[key] = other.provenance

    def astype(self, dtype: Any, copy: bool = True) -> Tracer:
        """Comparisons become float32; raises Untraceable for other conversions."""
        wanted = np.dtype(dtype)
        if wanted == self.dtype:
            return self
        if self.dtype != np.bool_ or wanted != np.float32:
            raise Untraceable("a conversion")
        view = self.builder.read(self.provenance, self.value_dtype)
        return self._result(self.builder.op(Widen(self.value_dtype), [view], view.shape, float32))

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """A ufunc, or its reduction."""
        if method == "reduce":
            return self._reduce(function, inputs[0], **options)
        into = options.pop("out", (None,))[0]
        if into is not None:
            result = self.__array_ufunc__(function, method, *inputs, **options)
            into[...] = result
            return into
        dtype = options.pop("dtype", None)
        if method != "__call__" or options or function.nout != 1:
            raise Untraceable(f"{function.__name__}.{method} with {', '.join(options)}")
        if function is np.matmul:
            return self._product(*(as_tracer(self.builder, each) for each in inputs))
        if function.signature is not None:
            raise Untraceable(function.__name__)
        return self._element_wise(function, inputs, None if dtype is None else np.dtype(dtype))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """np.where, np.broadcast_to and np.concatenate."""
        if function is np.where and len(args) == 3 and not kwargs:
            return self._where(*(as_tracer(self.builder, each) for each in args))
        if function is np.broadcast_to and not kwargs:
            return self._over(self.provenance.broadcast_to(args[1]))
        if function is np.concatenate:
            parts = [as_tracer(self.builder, each) for each in args[0]]
            if all(part.dtype == self.dtype for part in parts):
                return self._over(concatenate([part.provenance for part in parts], *args[1:], **kwargs))
        raise Untraceable(function.__name__)

    def _result(self, view: View) -> Tracer:
        return Tracer(self.builder, Provenance(view), view.value.dtype)

    def _view(self, operand: Tracer) -> View:
        return self.builder.read(operand.provenance, operand.value_dtype)

    def _element_wise(self, function: np.ufunc, inputs: Any, dtype: np.dtype[Any] | None) -> Tracer:
        scalars, arrays = [], []
        samples: list[Any] = []
        for place, each in enumerate(inputs):
            if isinstance(each, (bool, int, float, np.generic)):
                scalars.append((place, f"{type(each).__name__} {each!r}", each))
                samples.append(each)
            else:
                arrays.append(as_tracer(self.builder, each))
                samples.append(np.ones((1,), arrays[-1].dtype))
        with np.errstate(all="ignore"):
            result = function(*samples, dtype=dtype)
        shape = np.broadcast_shapes(*(each.shape for each in arrays))
        opcode = Ufunc(function, tuple(scalars), dtype)
        kept = _value_dtype(result.dtype)
        return self._result(self.builder.op(opcode, [self._view(each) for each in arrays], shape, kept))

    def _reduce(
        self,
        function: np.ufunc,
        operand: Any,
        axis: Any = 0,
        dtype: Any = None,
        keepdims: bool = False,
        **options: Any,
    ) -> Tracer:
        if options:
            raise Untraceable(f"reduce with {', '.join(options)}")
        array = as_tracer(self.builder, operand)
        kept = np.dtype(dtype or array.dtype)
        if kept != array.dtype:
            raise Untraceable("a reduction that converts")
        axes = axis if isinstance(axis, tuple) else (axis,)
        axes = tuple(sorted(each % array.ndim for each in axes))
        shape = tuple(
            1 if dim in axes else extent
            for dim, extent in enumerate(array.shape)
            if keepdims or dim not in axes
        )
        opcode = Reduce(function, axes if len(axes) > 1 else axes[0], kept, keepdims)
        return self._result(self.builder.op(opcode, [self._view(array)], shape, _value_dtype(kept)))

    def _product(self, left: Tracer, right: Tracer) -> Tracer:
        if left.ndim != 2 or right.ndim != 2 or left.dtype != np.float32 or right.dtype != np.float32:
            raise Untraceable("a matrix product of other than float32 matrices")
        operands = [self.builder.view_of(each.provenance, float32) for each in (left, right)]
        shape = (left.shape[0], right.shape[1])
        return self._result(self.builder.op(Matmul(), operands, shape, float32))

    def _where(self, condition: Tracer, chosen: Tracer, other: Tracer) -> Tracer:
        if chosen.dtype != other.dtype or condition.dtype != np.bool_:
            raise Untraceable("np.where of operands that differ")
        shape = np.broadcast_shapes(condition.shape, chosen.shape, other.shape)
        operands = [self._view(each) for each in (condition, chosen, other)]
        return self._result(self.builder.op(Select(), operands, shape, chosen.value_dtype))


def as_tracer(builder: Builder, value: Any) -> Tracer:
    """A tracer as it is, an array as a constant. Raises Untraceable for anything else."""
    if isinstance(value, Tracer):
        return value
    if not isinstance(value, (np.ndarray, np.generic)):
        raise Untraceable(f"a {type(value).__name__}")
    array = np.asarray(value)
    dtype = _value_dtype(array.dtype)
    return Tracer(builder, Provenance(builder.constant(array, dtype)), dtype)


def _value_dtype(dtype: np.dtype[Any]) -> DType | np.dtype[Any]:
    if dtype == np.bool_ or (dtype.kind in "iu" and dtype.itemsize == 8):
        return dtype
    return as_dtype(dtype)
