"""Building the operations of one rank, in program order, with common-subexpression elimination and constant folding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulate.memory import Storage
from simulate.numerics import DType
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.graph import Op, Opcode, Value, ValueKind, View
from simulate.replay.fusion.opcodes import Copy, Widen
from simulate.replay.fusion.provenance import Provenance, as_view, boxes_of, source_values

EXACT_IN_FLOAT32 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")

_LARGE_CONSTANT = 1 << 12
"""Bytes of constants above which equal ones are not looked for."""


class Builder:
    """The operations so far, and all values."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self._known: dict[Any, Value] = {}
        self._constants: dict[Any, Value] = {}

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
        """A view of an array that is the same in every launch; small equal ones are one value."""
        if array.size > 1 and not any(array.strides):  # one number, repeated
            one = self.constant(array.reshape(-1)[:1].copy(), dtype)
            return View(one.value, 0, array.shape, (0,) * array.ndim)
        kept = np.ascontiguousarray(array)
        if kept.nbytes > _LARGE_CONSTANT:
            return View.whole(self.value(ValueKind.constant, kept.shape, dtype, kept))
        key = kept.tobytes(), kept.shape, str(dtype), kept.dtype.str
        if key not in self._constants:
            self._constants[key] = self.value(ValueKind.constant, kept.shape, dtype, kept)
        return View.whole(self._constants[key])

    def op(
        self, opcode: Opcode, reads: Sequence[View], shape: tuple[int, ...], dtype: DType | np.dtype[Any]
    ) -> View:
        """The result of an operation; that of an equal earlier operation if there is one."""
        key = (opcode, shape, str(dtype), *(identity(view) for view in reads))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.results(opcode, reads, [(shape, dtype)])[0].value
        return View.whole(known)

    def results(
        self,
        opcode: Opcode,
        reads: Sequence[View],
        results: Sequence[tuple[tuple[int, ...], DType | np.dtype[Any]]],
    ) -> list[View]:
        """The results of a new operation, computed now if all its operands are constants."""
        constant = all(view.value.kind is ValueKind.constant for view in reads)
        kind = ValueKind.constant if constant else ValueKind.buffer
        made = [View.whole(self.value(kind, shape, dtype)) for shape, dtype in results]
        if constant:
            for view in made:
                view.value.array = np.empty(view.value.shape, view.value.element)
            with np.errstate(all="ignore"):
                for function, arguments in opcode.calls(
                    [v.value.array for v in made], list(map(array_of, reads))
                ):
                    function(*arguments)
        else:
            self.append(opcode, reads, made)
        return made

    def append(
        self, opcode: Opcode, reads: Sequence[View], writes: Sequence[View], has_effects: bool = False
    ) -> None:
        """Add an operation that writes to given views."""
        sequence = self.sequence
        for view in writes:
            view.value.ready = sequence
        self.ops.append(Op(opcode, tuple(reads), tuple(writes), sequence, has_effects))

    def roll_back(self, sequence: int) -> None:
        """Remove the operations from a sequence number on."""
        del self.ops[sequence:]
        self._known = {key: value for key, value in self._known.items() if value.ready < sequence}

    def view_of(self, provenance: Provenance, dtype: DType | np.dtype[Any]) -> View:
        """A view of elements in their own dtype; copies concatenate them, once, where they come from several views."""
        view = as_view(provenance, self.values)
        if view is not None:
            return view
        found = boxes_of(provenance, self.values)
        dtypes = {str(piece.value.dtype): piece.value.dtype for _, piece in found}
        kept = next(iter(dtypes.values())) if len(dtypes) == 1 else dtype
        places = (tuple((s.start, s.stop) for s in box) for box, _ in found)
        key = (provenance.shape, str(kept), *zip(places, (identity(piece) for _, piece in found)))
        known = self._known.get(key)
        if known is not None:
            return View.whole(known)
        whole = View.whole(self.value(ValueKind.buffer, provenance.shape, kept))
        for box, piece in found:
            self.append(Copy(), [self.converted(piece, kept)], [whole.at(box)])
        self._known[key] = whole.value
        return whole

    def read(self, provenance: Provenance, dtype: DType | np.dtype[Any]) -> View:
        """A view of elements in `dtype`."""
        return self.converted(self.view_of(provenance, dtype), dtype)

    def converted(self, view: View, dtype: DType | np.dtype[Any]) -> View:
        """A view converted to `dtype`; only narrow elements to float32 need a conversion."""
        element = dtype.storage if isinstance(dtype, DType) else dtype
        if view.value.element == element:
            return view
        assert element == np.float32, f"{view.value.dtype} elements are read as {dtype}"
        return self.op(Widen(view.value.dtype), [view], view.shape, float32)

    def dtypes(self, provenance: Provenance) -> list[DType | np.dtype[Any]]:
        """The dtypes of the values that elements are copies from."""
        return [value.dtype for value in source_values(provenance, self.values)]


def array_of(view: View) -> np.ndarray:
    """The elements of a view of a constant."""
    array = view.value.array
    assert array is not None
    width = array.itemsize
    return np.ndarray(
        view.shape, array.dtype, array, view.offset * width, tuple(stride * width for stride in view.strides)
    )


def identity(view: View) -> tuple[Any, ...]:
    """What two views have in common that have the same elements in the same order."""
    return view.value.number, view.offset, view.shape, view.strides
