"""The opcodes of operations: each gives the numpy calls that write the operation's results into given arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from simulate.isa.plan import Domain, Masked, Plan
from simulate.numerics import DType, from_float32, to_float32
from simulate.run.execute import rounded
from simulate.run.indirect import places, refuse_elements, refuse_index

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
    axes: int | tuple[int, ...] | None
    dtype: np.dtype[Any]
    keepdims: bool

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
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

    def elements(self, index: np.ndarray, count: int) -> np.ndarray:
        """The positions of the view's elements in a tensor of `count`. Raises OutOfBounds for an index outside."""
        indices = index.reshape(-1).astype(np.int64)
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.extent:
            refuse_index(indices, self.extent, self.what)
        if self.reach + high * self.step >= count:
            refuse_elements(self.offset + low * self.step, self.reach + high * self.step, count, self.what)
        indices *= self.step
        indices += self.offset
        return places(self.shape, self.strides) + indices.reshape(-1, *(1,) * (len(self.shape) - 1))

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


def _gather(where: DynamicView, out: np.ndarray, tensor: np.ndarray, index: np.ndarray) -> None:
    if index.size == 1:
        np.copyto(out, where.single(index, tensor))
        return
    # The elements are checked; mode "raise" would check them again and go through a buffer.
    np.take(tensor, where.elements(index, tensor.size), out=out, mode="clip")


def _scatter(where: DynamicView, tensor: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
    if index.size == 1:
        np.copyto(where.single(index, tensor), values)
        return
    tensor[where.elements(index, tensor.size)] = values


def _assign(convert: Any, out: np.ndarray, values: np.ndarray) -> None:
    out[...] = convert(values)


def _compute(plan: Plan, count: int, *operands: np.ndarray) -> None:
    outs, reads = operands[:count], operands[count:]
    results = plan.compute(*reads)
    for number, (out, result) in enumerate(zip(outs, results)):
        assert not isinstance(result, Masked), "an instruction that wrote all elements writes some now"
        values = result.reshape(out.shape)
        if number < len(plan.writes) and plan.domain is Domain.float32:
            values = rounded(plan.writes[number], values)
        out[...] = values
