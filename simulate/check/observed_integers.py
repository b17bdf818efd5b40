"""Observation of integers: saturating casts, sums that wrap, and integers that are rounded by intermediate floats.

The detector `values` reports the notes that are gathered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulate.check.notes import Note
from simulate.isa import propagation
from simulate.isa.enums import Engine
from simulate.isa.plan import Contraction, Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics.quiet import quiet
from simulate.run.execute import round_to_dtype
from simulate.run.machine import Issue

EXACT_INTEGERS = 2**24
"""Every integer up to this magnitude is a float32."""

_EXACT_UP_TO = {"bfloat16": 2**8, "float16": 2**11, "float8_e4m3": 2**4, "float8_e5m2": 2**3}
"""Magnitude up to which a float dtype contains every integer."""

_NEAR_SUM = 1e-3  # float32 sums of fewer than thousands of elements are closer to the exact sum
_WRAPS = {"sum": np.add, "difference": np.subtract, "product": np.multiply}


@dataclass
class Integers:
    """Observed integers of one core: notes by kind, and the float tensors that contain integers."""

    saturated: list[Note] = field(default_factory=list)
    wrapped: list[Note] = field(default_factory=list)
    nan_to_integer: list[Note] = field(default_factory=list)
    rounded_numbers: list[Note] = field(default_factory=list)
    """Integers that an instruction without operands writes to a float dtype that rounds them."""
    _lineage: set[int] = field(default_factory=set)
    """Float tensors whose elements are integers computed from integers only."""

    operand_copies: list[np.ndarray] | None = None
    """Copies of the operands of the running instruction if all are integers, because its result may overwrite them."""

    def before(self, issue: Issue, operands: Sequence[Any]) -> None:
        """Set `operand_copies` to copies of an instruction's operands if all are integers, else to None."""
        plan, reads, _ = issue
        plain = len(operands) == len(reads) and all(isinstance(operand, np.ndarray) for operand in operands)
        self.operand_copies = None
        if plain and plan.rendezvous is None and not plan.effects.copies and self.are_integers(reads):
            self.operand_copies = [np.array(operand) for operand in operands]

    def are_integers(self, reads: Sequence[NkiTensor]) -> bool:
        """Return whether every operand has an integer dtype or contains integers; False without operands."""
        return bool(reads) and all(
            tile.dtype.is_integer or tile.storage.serial in self._lineage for tile in reads
        )

    def count_lost_by_sum(self, plan: Plan, tile: NkiTensor) -> int:
        """Return how many results of a sum over the free dimension are not exactly the sum of the integer operands.

        0 for other instructions, if operands are not integers, or if a result differs from the sum by more
        than rounding.

        Args:
            plan: The plan of the instruction.
            tile: The result.
        """
        if (
            plan.effects.contraction is not Contraction.columns
            or self.operand_copies is None
            or len(self.operand_copies) != 1
        ):
            return 0
        if self.operand_copies[0].size % tile.size:
            return 0
        sums = self.operand_copies[0].astype(np.int64).reshape(tile.size, -1).sum(axis=1)
        result = tile.array.astype(np.float64).reshape(-1)
        near = np.abs(sums - result) <= np.abs(sums) * _NEAR_SUM
        return int((sums != result).sum()) if near.all() else 0

    def trace(self, issue: Issue) -> None:
        """Record, for each result of an instruction, whether it is a float tensor that contains integers only."""
        plan, reads, writes = issue
        integral = plan.state is None and plan.accumulate is None and self.are_integers(reads)
        for tile in writes:
            serial = tile.storage.serial
            is_float = tile.dtype.is_float and not tile.dtype.is_packed and tile.dynamic is None
            if integral and is_float and plan.rendezvous is None and _has_integers_only(tile):
                self._lineage.add(serial)
            else:
                self._lineage.discard(serial)

    @quiet
    def observe_casts(self, event: int, issue: Issue, operands: Sequence[Any]) -> None:
        """Append notes on results that saturate, wrap or were NaN in an integer dtype, or that a float dtype rounds.

        Nothing is noted for a rendezvous, nor for an instruction that uses state of its engine.
        """
        plan, reads, writes = issue
        if plan.state is not None or plan.rendezvous is not None:
            return
        if plan.domain is Domain.bits:
            self._observe_bits(event, plan, reads, writes)
            return
        for number, tile in enumerate(writes):
            if tile.dynamic is None and tile.dtype.is_integer and tile.dtype != "bool_":
                self._observe_saturation(event, issue, number, operands)

    def _observe_saturation(self, event: int, issue: Issue, number: int, operands: Sequence[Any]) -> None:
        plan, _, writes = issue
        tile = writes[number]
        limits = np.iinfo(tile.dtype.storage)
        array = tile.array
        at_limit = bool(((array == limits.max) | (array == limits.min)).any())
        nan_possible = any(
            not np.isfinite(np.add.reduce(np.asarray(operand), axis=None)) for operand in operands
        )
        if not at_limit and not nan_possible:
            return
        exact = np.asarray(getattr(result := plan.compute(*operands)[number], "values", result))
        if exact.dtype.kind != "f":
            return
        # A float32 equal to the rounded limit marks an index that a search did not find; it loses nothing.
        nearest = np.rint(exact)
        outside = (nearest > np.float32(limits.max)) | (nearest < np.float32(limits.min))
        count, missing = int(outside.sum()), int(np.isnan(exact).sum())
        if count:
            example = float(exact[outside].flat[0])
            seen = (
                f"{count} of {tile.size} results lie outside {limits.min} to {limits.max} and saturate, "
                f"for example {example:g}"
            )
            self.saturated.append(Note(event, tile.storage.serial, seen))
        if missing:
            seen = f"{missing} of {tile.size} results are NaN, which no integer represents"
            self.nan_to_integer.append(Note(event, tile.storage.serial, seen))

    def _observe_bits(
        self, event: int, plan: Plan, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]
    ) -> None:
        tile = writes[0] if len(writes) == 1 else None
        if tile is None or tile.dynamic is not None:
            return
        if not reads and str(tile.dtype) in _EXACT_UP_TO:
            self._observe_sequence(event, tile)
        arithmetic = plan.engine is Engine.gpsimd and plan.propagate is propagation.elementwise
        if arithmetic and len(reads) == 2 and tile.dtype.is_integer and self.operand_copies is not None:
            self._observe_wrap(event, tile, *(operand.astype(np.int64) for operand in self.operand_copies))

    def _observe_sequence(self, event: int, tile: NkiTensor) -> None:
        """Append a note to `rounded_numbers` if a float result was an affine sequence of integers before its rounding.

        Such a sequence is, for example, the positions that an iota writes.

        Args:
            event: The event, an instruction without operands.
            tile: Its result, of a float dtype of 8 or 16 bits.
        """
        values = tile.array.astype(np.float64).reshape(tile.shape[0], -1)
        if not np.isfinite(values).all() or np.abs(values).max() <= _EXACT_UP_TO[str(tile.dtype)]:
            return
        rows, columns = (np.arange(extent) for extent in values.shape)
        row_step = values[1, 0] - values[0, 0] if len(rows) > 1 else 0.0
        column_step = values[0, 1] - values[0, 0] if len(columns) > 1 else 0.0
        exact = (values[0, 0] + np.add.outer(row_step * rows, column_step * columns)).astype(np.float32)
        fits = np.array_equal(round_to_dtype(tile, exact).astype(np.float64), values)
        lost = int((exact != values).sum())
        if fits and lost and (exact == np.rint(exact)).all():
            seen = f"{lost} of {tile.size} integers are rounded, for example {exact[exact != values].flat[0]:.0f}"
            self.rounded_numbers.append(Note(event, tile.storage.serial, seen))

    def _observe_wrap(self, event: int, tile: NkiTensor, first: np.ndarray, second: np.ndarray) -> None:
        limits = np.iinfo(tile.dtype.storage)
        result = tile.array.astype(np.int64).reshape(first.shape)
        for name, function in _WRAPS.items():
            exact = function(first, second.reshape(first.shape))
            outside = (exact > limits.max) | (exact < limits.min)
            if outside.any() and np.array_equal((exact - result) % 2**32, np.zeros_like(exact)):
                count = int(outside.sum())
                seen = f"{count} of {tile.size} results, each a {name}, exceed {limits.min} to {limits.max}"
                self.wrapped.append(Note(event, tile.storage.serial, seen))
                return


@quiet
def _has_integers_only(tile: NkiTensor) -> bool:
    values = tile.array.astype(np.float32)
    return bool((values == np.rint(values)).all())
