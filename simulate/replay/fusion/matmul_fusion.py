"""Fusion of matmuls: each accumulation group into one, then matmuls of adjacent columns, then of adjacent rows.

A kernel multiplies tiles of 128 by 128 by 512 because the systolic array has that size. Without the copies, the
operands are mostly adjacent blocks of two large matrices, and one matmul of these matrices is faster. If the blocks of
only one operand are adjacent, copies concatenate the blocks of the other. Fusion changes only the order of the float32
sums: each product and each sum is still float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulate.numerics.dtypes import float32
from simulate.replay.fusion.accumulation_groups import fuse_accumulation_groups
from simulate.replay.fusion.builder import Builder, identify
from simulate.replay.fusion.concatenation import Order, concatenate_views, join_views, split_view
from simulate.replay.fusion.graph import DefUse, Op, ValueLocation, View
from simulate.replay.fusion.opcodes import Matmul


def fuse_matmuls(builder: Builder) -> int:
    """Fuse the matmuls of a program, which changes `builder.ops`; returns by how many their number fell."""
    count_before = sum(isinstance(op.opcode, Matmul) for op in builder.ops)
    fuse_accumulation_groups(builder)
    _fuse_adjacent(builder, shared=0, axis=1)
    _fuse_adjacent(builder, shared=1, axis=0)
    return count_before - sum(isinstance(op.opcode, Matmul) for op in builder.ops)


def _fuse_adjacent(builder: Builder, shared: int, axis: int) -> None:
    """Fuse matmuls that share an operand and whose other operands are adjacent along an axis, or all interleaved.

    Args:
        builder: The program, whose operations are changed.
        shared: The position of the shared operand: 0 for the left one, 1 for the right one.
        axis: The position of the other operand, and the axis along which it is concatenated: 1 or 0.
    """
    def_use = DefUse(builder.ops)
    groups: dict[Any, list[Op]] = {}
    for op in builder.ops:
        if isinstance(op.opcode, Matmul):
            key = identify(op.reads[shared]), op.reads[axis].value.number
            groups.setdefault(key, []).append(op)
    removed: set[int] = set()
    for members in groups.values():
        members.sort(key=lambda op: op.reads[axis].offset)
        views = [op.reads[axis] for op in members]
        interleaved = concatenate_views(views, axis, Order.interleaved)
        if interleaved is not None and find_issue_point(members, def_use) is not None:
            removed |= _fuse_run(builder, members, interleaved, shared, axis, Order.interleaved, def_use)
            continue
        run: list[Op] = []
        operand: View | None = None
        for op in members:
            longer = None if operand is None else join_views(operand, op.reads[axis], axis)
            if longer is None or find_issue_point([*run, op], def_use) is None:
                removed |= _fuse_run(builder, run, operand, shared, axis, Order.one_after_other, def_use)
                run, operand = [op], op.reads[axis]
            else:
                run, operand = [*run, op], longer
        removed |= _fuse_run(builder, run, operand, shared, axis, Order.one_after_other, def_use)
    builder.ops = sorted((op for op in builder.ops if id(op) not in removed), key=lambda op: op.sequence)


def find_issue_point(run: Sequence[Op], def_use: DefUse) -> float | None:
    """Return the sequence number of the first matmul of `run` at which one matmul may replace all of them.

    All operands must be ready by then, and no result read yet. Returns None if there is no such matmul.
    """
    ready = max((_find_ready(view, def_use) for op in run for view in op.reads), default=-1.0)
    first_read = min(
        (reader.sequence for op in run for reader in def_use.get_readers(op.writes[0].value)), default=1e18
    )
    for op in sorted(run, key=lambda op: op.sequence):
        if ready < op.sequence < first_read:
            return op.sequence
    return None


def _find_ready(view: View, def_use: DefUse) -> float:
    """Return the sequence number after which all elements of a view's value are written."""
    return max([view.value.ready, *(op.sequence for op in def_use.get_writers(view.value))])


def _fuse_run(
    builder: Builder,
    run: Sequence[Op],
    operand: View | None,
    shared: int,
    axis: int,
    order: Order,
    def_use: DefUse,
) -> set[int]:
    """Replace matmuls by one matmul with a concatenated operand; their results become views of its result.

    Args:
        builder: The program.
        run: The matmuls, in the order of concatenation; nothing happens for fewer than two.
        operand: The concatenated operand; nothing happens for None.
        shared: The position of the operand that all of them share.
        axis: The axis of concatenation.
        order: How the operands are concatenated.
        def_use: The index of the program's operations, which is updated.

    Returns:
        The ids of the operations that the caller has to remove; empty if the matmuls cannot be fused.
    """
    if len(run) < 2 or operand is None:
        return set()
    issue_sequence = find_issue_point(run, def_use)
    assert issue_sequence is not None
    operands = [operand, operand]
    operands[shared] = run[0].reads[shared]
    shape = (operands[0].shape[0], operands[1].shape[1])
    result = builder.add_value(ValueLocation.buffer, shape, float32)
    extents = [op.writes[0].shape[axis] for op in run]
    member_views = list(zip(run, split_view(View.full(result), extents, axis, order)))
    if not all(def_use.can_substitute(op.writes[0].value, view) for op, view in member_views):
        return set()
    for op, view in member_views:
        def_use.substitute(op.writes[0].value, view)
    fused = next(op for op in run if op.sequence == issue_sequence)
    fused.reads, fused.writes = tuple(operands), (View.full(result),)
    result.ready = int(issue_sequence)
    return {id(op) for op in run if op is not fused}
