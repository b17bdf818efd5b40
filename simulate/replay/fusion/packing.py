"""Packing: equal operations that a program repeats, for each sequence of a batch for instance, become one operation.

A kernel issues the same instructions for every sequence, head and group of tiles. Each instruction computes few
elements, so a program spends most of its time on the overhead of numpy's calls. Operations that differ only in the
offsets of their operands become one operation with one more axis, along which the offsets grow evenly. Operands that
are separate values become slices of one value. Further rounds pack packed operations along further axes.

A packed operation replaces its members, and runs when the first one, its leader, ran. So the operands of all members
must be complete by then. A slot is the position of a view in an operation: results first, then operands. Each element
is computed as before, so the bytes are the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from simulate.memory import views
from simulate.replay.arena import list_operands
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import DefUse, Op, Opcode, Value, ValueLocation, View
from simulate.replay.fusion.lower import Unlowered
from simulate.replay.fusion.opcodes import Copy, Gather, Matmul, Narrow, Reduce, Select, Ufunc, Widen

_ELEMENTS_PACKED_MAX = 1 << 18
"""Maximum number of elements that a packed operation writes, so that its operands fit the host's second-level cache."""

_CANDIDATES_MAX = 512
"""Maximum number of operations of equal signature that are tried as members of one packed operation."""

_BROADCASTING = (Ufunc, Select, Copy, Widen, Narrow)


def pack(builder: Builder, results: Collection[int]) -> int:
    """Pack the operations of a program, which changes `builder.ops`; returns by how many their number fell.

    Args:
        builder: The program.
        results: The ids of storages that are written once and never read.
    """
    count_before = len(builder.ops)
    while _Round(builder, results).run():
        pass
    return count_before - len(builder.ops)


class _Round:
    """Pass over a program's operations that packs each of them along at most one axis."""

    def __init__(self, builder: Builder, results: Collection[int]) -> None:
        self._builder = builder
        self._def_use = DefUse(builder.ops)
        self._positions = {id(op): position for position, op in enumerate(builder.ops)}
        self._stores = _find_stores(builder.ops)
        self._removed: set[int] = set()
        self._signatures = {id(op): _build_signature(op) for op in builder.ops if _can_be_packed(op, results)}
        self._ops_by_signature: defaultdict[Any, deque[Op]] = defaultdict(deque)
        for op in builder.ops:
            if id(op) in self._signatures:
                self._ops_by_signature[self._signatures[id(op)]].append(op)

    def run(self) -> bool:
        """Pack all operations that can be packed; returns whether any was packed."""
        for leader in self._builder.ops:
            candidates = self._ops_by_signature.get(self._signatures.get(id(leader)))
            if candidates is None or id(leader) in self._removed:
                continue
            while candidates[0] is not leader:  # packed with an earlier leader
                candidates.popleft()
            members = self._find_members(leader, candidates)
            if len(members) > 1:
                self._replace(members)
        self._builder.ops = [op for op in self._builder.ops if id(op) not in self._removed]
        return bool(self._removed)

    def _find_members(self, leader: Op, candidates: Iterable[Op]) -> list[Op]:
        """Return `leader` and later operations that can be packed with it, in order.

        Args:
            leader: The first member.
            candidates: Operations of equal signature from `leader` on.
        """
        size = views.count(leader.writes[0].shape)
        members, steps = [leader], _Steps(leader)
        for op in islice(candidates, 1, _CANDIDATES_MAX):
            if (len(members) + 1) * size > _ELEMENTS_PACKED_MAX:
                break
            if id(op) in self._removed:
                continue
            step = steps.find_steps(op)
            if step is not None and self._can_come_early(op, self._positions[id(leader)]):
                members.append(op)
                steps.append(op, step)
            elif len(members) > 1:
                break
        return members

    def _can_come_early(self, op: Op, position: int) -> bool:
        """Return whether an operation may run at an earlier position: no operand is written from there on."""
        for view in op.reads:
            value = view.value
            if value.location is ValueLocation.memory:
                stores = self._stores.get(id(value.storage), ())
                if any(position <= store < self._positions[id(op)] for store in stores):
                    return False
            elif any(
                self._positions[id(writer)] >= position and _has_overlap(view, written)
                for writer in self._def_use.get_writers(value)
                for written in writer.writes
                if written.value is value
            ):
                return False
        return True

    def _replace(self, members: Sequence[Op]) -> None:
        """Replace operations by one packed operation, in the place of the first one."""
        for slot in range(len(_list_views(members[0]))):
            self._join([_list_views(member)[slot].value for member in members])
        leader, second = members[:2]
        dims = len(leader.writes[0].shape)
        opcode = leader.opcode
        steps = [
            after.offset - before.offset for before, after in zip(_list_views(leader), _list_views(second))
        ]
        packed = [
            _add_step_axis(view, len(members), step, dims if isinstance(opcode, _BROADCASTING) else 0)
            for view, step in zip(_list_views(leader), steps)
        ]
        if isinstance(opcode, Gather):
            packed[1] = leader.reads[0]
        leader.opcode = _add_axis(opcode)
        leader.writes, leader.reads = (packed[0],), tuple(packed[1:])
        for member in members[1:]:
            self._removed.add(id(member))
            member.reads, member.writes = (), ()

    def _join(self, values: Sequence[Value]) -> None:
        """Make separate values consecutive slices of one new buffer; does nothing if they share bytes already."""
        if _is_same_memory(values[0], values[1]):
            return
        size = values[0].size
        joined = self._builder.add_value(
            ValueLocation.buffer, (len(values), *values[0].shape), values[0].dtype
        )
        for index, value in enumerate(values):
            self._def_use.move(value, joined, index * size)


class _Steps:
    """Steps from member to member of a packed operation, by slot.

    In each slot, members view one value at offsets an even step apart, or separate values at equal offsets. Members
    have equal signatures: the views of a slot have the same shape, strides, dtype and location.
    """

    def __init__(self, leader: Op) -> None:
        self._count = 1
        self._first = self._last = _list_views(leader)
        self._steps: Sequence[int | None] | None = None
        self._slot_values = [{id(view.value)} for view in self._first]

    def find_steps(self, op: Op) -> Sequence[int | None] | None:
        """Return the step in elements of each slot from the last member to an operation.

        A slot with separate values has the step None. Returns None if the operation cannot be the next member.
        """
        steps: list[int | None] = []
        separate: dict[int, int] = {}
        for slot, (view, first) in enumerate(zip(_list_views(op), self._first)):
            value, first_value = view.value, first.value
            if _is_same_memory(value, first_value):
                step = view.offset - self._last[slot].offset
                if step < 0 or (step == 0 and slot == 0) or not _can_step(op, slot, step):
                    return None
                steps.append(step)
            else:
                if view.offset != first.offset or id(value) in self._slot_values[slot]:
                    return None
                if not _can_be_joined(value, first_value, self._count + 1):
                    return None
                # A value in two slots of one member must be the same slice of the joined value in both.
                if separate.setdefault(id(value), id(first_value)) != id(first_value):
                    return None
                steps.append(None)
            if self._steps is not None and steps[-1] != self._steps[slot]:
                return None
        return steps if len(set(separate.values())) == len(separate) else None

    def append(self, op: Op, steps: Sequence[int | None]) -> None:
        """Append an operation as a member, with the steps that `find_steps` returned for it."""
        self._count += 1
        self._last, self._steps = _list_views(op), steps
        for slot_values, view in zip(self._slot_values, self._last):
            slot_values.add(id(view.value))


def _find_stores(ops: Sequence[Op]) -> dict[int, list[int]]:
    """Return the positions of the operations that write each storage, by the storage's id.

    An unlowered instruction counts as a write to every tile that it reads or writes.
    """
    stores_by_storage: dict[int, list[int]] = {}
    for position, op in enumerate(ops):
        if isinstance(op.opcode, Unlowered):
            written = [tile.storage for tile in list_operands(op.opcode.plan)]
        else:
            written = [view.value.storage for view in op.writes if view.value.storage is not None]
        for storage in written:
            stores_by_storage.setdefault(id(storage), []).append(position)
    return stores_by_storage


def _can_be_packed(op: Op, results: Collection[int]) -> bool:
    """Return whether an operation can be packed by its opcode and its result, a buffer or a storage of `results`."""
    if len(op.writes) != 1:
        return False
    written = op.writes[0].value
    if written.location is not ValueLocation.buffer and id(written.storage) not in results:
        return False
    if isinstance(op.opcode, (Matmul, Reduce, Gather)):
        return True
    return isinstance(op.opcode, _BROADCASTING) and all(
        len(view.shape) <= len(op.writes[0].shape) for view in op.reads
    )


def _build_signature(op: Op) -> Any:
    """Return a key that is equal for operations that differ only in the values and offsets of their views."""
    layouts = (
        (view.shape, view.strides, str(view.value.dtype), view.value.location) for view in _list_views(op)
    )
    return op.opcode, *layouts


def _list_views(op: Op) -> tuple[View, ...]:
    """Return the views of an operation by slot: results first, then operands."""
    return (*op.writes, *op.reads)


def _can_step(op: Op, slot: int, step: int) -> bool:
    """Return whether the views of a slot may be `step` elements apart.

    A gathered tensor must be the same for all members. A reduced operand's members must not interleave, so that sums
    keep their order.
    """
    view = _list_views(op)[slot]
    if isinstance(op.opcode, Gather) and slot == 1:
        return step == 0
    if isinstance(op.opcode, Reduce) and slot == 1:
        return all(
            step >= abs(stride) * extent for extent, stride in zip(view.shape, view.strides) if extent > 1
        )
    return True


def _is_same_memory(first: Value, second: Value) -> bool:
    """Return whether two values are one value, or versions of the bytes of one storage."""
    return first is second or (first.storage is not None and first.storage is second.storage)


def _can_be_joined(value: Value, first: Value, count: int) -> bool:
    """Return whether a value and the first member's value may become two of `count` slices of one new buffer."""
    are_buffers = value.location is ValueLocation.buffer and first.location is ValueLocation.buffer
    is_alike = value.shape == first.shape and value.dtype == first.dtype
    return are_buffers and is_alike and value.size * count <= _ELEMENTS_PACKED_MAX


def _has_overlap(first: View, second: View) -> bool:
    """Return whether the ranges of elements that two views of one value touch overlap."""
    (low, high), (start, end) = _compute_span(first), _compute_span(second)
    return low <= end and start <= high


def _compute_span(view: View) -> tuple[int, int]:
    """Return the lowest and the highest element that a view touches."""
    low = high = view.offset
    for extent, stride in zip(view.shape, view.strides):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high


def _add_step_axis(view: View, count: int, step: int, dims: int) -> View:
    """Return one view of `count` views whose offsets are `step` elements apart, along a new first axis.

    Axes of extent 1 follow the new axis until each of the views has at least `dims` dims.
    """
    ones = (1,) * (dims - len(view.shape))
    zeros = (0,) * len(ones)
    return View(view.value, view.offset, (count, *ones, *view.shape), (step, *zeros, *view.strides))


def _add_axis(opcode: Opcode) -> Opcode:
    """Return the opcode for operands with one more first axis: a Reduce with shifted axes, others unchanged."""
    if not isinstance(opcode, Reduce):
        return opcode
    axes = opcode.axes if isinstance(opcode.axes, tuple) else (opcode.axes,)
    shifted_axes = tuple(axis + 1 for axis in axes)
    return Reduce(
        opcode.function,
        shifted_axes if len(shifted_axes) > 1 else shifted_axes[0],
        opcode.dtype,
        opcode.keepdims,
    )
