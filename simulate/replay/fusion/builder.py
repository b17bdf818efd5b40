"""Builder of one rank's operations, with common-subexpression elimination and constant folding.

A value is an array that is written once, a view a strided part of it (`simulate.replay.fusion.graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulate.memory import Storage
from simulate.numerics import DType
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.graph import Op, Opcode, Value, ValueLocation, View
from simulate.replay.fusion.opcodes import Copy, Widen
from simulate.replay.fusion.provenance import Provenance, as_view, find_source_values, split_into_boxes

EXACT_IN_FLOAT32 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")

_LARGE_CONSTANT = 1 << 12
"""Size in bytes above which equal constants are not merged."""


class Builder:
    """List of one rank's operations in program order, and of all values."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self._known: dict[Any, Value] = {}
        self._constants: dict[Any, Value] = {}

    @property
    def sequence(self) -> int:
        """Sequence number of the next operation."""
        return len(self.ops)

    def add_value(
        self,
        location: ValueLocation,
        shape: tuple[int, ...],
        dtype: DType | np.dtype[Any],
        array: np.ndarray | None = None,
        storage: Storage | None = None,
    ) -> Value:
        """Append a new value and return it; no operation writes it yet."""
        new_value = Value(len(self.values), location, shape, dtype, -1, array, storage)
        self.values.append(new_value)
        return new_value

    def add_constant(self, array: np.ndarray, dtype: DType | np.dtype[Any]) -> View:
        """Return a view of a constant with an array's contents; small equal constants share one value.

        An array that repeats one element (strides 0) becomes a view with strides 0 of one element.
        """
        if array.size > 1 and not any(array.strides):  # one number, repeated
            element = self.add_constant(array.reshape(-1)[:1].copy(), dtype)
            return View(element.value, 0, array.shape, (0,) * array.ndim)
        contiguous = np.ascontiguousarray(array)
        if contiguous.nbytes > _LARGE_CONSTANT:
            return View.full(self.add_value(ValueLocation.constant, contiguous.shape, dtype, contiguous))
        key = contiguous.tobytes(), contiguous.shape, str(dtype), contiguous.dtype.str
        if key not in self._constants:
            self._constants[key] = self.add_value(ValueLocation.constant, contiguous.shape, dtype, contiguous)
        return View.full(self._constants[key])

    def add_op(
        self, opcode: Opcode, reads: Sequence[View], shape: tuple[int, ...], dtype: DType | np.dtype[Any]
    ) -> View:
        """Return the view of an operation's one result; the operation is appended unless an equal one exists.

        The result is a new buffer, or a constant if all operands are constants.

        Args:
            opcode: What the operation computes.
            reads: The operands.
            shape: The shape of the result.
            dtype: The dtype of the result.
        """
        key = (opcode, shape, str(dtype), *(identify(view) for view in reads))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.add_results(opcode, reads, [(shape, dtype)])[0].value
        return View.full(known)

    def add_results(
        self,
        opcode: Opcode,
        reads: Sequence[View],
        results: Sequence[tuple[tuple[int, ...], DType | np.dtype[Any]]],
    ) -> list[View]:
        """Append an operation with a new buffer for each result; if all operands are constants, compute it now instead.

        Args:
            opcode: What the operation computes.
            reads: The operands.
            results: The shape and dtype of each result.

        Returns:
            Views of the new buffers, or of new constants.
        """
        is_constant = all(view.value.location is ValueLocation.constant for view in reads)
        location = ValueLocation.constant if is_constant else ValueLocation.buffer
        views = [View.full(self.add_value(location, shape, dtype)) for shape, dtype in results]
        if is_constant:
            for view in views:
                view.value.array = np.empty(view.value.shape, view.value.element)
            with np.errstate(all="ignore"):
                for function, arguments in opcode.list_calls(
                    [v.value.array for v in views], list(map(read_constant, reads))
                ):
                    function(*arguments)
        else:
            self.append(opcode, reads, views)
        return views

    def append(
        self, opcode: Opcode, reads: Sequence[View], writes: Sequence[View], has_effects: bool = False
    ) -> None:
        """Append an operation that writes to existing values, and set their `ready`."""
        sequence = self.sequence
        for view in writes:
            view.value.ready = sequence
        self.ops.append(Op(opcode, tuple(reads), tuple(writes), sequence, has_effects))

    def roll_back(self, sequence: int) -> None:
        """Remove the operations whose sequence number is at least `sequence`; their values stay in `values`."""
        del self.ops[sequence:]
        self._known = {key: value for key, value in self._known.items() if value.ready < sequence}

    def gather_view(self, provenance: Provenance, dtype: DType | np.dtype[Any]) -> View:
        """Return a view of the elements of a provenance, in the dtype of the values that they are copies of.

        Elements that no strided view of one value has are copied to a new buffer, once for equal provenance. If their
        dtypes differ, the buffer has `dtype`. Raises NotFused if an element was written by no instruction, or there
        are too many views.
        """
        view = as_view(provenance, self.values)
        if view is not None:
            return view
        boxes = split_into_boxes(provenance, self.values)
        dtypes = {str(view.value.dtype): view.value.dtype for _, view in boxes}
        common_dtype = next(iter(dtypes.values())) if len(dtypes) == 1 else dtype
        bounds = (tuple((s.start, s.stop) for s in box) for box, _ in boxes)
        key = (provenance.shape, str(common_dtype), *zip(bounds, (identify(view) for _, view in boxes)))
        known = self._known.get(key)
        if known is not None:
            return View.full(known)
        target = View.full(self.add_value(ValueLocation.buffer, provenance.shape, common_dtype))
        for box, source in boxes:
            self.append(Copy(), [self.convert(source, common_dtype)], [target.cut(box)])
        self._known[key] = target.value
        return target

    def read(self, provenance: Provenance, dtype: DType | np.dtype[Any]) -> View:
        """Return a view of a provenance's elements in `dtype`; other dtypes are widened to float32 by an operation.

        Elements that no strided view of one value has are copied to a new buffer. Raises NotFused if an element was
        written by no instruction, or there are too many views.
        """
        return self.convert(self.gather_view(provenance, dtype), dtype)

    def convert(self, view: View, dtype: DType | np.dtype[Any]) -> View:
        """Return a view of the same elements in `dtype`; an operation widens elements of another dtype to float32.

        Fails an assertion for any other conversion.
        """
        element = dtype.storage if isinstance(dtype, DType) else dtype
        if view.value.element == element:
            return view
        assert element == np.float32, f"{view.value.dtype} elements are read as {dtype}"
        return self.add_op(Widen(view.value.dtype), [view], view.shape, float32)

    def list_dtypes(self, provenance: Provenance) -> list[DType | np.dtype[Any]]:
        """Return the dtypes of the values that the elements of a provenance are copies of."""
        return [value.dtype for value in find_source_values(provenance, self.values)]


def read_constant(view: View) -> np.ndarray:
    """Return the elements of a view of a constant as a NumPy view."""
    array = view.value.array
    assert array is not None
    width = array.itemsize
    return np.ndarray(
        view.shape, array.dtype, array, view.offset * width, tuple(stride * width for stride in view.strides)
    )


def identify(view: View) -> tuple[Any, ...]:
    """Return a key that is equal for views of the same elements in the same order."""
    return view.value.number, view.offset, view.shape, view.strides
