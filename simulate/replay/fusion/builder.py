"""Building the operations of one rank, in program order: equal ones once, and those of constants at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulate.memory import Storage, views
from simulate.numerics import DType
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.graph import Op, Value, ValueKind, View, Work
from simulate.replay.fusion.opcodes import Copy, Widened
from simulate.replay.fusion.provenance import Cells, as_view, pieces, values_of

EXACT_IN_FLOAT32 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")


class Builder:
    """The operations found so far, and the values that they make."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self._known: dict[Any, Value] = {}

    @property
    def sequence(self) -> int:
        """The number that the next operation gets."""
        return len(self.ops)

    def value(
        self,
        kind: ValueKind,
        shape: tuple[int, ...],
        dtype: DType | np.dtype[Any],
        array: np.ndarray | None = None,
        storage: Storage | None = None,
    ) -> Value:
        """A new value."""
        made = Value(len(self.values), kind, shape, dtype, -1, array, storage)
        self.values.append(made)
        return made

    def constant(self, array: np.ndarray, dtype: DType | np.dtype[Any]) -> View:
        """An array that is the same in every launch."""
        kept = np.ascontiguousarray(array)
        return View.whole(self.value(ValueKind.constant, kept.shape, dtype, kept))

    def op(
        self, work: Work, reads: Sequence[View], shape: tuple[int, ...], dtype: DType | np.dtype[Any]
    ) -> View:
        """The result of an operation, computed now if its operands are constants."""
        key = (work, shape, str(dtype), *(_identity(view) for view in reads))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.ops_results(work, reads, [(shape, dtype)])[0].value
        return View.whole(known)

    def ops_results(
        self,
        work: Work,
        reads: Sequence[View],
        results: Sequence[tuple[tuple[int, ...], DType | np.dtype[Any]]],
    ) -> list[View]:
        """The results of an operation that may have several."""
        constant = all(view.value.kind is ValueKind.constant for view in reads)
        kind = ValueKind.constant if constant else ValueKind.buffer
        made = [View.whole(self.value(kind, shape, dtype)) for shape, dtype in results]
        if constant:
            for view in made:
                view.value.array = np.empty(view.value.shape, view.value.element)
            with np.errstate(all="ignore"):
                for function, arguments in work.steps(
                    [v.value.array for v in made], list(map(array_of, reads))
                ):
                    function(*arguments)
        else:
            self.append(work, reads, made)
        return made

    def append(self, work: Work, reads: Sequence[View], writes: Sequence[View], keep: bool = False) -> None:
        """Add an operation that writes to given places."""
        sequence = self.sequence
        for view in writes:
            view.value.ready = sequence
        self.ops.append(Op(work, tuple(reads), tuple(writes), sequence, keep))

    def forget(self, sequence: int) -> None:
        """Take back the operations from a number on."""
        del self.ops[sequence:]
        self._known = {key: value for key, value in self._known.items() if value.ready < sequence}

    def stored(self, cells: Cells, dtype: DType | np.dtype[Any]) -> View:
        """A view of elements in the dtype in which they are kept, put together first if need be."""
        view = as_view(cells, self.values)
        if view is not None:
            return view
        found = pieces(cells, self.values)
        dtypes = {str(piece.value.dtype): piece.value.dtype for _, piece in found}
        kept = next(iter(dtypes.values())) if len(dtypes) == 1 else dtype
        whole = View.whole(self.value(ValueKind.buffer, cells.shape, kept))
        for box, piece in found:
            self.append(Copy(), [self.presented(piece, kept)], [whole.at(box)])
        return whole

    def read(self, cells: Cells, dtype: DType | np.dtype[Any]) -> View:
        """A view of elements as an instruction sees them, in `dtype`."""
        return self.presented(self.stored(cells, dtype), dtype)

    def presented(self, view: View, dtype: DType | np.dtype[Any]) -> View:
        """A view in `dtype`; narrow floats stand for the same numbers in float32."""
        element = dtype.storage if isinstance(dtype, DType) else dtype
        if view.value.element == element:
            return view
        assert element == np.float32, f"{view.value.dtype} elements are read as {dtype}"
        return self.op(Widened(view.value.dtype), [view], view.shape, float32)

    def dtypes(self, cells: Cells) -> list[DType | np.dtype[Any]]:
        """The dtypes in which elements are kept."""
        return [value.dtype for value in values_of(cells, self.values)]


def array_of(view: View) -> np.ndarray:
    """The elements of a view of a constant."""
    array = view.value.array
    assert array is not None
    width = array.itemsize
    return np.ndarray(
        view.shape, array.dtype, array, view.offset * width, tuple(stride * width for stride in view.strides)
    )


def _identity(view: View) -> tuple[Any, ...]:
    return view.value.number, view.offset, view.shape, view.strides


def same_elements(view: View, other: View) -> bool:
    """Whether two views show the same elements in the same order."""
    return _identity(view) == _identity(other)


def count(view: View) -> int:
    """Number of elements of a view."""
    return views.count(view.shape)
