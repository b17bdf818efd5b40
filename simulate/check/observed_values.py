"""Observation of values that a dtype does not represent, and of arguments outside a function's range.

The detector `values` reports the notes that are gathered here, `reported` those of `scaled_apart`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulate.check.notes import Note
from simulate.check.observed_integers import EXACT_INTEGERS, Integers
from simulate.isa.plan import Argument, Contraction, Domain, Plan
from simulate.memory import NkiTensor
from simulate.run.machine import Issue, Tensors

_FP8_MAX = {"float8_e4m3": 240.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_WIDE = ("int32", "uint32", "float32")
_FP8_E4M3_MAX = 240.0
"""Largest value of the chip's float8_e4m3, to which chips without e4m3fn convert e4m3fn."""
_MIN_ELEMENTS = 8
"""Smallest number of elements of which a share is computed."""
_SMALL_FP8 = 0.125
"""Largest magnitude of a tile that does not use the range of an 8-bit float; beyond it, small elements may vanish."""
_HALF_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Exponent bits of a 16-bit float, which are all set in infinities and NaN only."""


@dataclass
class Values:
    """Observed values of one core's operands and results: notes by kind."""

    large_integers: list[Note] = field(default_factory=list)
    wide_fp8: list[Note] = field(default_factory=list)
    overflowing_fp8: list[Note] = field(default_factory=list)
    overflowing_halves: list[Note] = field(default_factory=list)
    rounded_integers: list[Note] = field(default_factory=list)
    spread_by_transpose: list[Note] = field(default_factory=list)
    outside_domain: list[Note] = field(default_factory=list)
    vanished: list[Note] = field(default_factory=list)
    integers: Integers = field(default_factory=Integers)
    scaled_apart: list[tuple[int, int, int]] = field(default_factory=list)
    """Matmuls over 8-bit data whose scales differ between partitions: event, tensor, event that scaled the tensor."""
    _scaled: dict[int, int] = field(default_factory=dict)
    """Event that scaled the partitions of a tensor differently, by tensor."""

    def before(self, event: int, issue: Issue, operands: Sequence[Any]) -> None:
        """Append notes on operands that an instruction's float32 path or activation function cannot represent."""
        plan, reads, _ = issue
        self.integers.before(issue, operands)
        if plan.domain is not Domain.float32 or len(operands) != len(reads):
            return
        self._observe_operands(event, reads, operands)
        if plan.accumulate is not None and len(reads) == 1:
            self._observe_transpose(event, reads[0], operands[0])
        if plan.argument is not None:
            self._observe_argument(event, reads[0], plan.argument, operands)
        if plan.effects.contraction is Contraction.products:
            self._observe_contraction(event, reads, operands)

    def after(self, event: int, issue: Issue, operands: Sequence[Any]) -> None:
        """Append notes on results whose values are lost in their dtype, or on the float32 path to it."""
        plan, reads, writes = issue
        differs = (
            plan.domain is Domain.float32
            and plan.state is None
            and _has_different_scales(plan, reads, operands)
        )
        for tile in writes:
            if differs:
                self._scaled[tile.storage.serial] = event
            elif self._scaled:
                self._scaled.pop(tile.storage.serial, None)
        if len(operands) == len(reads):
            if plan.domain is Domain.float32 and plan.rendezvous is None:
                for number, tile in enumerate(writes):
                    if tile.dynamic is None:
                        self._observe_result(event, issue, number, operands)
            self.integers.observe_casts(event, issue, operands)
            self.integers.trace(issue)

    def _observe_operands(self, event: int, reads: Tensors, operands: Sequence[Any]) -> None:
        for tile, operand in zip(reads, operands):
            if tile.dynamic is not None:
                continue
            if tile.dtype in ("int32", "uint32"):
                lost = int((tile.array.astype(np.int64) != operand.astype(np.int64)).sum())
                if lost:
                    seen = f"{lost} integers above {EXACT_INTEGERS} lose bits as float32"
                    self.large_integers.append(Note(event, tile.storage.serial, seen))
            elif tile.dtype == "float8_e4m3fn":
                most = float(np.nanmax(np.abs(operand))) if operand.size else 0.0
                if most > _FP8_E4M3_MAX:
                    seen = f"a value of magnitude {most:g}, above the chip's largest of {_FP8_E4M3_MAX:g}"
                    self.wide_fp8.append(Note(event, tile.storage.serial, seen))

    def _observe_contraction(self, event: int, reads: Tensors, operands: Sequence[Any]) -> None:
        """Append to `scaled_apart` the operands of a matmul whose partitions were scaled differently.

        An operand is skipped if each column of the other operand has at most one nonzero factor: such a
        product sums nothing.
        """
        if len(reads) != 2 or not self._scaled:
            return
        for tile, other in ((reads[0], operands[1]), (reads[1], operands[0])):
            writer = self._scaled.get(tile.storage.serial)
            if writer is not None and np.count_nonzero(other.reshape(other.shape[0], -1), axis=0).max() > 1:
                self.scaled_apart.append((event, tile.storage.serial, writer))

    def _observe_transpose(self, event: int, tile: NkiTensor, operand: np.ndarray) -> None:
        """Append a note to `spread_by_transpose` for NaN or infinities in the operand of a transpose.

        The transpose is a product with the identity, in which 0 times such a value is NaN.
        """
        count = int((~np.isfinite(operand)).sum())
        if count:
            seen = (
                f"{count} of {tile.size} elements are NaN or infinite, and make their rows of the result NaN"
            )
            self.spread_by_transpose.append(Note(event, tile.storage.serial, seen))

    def _observe_argument(
        self, event: int, tile: NkiTensor, argument: Argument, operands: Sequence[Any]
    ) -> None:
        function = argument.function
        if function.domain is None:
            return
        values = np.asarray(argument.compute(*operands))
        outside = ~function.in_domain(values)
        if function.name == "sqrt":
            outside &= values != 0  # the root of zero is exact, whatever the documented lower end
        count = int(outside.sum())
        if count:
            low, high = function.domain
            sign = "magnitudes of " if function.domain_of_magnitude else ""
            seen = (
                f"{count} of {values.size} arguments of {function.name} lie outside {sign}{low:g} to {high:g}, "
                f"for example {float(values[outside].flat[0]):g}"
            )
            self.outside_domain.append(Note(event, tile.storage.serial, seen))

    def _observe_result(self, event: int, issue: Issue, number: int, operands: Sequence[Any]) -> None:
        """Append notes on the elements of a result that its dtype, or the float32 path to it, does not represent.

        Args:
            event: The event that wrote the result.
            issue: The plan, its reads and its writes.
            number: The index of the result among the writes.
            operands: The values of the operands.
        """
        plan, reads, writes = issue
        tile = writes[number]
        if tile.dtype in _FP8_MAX:
            lost = int((~np.isfinite(tile.array.astype(np.float32))).sum())
            if lost and all(np.isfinite(operand).all() for operand in operands):
                limit = _FP8_MAX[str(tile.dtype)]
                seen = f"{lost} of {tile.size} results overflow; the largest value is {limit:g}"
                self.overflowing_fp8.append(Note(event, tile.storage.serial, seen))
            elif plan.state is None and not lost:
                self._observe_vanishing(event, tile, np.asarray(plan.compute(*operands)[number]))
            return
        if plan.state is not None:
            return
        from_integers = self.integers.are_integers(reads)
        operands = self.integers.operand_copies or operands
        if tile.dtype in _HALF_EXPONENT:
            if from_integers or _has_infinity(tile):
                self._observe_halves(event, tile, np.asarray(plan.compute(*operands)[number]), from_integers)
        elif tile.dtype in _WIDE and from_integers and _is_large(tile.array):
            exact = np.asarray(plan.compute(*(operand.astype(np.float64) for operand in operands))[number])
            expected = exact.astype(np.float64)
            if tile.dtype.is_integer:
                # The index of a search without a match saturates, which loses nothing.
                limits = np.iinfo(tile.array.dtype)
                expected = np.clip(expected, limits.min, limits.max).astype(np.int64)
            lost = int((expected != tile.array.astype(expected.dtype).reshape(expected.shape)).sum())
            lost = lost or self.integers.count_lost_by_sum(plan, tile)
            if lost:
                seen = f"{lost} of {tile.size} results above {EXACT_INTEGERS} lose bits as float32"
                self.large_integers.append(Note(event, tile.storage.serial, seen))

    def _observe_vanishing(self, event: int, tile: NkiTensor, exact: np.ndarray) -> None:
        """Append a note to `vanished` if a cast to an 8-bit float makes most nonzero elements zero.

        Only tiles with 8 or more nonzero elements, and with no magnitude of 0.125 or more, count.

        Args:
            event: The event of the cast.
            tile: The result.
            exact: The result in float32.
        """
        values = exact.reshape(tile.shape)
        nonzero = values != 0
        lost, count = int((nonzero & (tile.array.astype(np.float32) == 0)).sum()), int(nonzero.sum())
        if count >= _MIN_ELEMENTS and 2 * lost > count and float(np.abs(values).max()) < _SMALL_FP8:
            seen = f"{lost} of {count} results that are not zero become zero, for example "
            seen += f"{float(values[nonzero & (tile.array.astype(np.float32) == 0)].flat[0]):g}"
            self.vanished.append(Note(event, tile.storage.serial, seen))

    def _observe_halves(self, event: int, tile: NkiTensor, exact: np.ndarray, from_integers: bool) -> None:
        """Append notes to `overflowing_halves` and `rounded_integers` for a result of a 16-bit float dtype.

        The first are finite results that became infinite, the second integers that the dtype rounded.

        Args:
            event: The event that wrote the result.
            tile: The result.
            exact: The result in float32.
            from_integers: Whether all operands are integers; only then are rounded integers noted.
        """
        stored = tile.array.astype(np.float32).reshape(exact.shape)
        overflows = int((np.isfinite(exact) & ~np.isfinite(stored)).sum())
        if overflows:
            seen = f"{overflows} of {tile.size} results overflow {tile.dtype}"
            self.overflowing_halves.append(Note(event, tile.storage.serial, seen))
        rounded = (stored != exact) & (exact == np.rint(exact))
        count = int(rounded.sum()) if from_integers else 0
        if count > overflows:
            seen = f"{count} of {tile.size} integers are rounded, for example {float(exact[rounded].flat[0]):.0f}"
            self.rounded_integers.append(Note(event, tile.storage.serial, seen))


def _has_different_scales(plan: Plan, reads: Tensors, operands: Sequence[Any]) -> bool:
    """Return whether an instruction scales an 8-bit tile by a (P, 1) operand whose elements differ.

    It counts as scaling if zeros in place of the tile give zeros.
    """
    if (
        len(reads) < 2
        or len(operands) != len(reads)
        or reads[0].dtype.itemsize != 1
        or reads[0].dynamic is not None
    ):
        return False
    columns = [operand for tile, operand in zip(reads[1:], operands[1:]) if tile.free_size == 1]
    if len(columns) != len(reads) - 1 or all((column == column.flat[0]).all() for column in columns):
        return False
    zeros = np.zeros_like(operands[0])
    return not np.any(np.asarray(plan.compute(zeros, *operands[1:])[0]))


def _has_infinity(tile: NkiTensor) -> bool:
    """Return whether a float16 or bfloat16 tile contains an infinity or NaN."""
    mask = _HALF_EXPONENT[str(tile.dtype)]
    return bool((tile.array.view(np.uint16) & mask == mask).any())


def _is_large(integers: np.ndarray) -> bool:
    """Return whether a finite element exceeds the integers that float32 represents exactly."""
    if integers.dtype.kind not in "iu":
        integers = integers[np.isfinite(integers)]
    return bool(integers.size) and max(int(integers.max()), -int(integers.min())) > EXACT_INTEGERS
