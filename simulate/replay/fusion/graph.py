"""Intermediate representation of a program: values, strided views of values, and operations between views.

Every value is written once. Its location says where its bytes are: a constant; *memory*, the bytes of a storage (an
argument, a result, a tile that instructions address at run time); or a *buffer*, which is placed at the end. A view
names elements of a value by offset and strides, in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from simulate.memory import Storage, views
from simulate.numerics import DType


class NotFused(Exception):
    """Exception with the reason why a recorded program cannot be rewritten."""


class ValueLocation(Enum):
    """Where the bytes of a value are: a constant array, the bytes of a storage ("memory"), or a temporary buffer."""

    constant = "constant"
    memory = "memory"
    buffer = "buffer"


@dataclass(eq=False, slots=True)
class Value:
    """Array that is written once.

    number: index in `Builder.values`. ready: sequence number of the operation that completes the value; -1 if it
    exists before all operations. array: the contents of a constant. storage: the storage of a memory value.
    """

    number: int
    location: ValueLocation
    shape: tuple[int, ...]
    dtype: DType | np.dtype[Any]
    """Dtype of the chip, or a numpy dtype for a value inside one instruction, such as the result of a comparison."""
    ready: int = -1
    array: np.ndarray | None = None
    storage: Storage | None = None

    @property
    def element(self) -> np.dtype[Any]:
        """Numpy dtype of the elements."""
        return self.dtype.storage if isinstance(self.dtype, DType) else self.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return views.count(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.element.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """Strided view of a value; offset and strides are in elements."""

    value: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def full(cls, value: Value) -> View:
        """Return the view of all elements of a value, in row-major order."""
        return cls(value, 0, value.shape, views.row_major(value.shape))

    @property
    def is_full(self) -> bool:
        """Whether the view has every element of its value once and in order."""
        return (
            self.offset == 0
            and views.count(self.shape) == self.value.size
            and views.is_row_major(self.shape, self.strides)
        )

    def transpose(self) -> View:
        """Return the view with its dims in reverse order."""
        return View(self.value, self.offset, self.shape[::-1], self.strides[::-1])

    def cut(self, slices: tuple[slice, ...]) -> View:
        """Return the view of a box, one slice per dim; each slice has a start and a stop and no step."""
        offset = self.offset + sum(s.start * stride for s, stride in zip(slices, self.strides))
        return View(self.value, offset, tuple(s.stop - s.start for s in slices), self.strides)


class Opcode(Protocol):
    """Kind of an operation with its parameters; equal opcodes on equal views give equal results."""

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """Return the numpy calls that compute an operation, as (function, arguments); nothing is called.

        Args:
            writes: One array or View per result, which the calls write in place.
            reads: One array or View per operand.
        """


@dataclass(eq=False, slots=True)
class Op:
    """Operation: opcode, operands and results; operations run in the order of `sequence`."""

    opcode: Opcode
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    sequence: float
    has_effects: bool = False
    """Whether dead-code elimination must keep the operation: a store to memory or an unlowered instruction."""


class DefUse:
    """Index of the operations that write (define) and read (use) each value."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._readers: dict[int, list[Op]] = {}
        self._writers: dict[int, list[Op]] = {}
        for op in ops:
            self.add(op)

    def add(self, op: Op) -> None:
        """Add an operation to the index."""
        for view in op.reads:
            self._readers.setdefault(view.value.number, []).append(op)
        for view in op.writes:
            self._writers.setdefault(view.value.number, []).append(op)

    def get_readers(self, value: Value) -> list[Op]:
        """Return the operations that read a value; an operation appears once for each operand that views the value."""
        return self._readers.get(value.number, [])

    def get_writers(self, value: Value) -> list[Op]:
        """Return the operations that write a value."""
        return self._writers.get(value.number, [])

    def can_substitute(self, value: Value, target: View) -> bool:
        """Return whether every view of a value can be expressed as a view of the target's elements."""
        return all(
            rebase(view, target) is not None
            for op in (*self.get_readers(value), *self.get_writers(value))
            for view in (*op.reads, *op.writes)
            if view.value is value
        )

    def substitute(self, value: Value, target: View) -> None:
        """Replace, in all operations, every view of a value by the view of the target's elements at the same positions.

        `can_substitute` must hold. The operations are changed in place.
        """

        def move_view(view: View) -> View:
            substitute = rebase(view, target)
            assert substitute is not None, "can_substitute does not hold"
            return substitute

        self._replace(value, move_view, target.value.number)

    def move(self, value: Value, target: Value, offset: int) -> None:
        """Replace, in all operations, every view of a value by the view of `target` from element `offset` on."""
        self._replace(
            value, lambda view: View(target, offset + view.offset, view.shape, view.strides), target.number
        )

    def _replace(self, value: Value, move_view: Callable[[View], View], target_number: int) -> None:
        """Replace every view of a value, in all operations, by `move_view(view)`, a view of value `target_number`."""

        def replace_view(view: View) -> View:
            return move_view(view) if view.value is value else view

        for op in {id(op): op for op in (*self.get_readers(value), *self.get_writers(value))}.values():
            op.reads, op.writes = tuple(map(replace_view, op.reads)), tuple(map(replace_view, op.writes))
        self._readers.setdefault(target_number, []).extend(self._readers.pop(value.number, []))
        self._writers.setdefault(target_number, []).extend(self._writers.pop(value.number, []))


def rebase(view: View, target: View) -> View | None:
    """Return a view of an array of the target's shape as a view of the target's value.

    `view` has offset and strides of a contiguous array, whose element at an index is the target's at the same index.
    Each stride of the view is a sum of steps along the dims of the array. Returns None if an index would leave its
    dim or if a stride is negative.
    """
    shape, old = target.shape, views.row_major(target.shape)
    reach = list(_split_offset(view.offset, shape, old))
    offset = target.offset + sum(d * stride for d, stride in zip(reach, target.strides))
    strides = []
    for extent, stride in zip(view.shape, view.strides):
        if extent == 1:
            strides.append(0)
            continue
        if stride < 0:
            return None
        digits = _split_offset(stride, shape, old)
        strides.append(sum(d * step for d, step in zip(digits, target.strides)))
        reach = [last_index + (extent - 1) * d for last_index, d in zip(reach, digits)]
    if any(last_index >= extent for last_index, extent in zip(reach, shape)):
        return None
    return View(target.value, offset, view.shape, tuple(strides))


def _split_offset(number: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return the index, one number per dim, of an element of a contiguous array."""
    digits = []
    for extent, stride in zip(shape, strides):
        digit = number // stride if extent > 1 else 0
        digits.append(digit)
        number -= digit * stride
    return digits
