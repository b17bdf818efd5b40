"""What an instruction's `compute` does, found out by calling it with operands that record instead of compute.

A planner says the meaning of its instruction once, in `compute`. Given `Traced` operands, the numpy calls in it become
operations; views, reshapes and transposes become arithmetic on the numbers of the elements and vanish.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from simulate.numerics import DType, as_dtype
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import View
from simulate.replay.fusion.opcodes import Product, Reduction, Selection, Ufunc, Widened
from simulate.replay.fusion.provenance import Cells, concatenated


class Untraceable(Exception):
    """A numpy feature for which there is no operation."""


class Traced(NDArrayOperatorsMixin):
    """An array of which only the origin of its elements is known."""

    __array_priority__ = 1000

    def __init__(self, builder: Builder, cells: Cells, dtype: DType | np.dtype[Any]) -> None:
        self.builder = builder
        self.cells = cells
        self.kept = dtype

    @property
    def dtype(self) -> np.dtype[Any]:
        """As numpy's."""
        return self.kept.storage if isinstance(self.kept, DType) else self.kept

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy's."""
        return self.cells.shape

    @property
    def ndim(self) -> int:
        """As numpy's."""
        return self.cells.ndim

    @property
    def size(self) -> int:
        """As numpy's."""
        return self.cells.size

    @property
    def T(self) -> Traced:
        """As numpy's."""
        return self._moved(self.cells.transpose())

    def _moved(self, cells: Cells) -> Traced:
        return Traced(self.builder, cells, self.kept)

    def reshape(self, *shape: Any) -> Traced:
        """As numpy's."""
        return self._moved(self.cells.reshape(*shape))

    def transpose(self, *axes: Any) -> Traced:
        """As numpy's."""
        return self._moved(self.cells.transpose(*axes))

    def view(self, dtype: Any) -> Traced:
        """As numpy's, for the dtype that it has."""
        if np.dtype(dtype) != self.dtype:
            raise Untraceable("a view of another dtype")
        return self

    def copy(self) -> Traced:
        """Values do not change: a copy is the same elements."""
        return self._moved(self.cells.copy())

    def __getitem__(self, key: Any) -> Traced:
        if not isinstance(key, (int, slice, tuple, type(None), type(Ellipsis))):
            raise Untraceable("an index array")
        return self._moved(self.cells[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Other elements stand at these places from now on."""
        if isinstance(value, (int, float)):
            value = np.full((1,) * self.ndim, value, self.dtype)
        other = traced(self.builder, value)
        if other.dtype != self.dtype:
            raise Untraceable("an assignment that converts")
        if self.cells.shared:
            raise Untraceable("an assignment that other views of the same elements would show")
        self.cells[key] = other.cells

    def astype(self, dtype: Any, copy: bool = True) -> Traced:
        """Comparisons become float32; other conversions are not followed."""
        wanted = np.dtype(dtype)
        if wanted == self.dtype:
            return self
        if self.dtype != np.bool_ or wanted != np.float32:
            raise Untraceable("a conversion")
        view = self.builder.read(self.cells, self.kept)
        return self._result(self.builder.op(Widened(self.kept), [view], view.shape, float32))

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
            return self._product(*(traced(self.builder, each) for each in inputs))
        if function.signature is not None:
            raise Untraceable(function.__name__)
        return self._element_wise(function, inputs, None if dtype is None else np.dtype(dtype))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """np.where, np.broadcast_to and np.reshape."""
        if function is np.where and len(args) == 3 and not kwargs:
            return self._where(*(traced(self.builder, each) for each in args))
        if function is np.broadcast_to and not kwargs:
            return self._moved(self.cells.broadcast_to(args[1]))
        if function is np.concatenate:
            parts = [traced(self.builder, each) for each in args[0]]
            if all(part.dtype == self.dtype for part in parts):
                return self._moved(concatenated([part.cells for part in parts], *args[1:], **kwargs))
        raise Untraceable(function.__name__)

    def _result(self, view: View) -> Traced:
        return Traced(self.builder, Cells(view), view.value.dtype)

    def _view(self, operand: Traced) -> View:
        return self.builder.read(operand.cells, operand.kept)

    def _element_wise(self, function: np.ufunc, inputs: Any, dtype: np.dtype[Any] | None) -> Traced:
        scalars, arrays = [], []
        samples: list[Any] = []
        for place, each in enumerate(inputs):
            if isinstance(each, (bool, int, float, np.generic)):
                scalars.append((place, f"{type(each).__name__} {each!r}", each))
                samples.append(each)
            else:
                arrays.append(traced(self.builder, each))
                samples.append(np.ones((1,), arrays[-1].dtype))
        with np.errstate(all="ignore"):
            result = function(*samples, dtype=dtype)
        shape = np.broadcast_shapes(*(each.shape for each in arrays))
        work = Ufunc(function, tuple(scalars), dtype)
        kept = _kept(result.dtype)
        return self._result(self.builder.op(work, [self._view(each) for each in arrays], shape, kept))

    def _reduce(
        self,
        function: np.ufunc,
        operand: Any,
        axis: Any = 0,
        dtype: Any = None,
        keepdims: bool = False,
        **options: Any,
    ) -> Traced:
        if options:
            raise Untraceable(f"reduce with {', '.join(options)}")
        array = traced(self.builder, operand)
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
        work = Reduction(function, axes if len(axes) > 1 else axes[0], kept, keepdims)
        return self._result(self.builder.op(work, [self._view(array)], shape, _kept(kept)))

    def _product(self, left: Traced, right: Traced) -> Traced:
        if left.ndim != 2 or right.ndim != 2 or left.dtype != np.float32 or right.dtype != np.float32:
            raise Untraceable("a matrix product of other than float32 matrices")
        operands = [self.builder.stored(each.cells, float32) for each in (left, right)]
        shape = (left.shape[0], right.shape[1])
        return self._result(self.builder.op(Product(), operands, shape, float32))

    def _where(self, condition: Traced, chosen: Traced, other: Traced) -> Traced:
        if chosen.dtype != other.dtype or condition.dtype != np.bool_:
            raise Untraceable("np.where of operands that differ")
        shape = np.broadcast_shapes(condition.shape, chosen.shape, other.shape)
        operands = [self._view(each) for each in (condition, chosen, other)]
        return self._result(self.builder.op(Selection(), operands, shape, chosen.kept))


def traced(builder: Builder, value: Any) -> Traced:
    """A traced operand as it is, an array as a constant."""
    if isinstance(value, Traced):
        return value
    if not isinstance(value, (np.ndarray, np.generic)):
        raise Untraceable(f"a {type(value).__name__}")
    array = np.asarray(value)
    dtype = _kept(array.dtype)
    return Traced(builder, Cells(builder.constant(array, dtype)), dtype)


def _kept(dtype: np.dtype[Any]) -> DType | np.dtype[Any]:
    if dtype == np.bool_ or (dtype.kind in "iu" and dtype.itemsize == 8):
        return dtype
    return as_dtype(dtype)
