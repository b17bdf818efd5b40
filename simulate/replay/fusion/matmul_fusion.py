"""Fusing matmuls: an accumulation group into one, then matmuls of adjacent columns, then of adjacent rows.

A kernel multiplies tiles of 128 by 128 by 512 because the systolic array has that size. Without the copies, the
operands are mostly adjacent parts of two large matrices, and one matmul of those computes the same faster. Where only
one operand's parts are adjacent, copies concatenate the others. Fusion changes the order of the float32 sums and
nothing else: each product and each sum is still float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulate.numerics.dtypes import float32
from simulate.replay.fusion.accumulation_groups import fuse_accumulation_groups
from simulate.replay.fusion.builder import Builder, identity
from simulate.replay.fusion.concatenation import Order, concatenated_view, concatenated_views, parts_of
from simulate.replay.fusion.graph import DefUse, Op, ValueKind, View
from simulate.replay.fusion.opcodes import Matmul


def fuse_matmuls(builder: Builder) -> int:
    """Fuse matmuls; returns how many fewer there are."""
    before = sum(isinstance(op.opcode, Matmul) for op in builder.ops)
    fuse_accumulation_groups(builder)
    _fuse_adjacent(builder, shared=0, axis=1)
    _fuse_adjacent(builder, shared=1, axis=0)
    return before - sum(isinstance(op.opcode, Matmul) for op in builder.ops)


def _fuse_adjacent(builder: Builder, shared: int, axis: int) -> None:
    """Fuse matmuls with one operand in common whose other operands are adjacent, or all interleaved."""
    def_use = DefUse(builder.ops)
    groups: dict[Any, list[Op]] = {}
    for op in builder.ops:
        if isinstance(op.opcode, Matmul):
            key = identity(op.reads[shared]), op.reads[axis].value.number
            groups.setdefault(key, []).append(op)
    removed: set[int] = set()
    for members in groups.values():
        members.sort(key=lambda op: op.reads[axis].offset)
        views = [op.reads[axis] for op in members]
        interleaved = concatenated_views(views, axis, Order.interleaved)
        if interleaved is not None and issue_point(members, def_use) is not None:
            removed |= _fuse_run(builder, members, interleaved, shared, axis, Order.interleaved, def_use)
            continue
        run: list[Op] = []
        operand: View | None = None
        for op in members:
            longer = None if operand is None else concatenated_view(operand, op.reads[axis], axis)
            if longer is None or issue_point([*run, op], def_use) is None:
                removed |= _fuse_run(builder, run, operand, shared, axis, Order.one_after_other, def_use)
                run, operand = [op], op.reads[axis]
            else:
                run, operand = [*run, op], longer
        removed |= _fuse_run(builder, run, operand, shared, axis, Order.one_after_other, def_use)
    builder.ops = sorted((op for op in builder.ops if id(op) not in removed), key=lambda op: op.sequence)


def issue_point(run: Sequence[Op], def_use: DefUse) -> float | None:
    """The sequence number of a member where all operands of a run are ready and no result is read yet, if any."""
    ready = max((_ready(view, def_use) for op in run for view in op.reads), default=-1.0)
    wanted = min(
        (reader.sequence for op in run for reader in def_use.readers(op.writes[0].value)), default=1e18
    )
    for op in sorted(run, key=lambda op: op.sequence):
        if ready < op.sequence < wanted:
            return op.sequence
    return None


def _ready(view: View, def_use: DefUse) -> float:
    return max([view.value.ready, *(op.sequence for op in def_use.writers(view.value))])


def _fuse_run(
    builder: Builder,
    run: Sequence[Op],
    operand: View | None,
    shared: int,
    axis: int,
    order: Order,
    def_use: DefUse,
) -> set[int]:
    """Replace a run of matmuls by one; returns the ids of the operations that go."""
    if len(run) < 2 or operand is None:
        return set()
    place = issue_point(run, def_use)
    assert place is not None
    operands = [operand, operand]
    operands[shared] = run[0].reads[shared]
    shape = (operands[0].shape[0], operands[1].shape[1])
    result = builder.value(ValueKind.buffer, shape, float32)
    extents = [op.writes[0].shape[axis] for op in run]
    parts = list(zip(run, parts_of(View.whole(result), extents, axis, order)))
    if not all(def_use.can_substitute(op.writes[0].value, part) for op, part in parts):
        return set()
    for op, part in parts:
        def_use.substitute(op.writes[0].value, part)
    fused = next(op for op in run if op.sequence == place)
    fused.reads, fused.writes = tuple(operands), (View.whole(result),)
    result.ready = int(place)
    return {id(op) for op in run if op is not fused}
