"""Observation of leftovers: elements of an earlier, larger fill of a tile beyond the end of a later, smaller fill.

A fill is a write of a tile from other tensors. A loop that reuses a tile fills fewer rows or columns of it
for a shorter last block. The bytes of the block before are leftovers. Leftovers are harmless as long as
instructions do not combine them with new bytes. So they are followed from tile to tile, row by row or column
by column, until an instruction combines them or a DMA stores them to HBM. A box is the range (first, end) of
rows and of bytes in a row of a tensor. The detector `stale` reports the reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulate.isa import propagation
from simulate.isa.plan import Contraction, Plan
from simulate.memory import NkiTensor
from simulate.memory.extents import Box, contains, meets
from simulate.run.machine import Issue
from simulate.run.stream import Line

_ROWS = 0
"""Axis of the partitions in a box."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Box of a tensor that an earlier fill wrote beyond the end of a later fill, which begins at the same element.

    `axis` is the axis of the box along which the later fill is shorter: 0 for rows (partitions), 1 for bytes
    of a row.
    """

    box: Box
    axis: int
    old: tuple[int, int]
    """Event and tensor of the earlier fill."""
    new: tuple[int, int]
    """Event and tensor of the later fill."""


@dataclass(frozen=True, slots=True)
class StaleRead:
    """Read that combines leftovers with new bytes, or stores them to HBM: its event, its tensor and the leftover."""

    event: int
    tensor: int
    leftover: Leftover


@dataclass
class Leftovers:
    """Leftovers in the tiles of one core now, and all reads so far that combined or stored some."""

    reads: list[StaleRead] = field(default_factory=list)
    _fills: dict[int, dict[tuple[Any, ...], tuple[int, Box]]] = field(default_factory=dict)
    """Last fill and its box that no other write has covered, by tensor and by line or source."""
    _leftovers: dict[int, list[Leftover]] = field(default_factory=dict)  # by tensor
    _readers: dict[int, dict[tuple[Line, Box], int]] = field(default_factory=dict)
    """Last event that read a box of a tensor, by tensor and by line and box."""
    _carried: list[tuple[int, Leftover]] = field(default_factory=list)
    """Tensors and leftovers that the running instruction produces."""

    def before(self, event: int, line: Line, issue: Issue, operands: Sequence[Any]) -> None:
        """Append reads that combine or store leftovers to `reads`; remember which results receive other leftovers.

        Args:
            event: The event that is about to execute.
            line: The line of the kernel that issues it.
            issue: The plan, its reads and its writes.
            operands: The values of the operands.
        """
        self._carried.clear()
        plan, reads, writes = issue
        for number, tile in enumerate(reads):
            box, serial = _get_enclosing_box(tile), tile.storage.serial
            if box is None:
                continue
            last = -1
            if serial in self._fills:
                readers = self._readers.setdefault(serial, {})
                last = readers.get((line, box), -1)
                readers[line, box] = event
            for leftover in self._leftovers.get(serial, ()):
                if not meets(box, leftover.box):
                    continue
                # A read of old bytes only is intended, unless this line has read them in an earlier iteration.
                if _is_beyond(box, leftover) and last < leftover.old[0]:
                    continue
                if self._is_joined(plan, writes, number, leftover, reads, operands):
                    self.reads.append(StaleRead(event, tile.storage.serial, leftover))
                else:
                    self._carry(plan, number, tile, box, writes, leftover)

    def after(self, event: int, line: Line, issue: Issue, is_masked: bool) -> None:
        """Update the leftovers that results cover, create by a shorter fill, or receive as a copy.

        Args:
            event: The event that has executed.
            line: The line of the kernel that issued it.
            issue: The plan, its reads and its writes.
            is_masked: Whether a mask of Beta 1 leaves elements of the result unchanged, so that nothing is
                covered.
        """
        plan, reads, writes = issue
        sources = {tile.storage.serial for tile in reads}
        for tile in writes:
            serial = tile.storage.serial
            exact = tile.layout.boxes[0] if tile.dynamic is None and not is_masked else None
            if exact is None or not tile.buffer.on_chip:
                continue
            if serial in self._leftovers:
                self._remove_covered(serial, exact)
            is_fill = bool(reads) and serial not in sources and plan.accumulate is None
            keys = _build_keys(line, plan, reads) if is_fill else []
            if keys:
                self._add_fill(event, keys, serial, exact)
            for key, (filled, box) in list(self._fills.get(serial, {}).items()):
                remaining = box if key in keys else _subtract_box(box, exact)
                if remaining is None:
                    del self._fills[serial][key]
                elif remaining != box:
                    self._fills[serial][key] = filled, remaining
        for serial, leftover in self._carried:
            self._leftovers.setdefault(serial, []).append(leftover)

    def _add_fill(self, event: int, keys: list[tuple[Any, ...]], serial: int, exact: Box) -> None:
        boxes_beyond: set[tuple[Box, int, int]] = set()
        fills = self._fills.setdefault(serial, {})
        for key in keys:
            earlier = fills.get(key)
            if earlier is not None:
                boxes_beyond |= {
                    (box, axis, earlier[0]) for box, axis in _find_boxes_beyond(earlier[1], exact)
                }
            fills[key] = event, exact
        for box, axis, old in sorted(boxes_beyond):
            leftover = Leftover(box, axis, (old, serial), (event, serial))
            self._leftovers.setdefault(serial, []).append(leftover)

    def _remove_covered(self, serial: int, exact: Box) -> None:
        kept = []
        for leftover in self._leftovers[serial]:
            remaining = _subtract_box(leftover.box, exact)
            if remaining is not None:
                kept.append(Leftover(remaining, leftover.axis, leftover.old, leftover.new))
        if kept:
            self._leftovers[serial] = kept
        else:
            del self._leftovers[serial]

    def _is_joined(
        self,
        plan: Plan,
        writes: Sequence[NkiTensor],
        number: int,
        leftover: Leftover,
        reads: Sequence[NkiTensor],
        operands: Sequence[Any],
    ) -> bool:
        if plan.effects.copies:
            return any(not tile.buffer.on_chip for tile in writes)
        joins = plan.effects.contraction
        if leftover.axis != _ROWS:
            return joins is Contraction.columns
        if joins is Contraction.rows:
            return True
        if joins is not Contraction.products or len(reads) != 2 or len(operands) != 2:
            return False
        first, end = leftover.box[_ROWS]
        return all(_has_nonzero_rows(operand, reads[number], first, end) for operand in operands)

    def _carry(
        self,
        plan: Plan,
        number: int,
        tile: NkiTensor,
        box: Box,
        writes: Sequence[NkiTensor],
        leftover: Leftover,
    ) -> None:
        """Append to `_carried` the leftovers of results that keep the rows or the element order of an operand.

        Args:
            plan: The plan of the instruction.
            number: The index of the operand among the reads.
            tile: The operand.
            box: The box that encloses the operand.
            writes: The results.
            leftover: The leftover in the operand.
        """
        for result in writes:
            target = _get_enclosing_box(result)
            if target is None or not result.buffer.on_chip:
                continue
            moved = None
            product = plan.effects.contraction is Contraction.products and len(plan.reads) == 2
            if product and leftover.axis != _ROWS and number == 1:
                if len(box) == len(target) == 2:
                    moved = _move_leftover(
                        box, target, leftover, 1, tile.dtype.itemsize, result.dtype.itemsize
                    )
            elif plan.propagate is propagation.transposed or (product and leftover.axis != _ROWS):
                moved = _transpose_leftover(tile, box, result, target, leftover)
            elif leftover.axis == _ROWS and result.shape[0] == tile.shape[0]:
                if plan.effects.contraction is not Contraction.products:
                    moved = _move_leftover(box, target, leftover, _ROWS, 1, 1)
            elif result.shape == tile.shape and len(box) == len(target) == 2:
                widths = tile.dtype.itemsize, result.dtype.itemsize
                moved = _move_leftover(box, target, leftover, leftover.axis, *widths)
            if moved is not None:
                self._carried.append((result.storage.serial, moved))


def _build_keys(line: Line, plan: Plan, reads: Sequence[NkiTensor]) -> list[tuple[Any, ...]]:
    """Return the keys under which fills of one loop are compared: their line, and for a DMA also its source."""
    keys: list[tuple[Any, ...]] = [("line", id(line[0]), line[1])]
    if plan.effects.copies:
        keys.append(("source", reads[0].storage.serial))
    return keys


def _get_enclosing_box(tile: NkiTensor) -> Box | None:
    return tile.layout.boxes[1] if tile.dynamic is None else None


def _is_beyond(box: Box, leftover: Leftover) -> bool:
    """Return whether a box that is read begins beyond the end of the later fill, so that all its bytes are old."""
    return box[leftover.axis][0] >= leftover.box[leftover.axis][0]


def _find_boxes_beyond(old: Box, new: Box) -> list[tuple[Box, int]]:
    """Return (box, axis) for the part of an earlier fill beyond the end of a later fill along each axis.

    Empty unless both fills begin at the same element and the earlier one contains the later one.
    """
    same_start = all(old_span[0] == new_span[0] for old_span, new_span in zip(old, new))
    if not same_start or not contains(old, new):
        return []
    return [
        ((*old[:axis], (stop, end), *old[axis + 1 :]), axis)
        for axis, ((_, end), (_, stop)) in enumerate(zip(old, new))
        if stop < end
    ]


def _subtract_box(box: Box, exact: Box) -> Box | None:
    """Return a box without the elements of another box, None if nothing remains.

    The box is returned unchanged if the two do not overlap or the difference is not a box.
    """
    if not meets(box, exact):
        return box
    uncovered_axes = [
        axis
        for axis, (span, exact_span) in enumerate(zip(box, exact))
        if span[0] < exact_span[0] or exact_span[1] < span[1]
    ]
    if not uncovered_axes:
        return None
    axis = uncovered_axes[0]
    (first, end), (start, stop) = box[axis], exact[axis]
    if len(uncovered_axes) > 1 or (start > first and stop < end):
        return box
    return (*box[:axis], (stop, end) if start <= first else (first, start), *box[axis + 1 :])


def _move_leftover(
    box: Box, target: Box, leftover: Leftover, axis: int, width: int, new_width: int
) -> Leftover:
    """Return a leftover at the same elements of a result along one axis; it spans the result along the other axes.

    Args:
        box: The box of the operand.
        target: The box of the result.
        leftover: The leftover in the operand.
        axis: The axis along which elements keep their order.
        width: Units of the axis for each element of the operand: 1 row, or the bytes of an element.
        new_width: The same for the result.
    """
    first = max(leftover.box[axis][0], box[axis][0]) - box[axis][0]
    end = min(leftover.box[axis][1], box[axis][1]) - box[axis][0]
    start = target[axis][0]
    moved = (start + first * new_width // width, start + end * new_width // width)
    return Leftover((*target[:axis], moved, *target[axis + 1 :]), axis, leftover.old, leftover.new)


def _transpose_leftover(
    tile: NkiTensor, box: Box, result: NkiTensor, target: Box, leftover: Leftover
) -> Leftover | None:
    """Return the leftover of a transposed result, whose axis is the other one; None if a box does not have two dims.

    A box is a range of rows and one of bytes in a row. The leftover's range along its axis, as far as it is inside of
    `box`, is converted from rows to bytes or from bytes to rows. Along the other axis the new box is that of `target`.

    Args:
        tile: The operand; only the size of its elements counts.
        box: The box of the operand.
        result: The result; only the size of its elements counts.
        target: The box of the result.
        leftover: The leftover in the operand.
    """
    if len(box) != 2 or len(target) != 2:
        return None
    axis = leftover.axis
    unit = 1 if axis == _ROWS else tile.dtype.itemsize
    new_unit = result.dtype.itemsize if axis == _ROWS else 1
    other = 1 - axis
    first = (max(leftover.box[axis][0], box[axis][0]) - box[axis][0]) // unit
    end = (min(leftover.box[axis][1], box[axis][1]) - box[axis][0]) // unit
    start = target[other][0]
    moved = [*target]
    moved[other] = (start + first * new_unit, start + end * new_unit)
    return Leftover(tuple(moved), other, leftover.old, leftover.new)


def _has_nonzero_rows(operand: np.ndarray, source: NkiTensor, first: int, end: int) -> bool:
    """Return whether an operand of a product has a nonzero element in the partitions of a leftover.

    Args:
        operand: The values of the operand.
        source: The view of the operand.
        first: First partition of the leftover in the tensor of `source`.
        end: Partition after its last one.
    """
    offset = source.layout.rows[0]
    rows = operand[max(first - offset, 0) : max(end - offset, 0)]
    return bool(np.any(rows))
