"""Packing: equal operations on parts of a program that repeats, such as the sequences of a batch, become one.

A kernel issues the same instructions for every sequence, head and group of tiles; each of them works on few elements,
so a program spends its time between numpy's calls and not in them. Operations that differ only in where their operands
lie become one operation with an axis more, which steps from one to the next. Where operands are values of their own,
these values become parts of one. Several rounds pack what is packed along further axes.

A packed operation stands where its first member stood: the operands of all members have to be there by then. No element
is computed in another way, so the bytes are the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from simulate.memory import views
from simulate.replay.arena import operands
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import DefUse, Op, Opcode, Value, ValueKind, View
from simulate.replay.fusion.lower import Unlowered
from simulate.replay.fusion.opcodes import Copy, Gather, Matmul, Narrow, Reduce, Select, Ufunc, Widen

_MOST_ELEMENTS = 1 << 18
"""Elements that a packed operation writes: its operands fit a host's second-level cache."""

_LOOKED_AT = 512
"""Operations of a kind among which the members of one are looked for."""

_BROADCASTING = (Ufunc, Select, Copy, Widen, Narrow)


def pack(builder: Builder, results: Collection[int]) -> int:
    """Pack operations; returns how many fewer there are. `results` are storages written once and never read."""
    before = len(builder.ops)
    while _Round(builder, results).run():
        pass
    return before - len(builder.ops)


class _Round:
    """One pass over the operations, in which each is packed along one axis at most."""

    def __init__(self, builder: Builder, results: Collection[int]) -> None:
        self._builder = builder
        self._def_use = DefUse(builder.ops)
        self._places = {id(op): place for place, op in enumerate(builder.ops)}
        self._stores = _stores(builder.ops)
        self._gone: set[int] = set()
        self._kinds = {id(op): _kind(op) for op in builder.ops if _may_be_packed(op, results)}
        self._alike: defaultdict[Any, deque[Op]] = defaultdict(deque)
        for op in builder.ops:
            if id(op) in self._kinds:
                self._alike[self._kinds[id(op)]].append(op)

    def run(self) -> bool:
        """Pack what can be; returns whether there was anything."""
        for leader in self._builder.ops:
            alike = self._alike.get(self._kinds.get(id(leader)))
            if alike is None or id(leader) in self._gone:
                continue
            while alike[0] is not leader:  # packed with an earlier one
                alike.popleft()
            members = self._members(leader, alike)
            if len(members) > 1:
                self._replace(members)
        self._builder.ops = [op for op in self._builder.ops if id(op) not in self._gone]
        return bool(self._gone)

    def _members(self, leader: Op, alike: Iterable[Op]) -> list[Op]:
        """An operation and those behind it that step on from it evenly."""
        size = views.count(leader.writes[0].shape)
        members, steps = [leader], _Steps(leader)
        for op in islice(alike, 1, _LOOKED_AT):
            if (len(members) + 1) * size > _MOST_ELEMENTS:
                break
            if id(op) in self._gone:
                continue
            step = steps.to(op)
            if step is not None and self._may_come_early(op, self._places[id(leader)]):
                members.append(op)
                steps.take(op, step)
            elif len(members) > 1:
                break
        return members

    def _may_come_early(self, op: Op, place: int) -> bool:
        """Whether everything that an operation reads is there before a place."""
        for view in op.reads:
            value = view.value
            if value.kind is ValueKind.memory:
                stores = self._stores.get(id(value.storage), ())
                if any(place <= store < self._places[id(op)] for store in stores):
                    return False
            elif any(
                self._places[id(writer)] >= place and _overlap(view, written)
                for writer in self._def_use.writers(value)
                for written in writer.writes
                if written.value is value
            ):
                return False
        return True

    def _replace(self, members: Sequence[Op]) -> None:
        """Let the first member do the work of all."""
        for slot in range(len(_views(members[0]))):
            self._join([_views(member)[slot].value for member in members])
        leader, second = members[:2]
        dims = len(leader.writes[0].shape)
        opcode = leader.opcode
        steps = [after.offset - before.offset for before, after in zip(_views(leader), _views(second))]
        packed = [
            _stepped(view, len(members), step, dims if isinstance(opcode, _BROADCASTING) else 0)
            for view, step in zip(_views(leader), steps)
        ]
        if isinstance(opcode, Gather):
            packed[1] = leader.reads[0]
        leader.opcode = _with_axis(opcode)
        leader.writes, leader.reads = (packed[0],), tuple(packed[1:])
        for member in members[1:]:
            self._gone.add(id(member))
            member.reads, member.writes = (), ()

    def _join(self, values: Sequence[Value]) -> None:
        """Make separate values parts of one, in this order."""
        if _is_one(values[0], values[1]):
            return
        size = values[0].size
        whole = self._builder.value(ValueKind.buffer, (len(values), *values[0].shape), values[0].dtype)
        for number, value in enumerate(values):
            self._def_use.move(value, whole, number * size)


class _Steps:
    """How the operands of members lie behind each other: a step apart in one value, or at one place of separate ones.

    Members are operations of one kind: the operands of a slot have the same shape, strides, dtype and kind of value.
    """

    def __init__(self, leader: Op) -> None:
        self._count = 1
        self._first = self._last = _views(leader)
        self._steps: Sequence[int | None] | None = None
        self._parts = [{id(view.value)} for view in self._first]

    def to(self, op: Op) -> Sequence[int | None] | None:
        """The step of each operand from the last member to an operation, None of a separate value; None if uneven."""
        steps: list[int | None] = []
        separate: dict[int, int] = {}
        for slot, (view, first) in enumerate(zip(_views(op), self._first)):
            value, whole = view.value, first.value
            if _is_one(value, whole):
                step = view.offset - self._last[slot].offset
                if step < 0 or (step == 0 and slot == 0) or not _may_step(op, slot, step):
                    return None
                steps.append(step)
            else:
                if view.offset != first.offset or id(value) in self._parts[slot]:
                    return None
                if not _may_be_parts(value, whole, self._count + 1):
                    return None
                # A value that stands in two operands of one member has to be the same part for both.
                if separate.setdefault(id(value), id(whole)) != id(whole):
                    return None
                steps.append(None)
            if self._steps is not None and steps[-1] != self._steps[slot]:
                return None
        return steps if len(set(separate.values())) == len(separate) else None

    def take(self, op: Op, steps: Sequence[int | None]) -> None:
        """Let an operation be the last member, which lies these steps behind the one before."""
        self._count += 1
        self._last, self._steps = _views(op), steps
        for parts, view in zip(self._parts, self._last):
            parts.add(id(view.value))


def _stores(ops: Sequence[Op]) -> dict[int, list[int]]:
    """The places at which each storage in memory is written."""
    found: dict[int, list[int]] = {}
    for place, op in enumerate(ops):
        if isinstance(op.opcode, Unlowered):
            written = [tile.storage for tile in operands(op.opcode.plan)]
        else:
            written = [view.value.storage for view in op.writes if view.value.storage is not None]
        for storage in written:
            found.setdefault(id(storage), []).append(place)
    return found


def _may_be_packed(op: Op, results: Collection[int]) -> bool:
    if len(op.writes) != 1:
        return False
    written = op.writes[0].value
    if written.kind is not ValueKind.buffer and id(written.storage) not in results:
        return False
    if isinstance(op.opcode, (Matmul, Reduce, Gather)):
        return True
    return isinstance(op.opcode, _BROADCASTING) and all(
        len(view.shape) <= len(op.writes[0].shape) for view in op.reads
    )


def _kind(op: Op) -> Any:
    """What operations have in common that differ only in where their operands lie."""
    layouts = ((view.shape, view.strides, str(view.value.dtype), view.value.kind) for view in _views(op))
    return op.opcode, *layouts


def _views(op: Op) -> tuple[View, ...]:
    """The result first, then the operands."""
    return (*op.writes, *op.reads)


def _may_step(op: Op, slot: int, step: int) -> bool:
    """Whether an operand may step: what is gathered from is one tensor, and a sum's order of elements stays."""
    view = _views(op)[slot]
    if isinstance(op.opcode, Gather) and slot == 1:
        return step == 0
    if isinstance(op.opcode, Reduce) and slot == 1:
        return all(
            step >= abs(stride) * extent for extent, stride in zip(view.shape, view.strides) if extent > 1
        )
    return True


def _is_one(first: Value, second: Value) -> bool:
    """Whether two values are one, or the bytes of one storage at two times."""
    return first is second or (first.storage is not None and first.storage is second.storage)


def _may_be_parts(value: Value, first: Value, count: int) -> bool:
    """Whether a value and that of the first member may become two of `count` parts of one."""
    are_buffers = value.kind is ValueKind.buffer and first.kind is ValueKind.buffer
    alike = value.shape == first.shape and value.dtype == first.dtype
    return are_buffers and alike and value.size * count <= _MOST_ELEMENTS


def _overlap(first: View, second: View) -> bool:
    (low, high), (start, end) = _span(first), _span(second)
    return low <= end and start <= high


def _span(view: View) -> tuple[int, int]:
    """The first and the last element of a view."""
    low = high = view.offset
    for extent, stride in zip(view.shape, view.strides):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high


def _stepped(view: View, count: int, step: int, dims: int) -> View:
    """A view of `count` views a step apart, along a first axis; each has at least `dims` dims."""
    ones = (1,) * (dims - len(view.shape))
    zeros = (0,) * len(ones)
    return View(view.value, view.offset, (count, *ones, *view.shape), (step, *zeros, *view.strides))


def _with_axis(opcode: Opcode) -> Opcode:
    """The opcode for operands with an axis before theirs."""
    if not isinstance(opcode, Reduce):
        return opcode
    axes = opcode.axes if isinstance(opcode.axes, tuple) else (opcode.axes,)
    moved = tuple(axis + 1 for axis in axes)
    return Reduce(opcode.function, moved if len(moved) > 1 else moved[0], opcode.dtype, opcode.keepdims)
