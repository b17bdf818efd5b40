"""Fusing matmuls: an accumulation group into one, then matmuls of adjacent columns, then of adjacent rows.

A kernel multiplies tiles of 128 by 128 by 512 because the systolic array has that size. Without the copies, the
operands are mostly adjacent parts of two large matrices, and one matmul of those computes the same faster. Where only
one operand's parts are adjacent, copies concatenate the others. Fusion changes the order of the float32 sums and
nothing else: each product and each sum is still float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulate.numerics.dtypes import float32
from simulate.replay.fusion.builder import Builder, identity
from simulate.replay.fusion.graph import DefUse, Op, Value, ValueKind, View
from simulate.replay.fusion.opcodes import Copy, Matmul, Ufunc

_MULTIPLICATIONS_PER_COPY_MIN = 8
"""An element is copied to fuse matmuls if the copy enters at least so many multiplications."""


def fuse_matmuls(builder: Builder) -> int:
    """Fuse matmuls; returns how many fewer there are."""
    before = sum(isinstance(op.opcode, Matmul) for op in builder.ops)
    _fuse_accumulation_groups(builder)
    _fuse_adjacent(builder, shared=0, axis=1)
    _fuse_adjacent(builder, shared=1, axis=0)
    return before - sum(isinstance(op.opcode, Matmul) for op in builder.ops)


def concatenated_view(first: View, second: View, axis: int) -> View | None:
    """The view of two views that are adjacent along an axis; None if they are not."""
    if first.value is not second.value:
        return None
    step = second.offset - first.offset
    extent = first.shape[axis]
    if step % extent:
        return None
    stride = step // extent
    for dim in range(len(first.shape)):
        pair = {view.strides[dim] for view in (first, second) if view.shape[dim] > 1}
        if dim == axis:
            if not pair <= {stride}:
                return None
        elif first.shape[dim] != second.shape[dim] or len(pair) > 1:
            return None
    shape = list(first.shape)
    shape[axis] += second.shape[axis]
    strides = list(first.strides)
    strides[axis] = stride
    return View(first.value, first.offset, tuple(shape), tuple(strides))


def _concatenated_views(views: Sequence[View], axis: int) -> View | None:
    operand: View | None = views[0]
    for view in views[1:]:
        operand = None if operand is None else concatenated_view(operand, view, axis)
    return operand


def _concatenate_by_copies(
    builder: Builder, views: Sequence[View], axis: int, sequence: float, ops: list[Op]
) -> View | None:
    """Views concatenated in a new buffer, by copies at a sequence number; None for several dtypes."""
    if len({str(view.value.dtype) for view in views}) > 1:
        return None
    turned = any(abs(view.strides[0]) < abs(view.strides[1]) for view in views if 1 not in view.shape)
    if all(1 in view.shape for view in views):
        turned = axis == 1
    shape = list(views[0].shape)
    shape[axis] = sum(view.shape[axis] for view in views)
    kept = tuple(shape[::-1]) if turned else tuple(shape)
    whole = View.whole(builder.value(ValueKind.buffer, kept, views[0].value.dtype))
    if turned:
        whole = whole.transposed()
    start = 0
    for view in views:
        box = [slice(0, extent) for extent in whole.shape]
        box[axis] = slice(start, start + view.shape[axis])
        start += view.shape[axis]
        source, target = view, whole.at(tuple(box))
        if turned:
            source, target = source.transposed(), target.transposed()
        ops.append(Op(Copy(), (source,), (target,), sequence))
    whole.value.ready = int(sequence) - 1  # the copies come between this number and the next
    return whole


# -- accumulation groups ----------------------------------------------------------------------------------------


def _fuse_accumulation_groups(builder: Builder) -> None:
    """a0 @ b0 + a1 @ b1 + a2 @ b2 … becomes [a0 a1 a2 …] @ [b0 b1 b2 …]."""
    def_use = DefUse(builder.ops)
    groups: dict[int, list[Op]] = {}  # the matmuls of a sum, by the id of its last addition
    additions: dict[int, list[Op]] = {}
    for op in builder.ops:
        add = _addition(op, def_use)
        if add is None:
            continue
        before, product = add
        earlier = _only_writer(before.value, def_use)
        if earlier is None or len(def_use.readers(before.value)) != 1 or not before.is_whole:
            continue
        if isinstance(earlier.opcode, Matmul):
            members = [earlier]
        elif id(earlier) in groups:
            members = groups.pop(id(earlier))
        else:
            continue
        groups[id(op)] = [*members, product]
        additions[id(op)] = [*additions.pop(id(earlier), []), op]
    removed: set[int] = set()
    concatenations: dict[Any, View] = {}
    for members, sums in sorted(
        zip(groups.values(), additions.values()), key=lambda each: each[1][-1].sequence
    ):
        removed |= _fuse_group(builder, members, sums, concatenations)
    builder.ops = sorted((op for op in builder.ops if id(op) not in removed), key=lambda op: op.sequence)


def _fuse_group(
    builder: Builder, members: list[Op], sums: list[Op], concatenations: dict[Any, View]
) -> set[int]:
    """Replace a sum of matmuls by one matmul; returns the ids of the operations that go.

    `concatenations` has the operands that earlier groups concatenated by copies.
    """
    last = sums[-1]
    rows, columns = last.writes[0].shape
    copies: list[Op] = []
    found: dict[Any, View] = {}
    for number, (axis, reused) in enumerate(((1, columns), (0, rows))):
        views = [op.reads[number] for op in members]
        key = axis, *map(identity, views)
        whole = _concatenated_views(views, axis) or concatenations.get(key)
        if whole is None and reused >= _MULTIPLICATIONS_PER_COPY_MIN:
            whole = _concatenate_by_copies(builder, views, axis, last.sequence, copies)
        if whole is None:
            return set()
        found[key] = whole
    concatenations.update(found)
    last.opcode, last.reads = Matmul(), tuple(found.values())
    builder.ops += copies
    # A stable sort by sequence would put the copies behind the product that reads them.
    for place, copy in enumerate(copies):
        copy.sequence = last.sequence - 0.5 + place / (2 * len(copies) + 2)
    return {id(op) for op in (*members, *sums[:-1])}


def _addition(op: Op, def_use: DefUse) -> tuple[View, Op] | None:
    """The accumulator and the matmul of `accumulator + matmul`, if nothing else reads the matmul."""
    if not isinstance(op.opcode, Ufunc) or op.opcode.function is not np.add or len(op.reads) != 2:
        return None
    before, view = op.reads
    product = _only_writer(view.value, def_use)
    if product is None or not isinstance(product.opcode, Matmul):
        return None
    if len(def_use.readers(view.value)) != 1 or not view.is_whole or before.shape != view.shape:
        return None
    return before, product


def _only_writer(value: Value, def_use: DefUse) -> Op | None:
    writers = def_use.writers(value)
    return writers[0] if len(writers) == 1 and value.kind is ValueKind.buffer else None


# -- adjacent operands ------------------------------------------------------------------------------------------


def _fuse_adjacent(builder: Builder, shared: int, axis: int) -> None:
    """Fuse matmuls with one operand in common whose other operands are adjacent."""
    def_use = DefUse(builder.ops)
    groups: dict[Any, list[Op]] = {}
    for op in builder.ops:
        if isinstance(op.opcode, Matmul):
            key = identity(op.reads[shared]), op.reads[axis].value.number
            groups.setdefault(key, []).append(op)
    removed: set[int] = set()
    for members in groups.values():
        members.sort(key=lambda op: op.reads[axis].offset)
        run: list[Op] = []
        operand: View | None = None
        for op in members:
            longer = None if operand is None else concatenated_view(operand, op.reads[axis], axis)
            if longer is None or issue_point([*run, op], def_use) is None:
                removed |= _fuse_run(builder, run, operand, shared, axis, def_use)
                run, operand = [op], op.reads[axis]
            else:
                run, operand = [*run, op], longer
        removed |= _fuse_run(builder, run, operand, shared, axis, def_use)
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
    builder: Builder, run: Sequence[Op], operand: View | None, shared: int, axis: int, def_use: DefUse
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
    at = 0
    parts: list[tuple[Op, View]] = []
    for op in run:
        rows, columns = op.writes[0].shape
        start = (at, 0) if axis == 0 else (0, at)
        part = View.whole(result).at(tuple(slice(s, s + n) for s, n in zip(start, (rows, columns))))
        parts.append((op, part))
        at += rows if axis == 0 else columns
    if not all(def_use.can_substitute(op.writes[0].value, part) for op, part in parts):
        return set()
    for op, part in parts:
        def_use.substitute(op.writes[0].value, part)
    fused = next(op for op in run if op.sequence == place)
    fused.reads, fused.writes = tuple(operands), (View.whole(result),)
    result.ready = int(place)
    return {id(op) for op in run if op is not fused}
