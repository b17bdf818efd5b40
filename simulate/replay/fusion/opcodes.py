"""The opcodes of operations: each gives the numpy calls that write the operation's results into given arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from simulate.isa.plan import Domain, Masked, Plan
from simulate.memory.views import count as count_elements
from simulate.memory.views import is_row_major
from simulate.numerics import DType, from_float32, to_float32
from simulate.run.execute import round_to_dtype
from simulate.run.indirect import cached_element_ids, refuse_elements, refuse_index

NumpyCall = tuple[Any, list[Any]]

_WIDENED_BY_NUMPY = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Ufunc:
    """A ufunc of its operands; `scalars` has (position, text, number) for operands that are no arrays."""

    function: np.ufunc
    scalars: tuple[tuple[int, str, Any], ...]
    dtype: np.dtype[Any] | None

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        arguments = list(reads)
        for place, _, number in self.scalars:
            arguments.insert(place, number)
        if self.dtype is not None:
            return [(partial(_named, partial(self.function, dtype=self.dtype)), [*arguments, writes[0]])]
        if self.function in (np.maximum, np.minimum):  # numpy deprecates a third positional argument of these
            return [(partial(_named, self.function), [*arguments, writes[0]])]
        return [(self.function, [*arguments, writes[0]])]


@dataclass(frozen=True, slots=True)
class Reduce:
    """ufunc.reduce over `axes`."""

    function: np.ufunc
    axes: int | tuple[int, ...]
    dtype: np.dtype[Any]
    keepdims: bool

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        if isinstance(self.axes, int) and reads[0].shape[self.axes] == 2:
            return [(_of_two, [self.function, self.axes, *reads, writes[0]])]
        return [(self.function.reduce, [reads[0], self.axes, self.dtype, writes[0], self.keepdims])]


@dataclass(frozen=True, slots=True)
class Select:
    """np.where of a condition and two operands."""

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """A copy of the last operand, then a copy of the second one where the condition holds."""
        out, (condition, chosen, other) = writes[0], reads
        return [(np.copyto, [out, other]), (np.copyto, [out, chosen, "same_kind", condition])]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of its operand."""

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        return [(np.copyto, [writes[0], reads[0]])]


@dataclass(frozen=True, slots=True)
class Widen:
    """Elements of `source` converted to float32: exact except for integers above 2**24."""

    source: DType | np.dtype[Any]

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        return [(widen, [self.source, writes[0], reads[0]])]


@dataclass(frozen=True, slots=True)
class Narrow:
    """float32 rounded once into `target`."""

    target: DType

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        if self.target in _WIDENED_BY_NUMPY:
            return [(np.copyto, [writes[0], reads[0], "unsafe"])]
        return [(_assign, [partial(from_float32, dtype=self.target), writes[0], reads[0]])]


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matmul."""

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        return [(np.matmul, [*reads, writes[0]])]


@dataclass(frozen=True)
class DynamicView:
    """A view whose offset is known at run time only: each index moves the view by `step` elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    step: int
    extent: int
    what: str

    def checked(self, index: np.ndarray, count: int) -> np.ndarray:
        """Indices, flat, of views inside a tensor of `count` elements. Raises OutOfBounds for one outside."""
        indices = index.reshape(-1).astype(np.int64)
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.extent:
            refuse_index(indices, self.extent, self.what)
        if self.reach + high * self.step >= count:
            refuse_elements(self.offset + low * self.step, self.reach + high * self.step, count, self.what)
        return indices

    def elements(self, indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The positions of the elements of views under `indices`, in `shape`: axes of packed views, then the view's."""
        packed = shape[: len(shape) - len(self.shape)]
        starts = (indices * self.step + self.offset).reshape(*packed, -1, *(1,) * (len(self.shape) - 1))
        return cached_element_ids(self.shape, self.strides) + starts

    def rows(self, tensor: np.ndarray) -> np.ndarray:
        """The contiguous elements that each index may name, as rows."""
        count = (tensor.size - 1 - self.reach) // self.step + 1
        width = tensor.itemsize
        strides = (self.step * width, width)
        return np.ndarray((count, self.row), tensor.dtype, tensor, self.offset * width, strides)

    def single(self, index: np.ndarray, tensor: np.ndarray) -> np.ndarray:
        """The view of `tensor` for a single index, without a copy. Raises OutOfBounds for an index outside."""
        at = int(index.item())
        if not 0 <= at < self.extent:
            refuse_index(index.reshape(-1), self.extent, self.what)
        first = self.offset + at * self.step
        if self.reach + at * self.step >= tensor.size:
            refuse_elements(first, self.reach + at * self.step, tensor.size, self.what)
        width = tensor.itemsize
        strides = tuple([stride * width for stride in self.strides])
        return np.ndarray(self.shape, tensor.dtype, tensor, first * width, strides)

    @cached_property
    def row(self) -> int:
        """The elements of a row, where an index for each partition names one contiguous row; else 0."""
        one_row = self.step > 0 and self.strides[0] == 0 and is_row_major(self.shape[1:], self.strides[1:])
        return count_elements(self.shape[1:]) if one_row else 0

    @cached_property
    def reach(self) -> int:
        """The position of the view's last element at index 0."""
        return self.offset + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides))

    @property
    def is_ascending(self) -> bool:
        """Whether no offset, step or stride is negative."""
        return self.offset >= 0 and self.step >= 0 and min(self.strides) >= 0


@dataclass(frozen=True, slots=True)
class Gather:
    """A read of a dynamic view."""

    where: DynamicView

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        return [(_gather, [self.where, writes[0], *reads])]


@dataclass(frozen=True, slots=True)
class Scatter:
    """A write to a dynamic view."""

    where: DynamicView

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        return [(_scatter, [self.where, writes[0], *reads])]


@dataclass(frozen=True, eq=False, slots=True)
class ComputeCall:
    """A call of an instruction's own `compute`, for one that cannot be traced."""

    plan: Plan

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call of the planner's function."""
        return [(_compute, [self.plan, len(writes), *writes, *reads])]


def widen(source: DType | np.dtype[Any], out: np.ndarray, values: np.ndarray) -> None:
    """Convert `values`, elements of dtype `source`, to float32 in `out`."""
    if not isinstance(source, DType) or source in _WIDENED_BY_NUMPY:
        np.copyto(out, values, casting="unsafe")
    else:
        out[...] = to_float32(values, dtype=source)


def _named(function: Any, *operands: Any) -> None:
    function(*operands[:-1], out=operands[-1])


def _of_two(function: np.ufunc, axis: int, values: np.ndarray, out: np.ndarray) -> None:
    """Reduce an axis of two elements: numpy's `reduce` takes 20 times as long where such an axis is the last one."""
    first, second = np.moveaxis(values, axis, 0)
    function(first, second, out=out.reshape(first.shape) if out.shape != first.shape else out)


def _gather(where: DynamicView, out: np.ndarray, tensor: np.ndarray, index: np.ndarray) -> None:
    if index.size == 1:
        np.copyto(out, where.single(index, tensor))
        return
    indices = where.checked(index, tensor.size)
    # The indices are checked; mode "raise" would check them again and go through a buffer.
    if not (where.row and indices.size * where.row == out.size and out.flags.c_contiguous):
        np.take(tensor, where.elements(indices, out.shape), out=out, mode="clip")
    elif where.row == where.step:
        np.take(where.rows(tensor), indices, axis=0, out=out.reshape(-1, where.row), mode="clip")
    else:
        out.reshape(-1, where.row)[...] = where.rows(tensor)[indices]


def _scatter(where: DynamicView, tensor: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
    if index.size == 1:
        np.copyto(where.single(index, tensor), values)
        return
    indices = where.checked(index, tensor.size)
    if where.row and indices.size * where.row == values.size:
        where.rows(tensor)[indices] = values.reshape(-1, where.row)
    else:
        tensor[where.elements(indices, values.shape)] = values


def _assign(convert: Any, out: np.ndarray, values: np.ndarray) -> None:
    out[...] = convert(values)


def _compute(plan: Plan, count: int, *operands: np.ndarray) -> None:
    outs, reads = operands[:count], operands[count:]
    results = plan.compute(*reads)
    for number, (out, result) in enumerate(zip(outs, results)):
        assert not isinstance(result, Masked), "an instruction that wrote all elements writes some now"
        values = result.reshape(out.shape)
        if number < len(plan.writes) and plan.domain is Domain.float32:
            values = round_to_dtype(plan.writes[number], values)
        out[...] = values
