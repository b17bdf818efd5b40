"""Observation of arithmetic that is legal and rarely meant, recognised by its operands and results.

A plan, which describes how an instruction computes, does not name its operator. The operator is recognised by
its result, which equals the sum, the maximum or the logical shift of the operands in all elements. The
detector `arithmetic` reports the notes that are gathered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from simulate.check.notes import Note
from simulate.isa import propagation
from simulate.isa.plan import Domain, Plan, RandomUse
from simulate.memory import NkiTensor
from simulate.memory.layout import Layout
from simulate.numerics.quiet import quiet
from simulate.run.machine import Issue

_MIN_ELEMENTS = 8
"""Smallest number of elements of which a share is computed."""
_MAX_ABSORBED_SHARE = 0.875
"""Share of unchanged sums above which a sum counts as absorbed; about half of the sums of random data do not change."""
_LONG_SUM = 32
"""Number of additions, each rounded to 16 bits, whose errors may add up to 16 units in the last place."""
_BIT_PATTERN = 2**24
"""Magnitude from which on integers are taken for bit patterns, hashes or random numbers."""
_NEARLY = 1e-3
"""Distance to an integer within which a quotient is meant to be that integer."""


@dataclass
class Arithmetic:
    """Observed arithmetic of one core: notes by kind, and what is remembered of its tiles and seeds to make them."""

    wrong_identity: list[Note] = field(default_factory=list)
    absorbed: list[Note] = field(default_factory=list)
    long_sums: list[Note] = field(default_factory=list)
    logical_shifts: list[Note] = field(default_factory=list)
    inverted_masks: list[Note] = field(default_factory=list)
    rounded_indices: list[Note] = field(default_factory=list)
    reinterpreted: list[Note] = field(default_factory=list)
    repeated_seeds: list[Note] = field(default_factory=list)
    seeds: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Event that set a seed, and its tensor, by the digest of the seed; only seeds with draws after them."""
    _additions: dict[int, dict[Layout, int]] = field(default_factory=dict)
    """Number of in-place additions in 16 bits, by tensor and view, since another instruction accessed the tensor."""
    _zeros: set[int] = field(default_factory=set)
    """Tiles that a memset filled with zeros."""
    _rounded_up: dict[int, Note] = field(default_factory=dict)
    _written_as: dict[int, set[str]] = field(default_factory=dict)
    _pending_seed: tuple[int, int, int] | None = None
    _copies: list[np.ndarray] | None = None
    _starts_at_zero: tuple[bool, ...] = ()
    _adds: bool = False
    """Whether the running instruction was counted in `_additions`."""

    def before(self, event: int, issue: Issue, operands: Sequence[Any]) -> None:
        """Copy operands that the result overwrites; note reinterpreted bytes and rounded run-time indices."""
        plan, reads, writes = issue
        self._copies = None
        self._adds = False
        if len(operands) != len(reads) or plan.rendezvous is not None:
            return
        written = {tile.storage.serial for tile in writes}
        plain = all(isinstance(operand, np.ndarray) for operand in operands)
        if (
            plain
            and plan.propagate is propagation.elementwise
            and written & {t.storage.serial for t in reads}
        ):
            self._copies = [np.array(operand) for operand in operands]
        self._starts_at_zero = tuple(tile.storage.serial in self._zeros for tile in reads)
        for tile in (*reads, *writes):
            if tile.dynamic is not None:
                note = self._rounded_up.get(tile.dynamic.index.storage.serial)
                if note is not None and note not in self.rounded_indices:
                    self.rounded_indices.append(note)
        if plan.domain is Domain.float32:
            for tile in reads:
                self._observe_reinterpretation(event, tile)

    @quiet
    def after(self, event: int, issue: Issue, operands: Sequence[Any]) -> None:
        """Recognise operators by the results and append notes on faults.

        What later instructions need is recorded: tiles of zeros, dtypes of writes, and integers that a cast
        rounded up.
        """
        plan, reads, writes = issue
        if len(operands) != len(reads) or plan.rendezvous is not None:
            return
        self._observe_random(event, issue, operands)
        values = self._copies or operands
        elementwise = plan.propagate is propagation.elementwise and plan.state is None and len(writes) == 1
        if (
            elementwise
            and writes[0].dynamic is None
            and all(isinstance(operand, np.ndarray) for operand in values)
        ):
            if plan.domain is Domain.bits:
                self._observe_bitwise(event, writes[0], reads, values)
            elif len(reads) == 2 and values[0].size == values[1].size == writes[0].size:
                self._observe_accumulation(event, plan, reads, writes[0], values)
        self._trace_rounding(event, issue, values)
        self._trace(plan, reads, writes)

    def _observe_bitwise(
        self, event: int, tile: NkiTensor, reads: Sequence[NkiTensor], values: Sequence[np.ndarray]
    ) -> None:
        dtype, source = tile.dtype.storage, reads[0]
        if dtype.kind not in "iu" or values[0].dtype != dtype or source.storage.dtype.is_float:
            return
        first, result = values[0].reshape(tile.shape), tile.array
        serial = tile.storage.serial
        if 0 < int(first.max(initial=0)) <= 1 and int(first.min(initial=0)) >= 0:
            if np.array_equal(result, ~first):
                seen = f"{tile.size} elements of a mask of 0 and 1 become {int(~first.max())} and {int(~first.min())}"
                self.inverted_masks.append(Note(event, serial, seen))
            return
        negative = first < 0
        if (
            not negative.any()
            or (result[negative] < 0).any()
            or int(np.abs(first.astype(np.int64)).max()) >= _BIT_PATTERN
        ):
            return
        unsigned = first.view(np.dtype(f"u{dtype.itemsize}"))
        for count in range(1, 8 * dtype.itemsize - 1):
            if np.array_equal(result, (unsigned >> np.array(count, unsigned.dtype)).view(dtype)):
                example = int(first[negative].flat[0])
                seen = f"{int(negative.sum())} negative integers are shifted right by {count} and become positive"
                seen += f", for example {example} becomes {int(result[negative].flat[0])}"
                self.logical_shifts.append(Note(event, serial, seen))
                return

    def _observe_accumulation(
        self,
        event: int,
        plan: Plan,
        reads: Sequence[NkiTensor],
        tile: NkiTensor,
        values: Sequence[np.ndarray],
    ) -> None:
        for number, (read, start) in enumerate(zip(reads, self._starts_at_zero)):
            in_place = read.storage is tile.storage and read.layout is tile.layout
            if not in_place and not (start and tile.free_size == 1):
                continue
            old, other = values[number].reshape(tile.shape), values[1 - number].reshape(tile.shape)
            if not (start or (in_place and tile.dtype.itemsize == 2 and tile.dtype.is_float)):
                continue
            exact = np.asarray(plan.compute(*values)[0]).reshape(tile.shape)
            if start and not old.any():
                self._note_identity(event, tile, other, exact)
                if (
                    in_place
                    and tile.dtype.itemsize == 2
                    and tile.dtype.is_float
                    and np.array_equal(exact, other)
                ):
                    self._count_addition(event, tile, bool(other.any()))
            elif in_place and np.array_equal(exact, old + other):
                self._count_addition(event, tile, bool(other.any()))
                lost = (tile.array.astype(np.float32) == old) & (other != 0)
                added = int((other != 0).sum())
                if added >= _MIN_ELEMENTS and int(lost.sum()) > _MAX_ABSORBED_SHARE * added:
                    seen = (
                        f"{int(lost.sum())} of {added} sums equal the old {tile.dtype} element, for example "
                    )
                    seen += f"{float(old[lost].flat[0]):g} + {float(other[lost].flat[0]):g}"
                    self.absorbed.append(Note(event, tile.storage.serial, seen))
            return

    def _count_addition(self, event: int, tile: NkiTensor, changes: bool) -> None:
        """Count an in-place addition to a 16-bit view; add a note to `long_sums` at the 32nd addition.

        Args:
            event: The event of the addition.
            tile: The view.
            changes: Whether any added element is not zero; other additions are not counted.
        """
        self._adds = True
        counts = self._additions.setdefault(tile.storage.serial, {})
        counts[tile.layout] = counts.get(tile.layout, 0) + changes
        if changes and counts[tile.layout] == _LONG_SUM:
            seen = f"{_LONG_SUM} additions one after the other are each rounded to {tile.dtype}"
            self.long_sums.append(Note(event, tile.storage.serial, seen))

    def _note_identity(self, event: int, tile: NkiTensor, other: np.ndarray, exact: np.ndarray) -> None:
        name = ""
        if (other < 0).any() and np.array_equal(exact, np.maximum(other, 0)):
            name, count = "maximum", int((other < 0).sum())
        elif (other > 0).any() and np.array_equal(exact, np.minimum(other, 0)):
            name, count = "minimum", int((other > 0).sum())
        elif other.any() and not exact.any():
            name, count = "product", int((other != 0).sum())
        if name:
            seen = f"a {name} is accumulated onto zeros, which replace {count} of {tile.size} elements"
            self.wrong_identity.append(Note(event, tile.storage.serial, seen))

    def _trace_rounding(self, event: int, issue: Issue, values: Sequence[Any]) -> None:
        """Record tensors with integers that a cast rounded up, and tensors computed from them.

        `before` turns the record into a note once such a tensor is a run-time index.
        """
        plan, reads, writes = issue
        inherited = next(
            (self._rounded_up[t.storage.serial] for t in reads if t.storage.serial in self._rounded_up), None
        )
        for number, tile in enumerate(writes):
            serial = tile.storage.serial
            self._rounded_up.pop(serial, None)
            if not (tile.dtype.is_integer and tile.dtype.itemsize >= 2 and tile.dynamic is None):
                continue
            if inherited is not None:
                self._rounded_up[serial] = inherited
            elif (
                plan.domain is Domain.float32
                and plan.state is None
                and not all(t.dtype.is_integer for t in reads)
            ):
                exact = np.asarray(plan.compute(*values)[number], np.float64)
                fraction = exact - np.floor(exact)
                up = (np.rint(exact) > exact) & (fraction < 1 - _NEARLY)
                # Quotients contain exact integers. Numbers from which a half was subtracted, so that rounding
                # truncates, contain none.
                if up.any() and (fraction == 0).any():
                    seen = f"{int(up.sum())} of {tile.size} numbers are rounded up, for example "
                    seen += f"{float(exact[up].flat[0]):g}, and become a run-time index"
                    self._rounded_up[serial] = Note(event, serial, seen)

    def _observe_reinterpretation(self, event: int, tile: NkiTensor) -> None:
        dtypes = self._written_as.get(tile.storage.serial)
        dtype = str(tile.dtype)
        if not dtypes or dtype in dtypes or tile.dtype.is_packed or tile.dtype.itemsize == 1:
            return
        floats = {
            name for name in dtypes if name.startswith(("float", "bfloat", "tfloat")) and "8" not in name
        }
        truncates = "float32" in floats and dtype in ("bfloat16", "tfloat32")
        if floats == dtypes and not truncates and tile.dtype.is_float and dtype != "tfloat32":
            seen = f"read as {dtype}, while its bits were written as {', '.join(sorted(dtypes))}"
            self.reinterpreted.append(Note(event, tile.storage.serial, seen))

    def _trace(self, plan: Plan, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]) -> None:
        if self._additions and not self._adds:
            for tile in (*reads, *writes):
                self._additions.pop(tile.storage.serial, None)
        for tile in writes:
            serial = tile.storage.serial
            if (
                not reads
                and tile.dtype.is_float
                and tile.covers_storage
                and not tile.dtype.is_packed
                and not tile.array.any()
            ):
                self._zeros.add(serial)
            else:
                self._zeros.discard(serial)
            if tile.buffer.on_chip:
                dtypes = {str(tile.dtype)}
                self._written_as[serial] = (
                    dtypes if tile.covers_storage else dtypes | self._written_as.get(serial, set())
                )

    def _observe_random(self, event: int, issue: Issue, operands: Sequence[Any]) -> None:
        plan, reads, _ = issue
        use = plan.effects.random
        if use is RandomUse.draws and self._pending_seed is not None:
            digest, setter, tensor = self._pending_seed
            self.seeds.setdefault(digest, (setter, tensor))
            self._pending_seed = None
        elif use is RandomUse.seeds and operands:
            digest = crc32(np.ascontiguousarray(operands[0]).tobytes())
            serial = reads[0].storage.serial
            if digest in self.seeds:
                self.repeated_seeds.append(
                    Note(event, serial, "the seed of an earlier sequence is set again")
                )
            self._pending_seed = digest, event, serial
