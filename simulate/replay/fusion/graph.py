"""The intermediate representation of a program: values, strided views of values, and operations between views.

Every value is written once. Its kind says where its bytes are: a constant; *memory*, the bytes of a storage (an
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
    """The reason why a recorded program cannot be rewritten."""


class ValueKind(Enum):
    """Where the bytes of a value are."""

    constant = "constant"
    memory = "memory"
    buffer = "buffer"


@dataclass(eq=False, slots=True)
class Value:
    """An array that is written once; `ready` is the sequence number of the operation that completes it."""

    number: int
    kind: ValueKind
    shape: tuple[int, ...]
    dtype: DType | np.dtype[Any]
    """A dtype of the chip; one of numpy for a value inside one instruction, such as the result of a comparison."""
    ready: int = -1
    array: np.ndarray | None = None
    storage: Storage | None = None

    @property
    def element(self) -> np.dtype[Any]:
        """The numpy dtype of the elements."""
        return self.dtype.storage if isinstance(self.dtype, DType) else self.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return views.count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer."""
        return self.size * self.element.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a value; offset and strides count elements."""

    value: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, value: Value) -> View:
        """All elements in order."""
        return cls(value, 0, value.shape, views.row_major(value.shape))

    @property
    def is_whole(self) -> bool:
        """Whether the view has every element of its value once, in order."""
        return (
            self.offset == 0
            and views.count(self.shape) == self.value.size
            and views.is_row_major(self.shape, self.strides)
        )

    def transposed(self) -> View:
        """The view with its dims in the opposite order."""
        return View(self.value, self.offset, self.shape[::-1], self.strides[::-1])

    def at(self, slices: tuple[slice, ...]) -> View:
        """The part that `slices` (with start and stop) cut out."""
        offset = self.offset + sum(s.start * stride for s, stride in zip(slices, self.strides))
        return View(self.value, offset, tuple(s.stop - s.start for s in slices), self.strides)


class Opcode(Protocol):
    """What an operation computes; equal opcodes on equal views give equal results."""

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """The numpy calls as (function, arguments), with `writes` and `reads` among the arguments."""


@dataclass(eq=False, slots=True)
class Op:
    """One operation; `sequence` orders it among the others."""

    opcode: Opcode
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    sequence: float
    has_effects: bool = False
    """Whether dead-code elimination has to keep it: a store to memory, an unlowered instruction, a rendezvous."""


class DefUse:
    """The operations that write (define) and read (use) each value."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._readers: dict[int, list[Op]] = {}
        self._writers: dict[int, list[Op]] = {}
        for op in ops:
            self.add(op)

    def add(self, op: Op) -> None:
        """Enter an operation."""
        for view in op.reads:
            self._readers.setdefault(view.value.number, []).append(op)
        for view in op.writes:
            self._writers.setdefault(view.value.number, []).append(op)

    def readers(self, value: Value) -> list[Op]:
        """The operations that read a value, once for each operand."""
        return self._readers.get(value.number, [])

    def writers(self, value: Value) -> list[Op]:
        """The operations that write a value."""
        return self._writers.get(value.number, [])

    def can_substitute(self, value: Value, target: View) -> bool:
        """Whether every view of `value` can be replaced by a view of `target`'s elements."""
        return all(
            rebased(view, target) is not None
            for op in (*self.readers(value), *self.writers(value))
            for view in (*op.reads, *op.writes)
            if view.value is value
        )

    def substitute(self, value: Value, target: View) -> None:
        """Replace every view of `value` by one of `target`'s elements."""

        def moved(view: View) -> View:
            new = rebased(view, target)
            assert new is not None, "can_substitute was not asked"
            return new

        self._replace(value, moved, target.value.number)

    def move(self, value: Value, into: Value, offset: int) -> None:
        """Let a value be the elements of another one from an offset on."""
        self._replace(
            value, lambda view: View(into, offset + view.offset, view.shape, view.strides), into.number
        )

    def _replace(self, value: Value, moved: Callable[[View], View], into: int) -> None:
        def replaced(view: View) -> View:
            return moved(view) if view.value is value else view

        for op in {id(op): op for op in (*self.readers(value), *self.writers(value))}.values():
            op.reads, op.writes = tuple(map(replaced, op.reads)), tuple(map(replaced, op.writes))
        self._readers.setdefault(into, []).extend(self._readers.pop(value.number, []))
        self._writers.setdefault(into, []).extend(self._writers.pop(value.number, []))


def rebased(view: View, target: View) -> View | None:
    """A view of a contiguous buffer of `target`'s shape, as a view of `target`'s value; None if there is none.

    Each stride of the view is a sum of steps along the dims of the buffer; no index may leave its dim.
    """
    shape, old = target.shape, views.row_major(target.shape)
    reach = list(_digits(view.offset, shape, old))
    offset = target.offset + sum(d * stride for d, stride in zip(reach, target.strides))
    strides = []
    for extent, stride in zip(view.shape, view.strides):
        if extent == 1:
            strides.append(0)
            continue
        if stride < 0:
            return None
        digits = _digits(stride, shape, old)
        strides.append(sum(d * step for d, step in zip(digits, target.strides)))
        reach = [at + (extent - 1) * d for at, d in zip(reach, digits)]
    if any(at >= extent for at, extent in zip(reach, shape)):
        return None
    return View(target.value, offset, view.shape, tuple(strides))


def _digits(number: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    digits = []
    for extent, stride in zip(shape, strides):
        digit = number // stride if extent > 1 else 0
        digits.append(digit)
        number -= digit * stride
    return digits
