"""Opcodes of operations: each lists the numpy calls that write the results of an operation to given arrays.

`list_calls(writes, reads)` returns (function, arguments) pairs and calls nothing; see `Opcode`. A dynamic view is a
view whose offset depends on a run-time index.
"""

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
from simulate.run.indirect import get_element_ids, refuse_elements, refuse_index

NumpyCall = tuple[Any, list[Any]]

_WIDENED_BY_NUMPY = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Ufunc:
    """Opcode of an element-wise ufunc; `scalars` has (position, text, number) for arguments that are no arrays."""

    function: np.ufunc
    scalars: tuple[tuple[int, str, Any], ...]
    dtype: np.dtype[Any] | None

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes the ufunc of all arguments to `writes[0]`."""
        arguments = list(reads)
        for position, _, number in self.scalars:
            arguments.insert(position, number)
        if self.dtype is not None:
            return [
                (partial(_call_with_out, partial(self.function, dtype=self.dtype)), [*arguments, writes[0]])
            ]
        if self.function in (np.maximum, np.minimum):  # numpy deprecates a third positional argument of these
            return [(partial(_call_with_out, self.function), [*arguments, writes[0]])]
        return [(self.function, [*arguments, writes[0]])]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Opcode of a ufunc's reduction of the operand over `axes`."""

    function: np.ufunc
    axes: int | tuple[int, ...]
    dtype: np.dtype[Any]
    keepdims: bool

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes the reduction of `reads[0]` to `writes[0]`.

        For an axis of two elements it is the ufunc on both, which is faster.
        """
        if isinstance(self.axes, int) and reads[0].shape[self.axes] == 2:
            return [(_reduce_two, [self.function, self.axes, *reads, writes[0]])]
        return [(self.function.reduce, [reads[0], self.axes, self.dtype, writes[0], self.keepdims])]


@dataclass(frozen=True, slots=True)
class Select:
    """Opcode of np.where: reads are the condition, the elements where it is true, and those where it is false."""

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return two (function, arguments), not called yet, that fill `writes[0]`.

        The first copies `reads[2]`, the second copies `reads[1]` where the condition `reads[0]` is true.
        """
        out, (condition, chosen, other) = writes[0], reads
        return [(np.copyto, [out, other]), (np.copyto, [out, chosen, "same_kind", condition])]


@dataclass(frozen=True, slots=True)
class Copy:
    """Opcode of a copy of the operand in its dtype."""

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that copies `reads[0]` to `writes[0]`."""
        return [(np.copyto, [writes[0], reads[0]])]


@dataclass(frozen=True, slots=True)
class Widen:
    """Opcode of a conversion of dtype `source` to float32, exact except for integers above 2**24."""

    source: DType | np.dtype[Any]

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes `reads[0]` as float32 to `writes[0]`."""
        return [(widen, [self.source, writes[0], reads[0]])]


@dataclass(frozen=True, slots=True)
class Narrow:
    """Opcode of the rounding of float32 elements to dtype `target`."""

    target: DType

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes `reads[0]`, rounded, to `writes[0]`."""
        if self.target in _WIDENED_BY_NUMPY:
            return [(np.copyto, [writes[0], reads[0], "unsafe"])]
        return [(_assign, [partial(from_float32, dtype=self.target), writes[0], reads[0]])]


@dataclass(frozen=True, slots=True)
class Matmul:
    """Opcode of a matmul of two float32 matrices."""

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes `reads[0] @ reads[1]` to `writes[0]`."""
        return [(np.matmul, [*reads, writes[0]])]


@dataclass(frozen=True)
class DynamicView:
    """View whose offset is known at run time only: index i moves its first element to `offset + i * step`.

    All numbers count elements. With several indices, one per position of the first dim, that dim's stride is 0.
    `extent` bounds the indices.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    step: int
    extent: int
    description: str

    def check_indices(self, index: np.ndarray, count: int) -> np.ndarray:
        """Return the indices as a flat int64 array after checking them.

        Args:
            index: The indices.
            count: The number of elements of the tensor.

        Raises:
            OutOfBounds: An index is not within `extent`, or its view not inside the tensor.
        """
        indices = index.reshape(-1).astype(np.int64)
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.extent:
            refuse_index(indices, self.extent, self.description)
        if self.reach + high * self.step >= count:
            refuse_elements(
                self.offset + low * self.step, self.reach + high * self.step, count, self.description
            )
        return indices

    def compute_element_ids(self, indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the positions of the selected elements in the tensor.

        Args:
            indices: The checked indices.
            shape: The shape of the positions: axes of packed views, then axes of the view.
        """
        packed = shape[: len(shape) - len(self.shape)]
        starts = (indices * self.step + self.offset).reshape(*packed, -1, *(1,) * (len(self.shape) - 1))
        return get_element_ids(self.shape, self.strides) + starts

    def view_rows(self, tensor: np.ndarray) -> np.ndarray:
        """Return a NumPy view of the tensor whose row i has the contiguous elements that index i selects."""
        count = (tensor.size - 1 - self.reach) // self.step + 1
        width = tensor.itemsize
        strides = (self.step * width, width)
        return np.ndarray((count, self.row), tensor.dtype, tensor, self.offset * width, strides)

    def view_single(self, index: np.ndarray, tensor: np.ndarray) -> np.ndarray:
        """Return the NumPy view of a tensor that a single index selects.

        Raises:
            OutOfBounds: The index is not within `extent`, or the view not inside the tensor.
        """
        position = int(index.item())
        if not 0 <= position < self.extent:
            refuse_index(index.reshape(-1), self.extent, self.description)
        first = self.offset + position * self.step
        if self.reach + position * self.step >= tensor.size:
            refuse_elements(first, self.reach + position * self.step, tensor.size, self.description)
        width = tensor.itemsize
        strides = tuple([stride * width for stride in self.strides])
        return np.ndarray(self.shape, tensor.dtype, tensor, first * width, strides)

    @cached_property
    def row(self) -> int:
        """Number of elements that each index selects, if they are one contiguous row; otherwise 0."""
        one_row = self.step > 0 and self.strides[0] == 0 and is_row_major(self.shape[1:], self.strides[1:])
        return count_elements(self.shape[1:]) if one_row else 0

    @cached_property
    def reach(self) -> int:
        """Position of the view's last element for index 0, which bounds the tensor's size."""
        return self.offset + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides))

    @property
    def is_ascending(self) -> bool:
        """Whether no offset, step or stride is negative."""
        return self.offset >= 0 and self.step >= 0 and min(self.strides) >= 0


@dataclass(frozen=True, slots=True)
class Gather:
    """Opcode of a read of a dynamic view; reads are the tensor, flat, and the index."""

    dynamic_view: DynamicView

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that copies selected elements of `reads[0]` to `writes[0]`.

        `reads[1]` is the index; the call raises OutOfBounds for an index outside the tensor.
        """
        return [(_gather, [self.dynamic_view, writes[0], *reads])]


@dataclass(frozen=True, slots=True)
class Scatter:
    """Opcode of a write to a dynamic view; reads are the values and the index, the result is the tensor, flat."""

    dynamic_view: DynamicView

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that copies `reads[0]` to selected elements of `writes[0]`.

        `reads[1]` is the index; the call raises OutOfBounds for an index outside the tensor.
        """
        return [(_scatter, [self.dynamic_view, writes[0], *reads])]


@dataclass(frozen=True, eq=False, slots=True)
class ComputeCall:
    """Opcode of a call of an instruction's `compute`, for instructions that cannot be traced."""

    plan: Plan

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes results of the plan's `compute` to `writes`."""
        return [(_compute, [self.plan, len(writes), *writes, *reads])]


def widen(source: DType | np.dtype[Any], out: np.ndarray, values: np.ndarray) -> None:
    """Write `values`, elements of dtype `source`, to `out` as float32."""
    if not isinstance(source, DType) or source in _WIDENED_BY_NUMPY:
        np.copyto(out, values, casting="unsafe")
    else:
        out[...] = to_float32(values, dtype=source)


def _call_with_out(function: Any, *operands: Any) -> None:
    """Call a function with all operands but the last, which is passed as `out`."""
    function(*operands[:-1], out=operands[-1])


def _reduce_two(function: np.ufunc, axis: int, values: np.ndarray, out: np.ndarray) -> None:
    """Write the reduction of an axis of two elements to `out`.

    Numpy's `reduce` takes 20 times as long if such an axis is the last one.
    """
    first, second = np.moveaxis(values, axis, 0)
    function(first, second, out=out.reshape(first.shape) if out.shape != first.shape else out)


def _gather(dynamic_view: DynamicView, out: np.ndarray, tensor: np.ndarray, index: np.ndarray) -> None:
    """Copy the elements that the indices select from `tensor` to `out`. Raises OutOfBounds for an index outside."""
    if index.size == 1:
        np.copyto(out, dynamic_view.view_single(index, tensor))
        return
    indices = dynamic_view.check_indices(index, tensor.size)
    # The indices are checked; mode "raise" would check them again and go through a buffer.
    if not (dynamic_view.row and indices.size * dynamic_view.row == out.size and out.flags.c_contiguous):
        np.take(tensor, dynamic_view.compute_element_ids(indices, out.shape), out=out, mode="clip")
    elif dynamic_view.row == dynamic_view.step:
        np.take(
            dynamic_view.view_rows(tensor),
            indices,
            axis=0,
            out=out.reshape(-1, dynamic_view.row),
            mode="clip",
        )
    else:
        out.reshape(-1, dynamic_view.row)[...] = dynamic_view.view_rows(tensor)[indices]


def _scatter(dynamic_view: DynamicView, tensor: np.ndarray, values: np.ndarray, index: np.ndarray) -> None:
    """Copy `values` to the elements of `tensor` that the indices select. Raises OutOfBounds for an index outside."""
    if index.size == 1:
        np.copyto(dynamic_view.view_single(index, tensor), values)
        return
    indices = dynamic_view.check_indices(index, tensor.size)
    if dynamic_view.row and indices.size * dynamic_view.row == values.size:
        dynamic_view.view_rows(tensor)[indices] = values.reshape(-1, dynamic_view.row)
    else:
        tensor[dynamic_view.compute_element_ids(indices, values.shape)] = values


def _assign(convert: Any, out: np.ndarray, values: np.ndarray) -> None:
    """Write `convert(values)` to `out`."""
    out[...] = convert(values)


def _compute(plan: Plan, count: int, *operands: np.ndarray) -> None:
    """Write the results of a plan's `compute`, rounded once to the dtypes of its tiles, to the first `count` operands.

    The remaining operands are the arguments of `compute`.
    """
    outs, reads = operands[:count], operands[count:]
    results = plan.compute(*reads)
    for number, (out, result) in enumerate(zip(outs, results)):
        assert not isinstance(result, Masked), "an instruction that wrote all elements writes some now"
        values = result.reshape(out.shape)
        if number < len(plan.writes) and plan.domain is Domain.float32:
            values = round_to_dtype(plan.writes[number], values)
        out[...] = values
