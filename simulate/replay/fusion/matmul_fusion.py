"""Joining matrix products: an accumulation group into one, then neighbouring columns, then rows.

A kernel multiplies tiles of 128 by 128 by 512 because the array has that size. What their operands show is, after the
copies are gone, mostly neighbouring parts of two large matrices; one product of those does the same work faster. Where
one operand is in pieces and the other is not, the pieces are put together. The order of the float32 sums changes with
it, nothing else: each product and each sum is still float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulate.numerics.dtypes import float32
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import Op, Uses, Value, ValueKind, View
from simulate.replay.fusion.opcodes import Copy, Product, Ufunc

_WORTH_COPYING = 8
"""An element is copied to join products if each copy enters at least so many multiplications."""


def join_products(builder: Builder) -> int:
    """Join what can be joined; returns how many products were."""
    before = sum(isinstance(op.work, Product) for op in builder.ops)
    _accumulation_groups(builder)
    _neighbours(builder, shared=0, grown=1)
    _neighbours(builder, shared=1, grown=0)
    return before - sum(isinstance(op.work, Product) for op in builder.ops)


def stacked(first: View, second: View, axis: int) -> View | None:
    """One view of two that follow each other along an axis, if there is one."""
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


def _all_stacked(views: Sequence[View], axis: int) -> View | None:
    joined: View | None = views[0]
    for view in views[1:]:
        joined = None if joined is None else stacked(joined, view, axis)
    return joined


def _put_together(
    builder: Builder, views: Sequence[View], axis: int, sequence: float, ops: list[Op]
) -> View | None:
    """Views below each other in one new buffer, by copies at a place in the sequence; None for several dtypes."""
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
        whole = whole.turned()
    start = 0
    for view in views:
        box = [slice(0, extent) for extent in whole.shape]
        box[axis] = slice(start, start + view.shape[axis])
        start += view.shape[axis]
        source, target = view, whole.at(tuple(box))
        if turned:
            source, target = source.turned(), target.turned()
        ops.append(Op(Copy(), (source,), (target,), sequence))
    whole.value.ready = int(sequence) - 1  # the copies come between this number and the next
    return whole


# -- accumulation groups ----------------------------------------------------------------------------------------


def _accumulation_groups(builder: Builder) -> None:
    """a0 @ b0 + a1 @ b1 + a2 @ b2 … becomes [a0 a1 a2 …] @ [b0 b1 b2 …]."""
    uses = Uses(builder.ops)
    groups: dict[int, list[Op]] = {}  # the products of a sum, by the operation that has it
    additions: dict[int, list[Op]] = {}
    for op in builder.ops:
        add = _addition(op, uses)
        if add is None:
            continue
        before, product = add
        earlier = _only_writer(before.value, uses)
        if earlier is None or len(uses.readers(before.value)) != 1 or not before.is_whole:
            continue
        if isinstance(earlier.work, Product):
            members = [earlier]
        elif id(earlier) in groups:
            members = groups.pop(id(earlier))
        else:
            continue
        groups[id(op)] = [*members, product]
        additions[id(op)] = [*additions.pop(id(earlier), []), op]
    gone: set[int] = set()
    together: dict[Any, View] = {}
    for members, sums in sorted(
        zip(groups.values(), additions.values()), key=lambda each: each[1][-1].sequence
    ):
        gone |= _join_group(builder, members, sums, together)
    builder.ops = sorted((op for op in builder.ops if id(op) not in gone), key=lambda op: op.sequence)


def _join_group(builder: Builder, members: list[Op], sums: list[Op], together: dict[Any, View]) -> set[int]:
    """Put one product in place of a sum of products; returns the operations that it replaces.

    `together` are the operands that earlier groups have put together from pieces.
    """
    last = sums[-1]
    rows, columns = last.writes[0].shape
    copies: list[Op] = []
    found: dict[Any, View] = {}
    for number, (axis, reused) in enumerate(((1, columns), (0, rows))):
        views = [op.reads[number] for op in members]
        key = axis, *((view.value.number, view.offset, view.shape, view.strides) for view in views)
        whole = _all_stacked(views, axis) or together.get(key)
        if whole is None and reused >= _WORTH_COPYING:
            whole = _put_together(builder, views, axis, last.sequence, copies)
        if whole is None:
            return set()
        found[key] = whole
    together.update(found)
    last.work, last.reads = Product(), tuple(found.values())
    builder.ops += copies
    # A stable sort by sequence would put the copies behind the product that reads them.
    for place, copy in enumerate(copies):
        copy.sequence = last.sequence - 0.5 + place / (2 * len(copies) + 2)
    return {id(op) for op in (*members, *sums[:-1])}


def _addition(op: Op, uses: Uses) -> tuple[View, Op] | None:
    """The accumulator and the product of `accumulator + product`, if nothing else reads the product."""
    if not isinstance(op.work, Ufunc) or op.work.function is not np.add or len(op.reads) != 2:
        return None
    before, view = op.reads
    product = _only_writer(view.value, uses)
    if product is None or not isinstance(product.work, Product):
        return None
    if len(uses.readers(view.value)) != 1 or not view.is_whole or before.shape != view.shape:
        return None
    return before, product


def _only_writer(value: Value, uses: Uses) -> Op | None:
    writers = uses.writers(value)
    return writers[0] if len(writers) == 1 and value.kind is ValueKind.buffer else None


# -- neighbours -------------------------------------------------------------------------------------------------


def _neighbours(builder: Builder, shared: int, grown: int) -> None:
    """Join products with one operand in common whose other operands follow each other."""
    uses = Uses(builder.ops)
    groups: dict[Any, list[Op]] = {}
    for op in builder.ops:
        if isinstance(op.work, Product):
            view, other = op.reads[shared], op.reads[grown]
            key = view.value.number, view.offset, view.shape, view.strides, other.value.number
            groups.setdefault(key, []).append(op)
    gone: set[int] = set()
    for members in groups.values():
        members.sort(key=lambda op: op.reads[grown].offset)
        run: list[Op] = []
        joined: View | None = None
        for op in members:
            longer = None if joined is None else stacked(joined, op.reads[grown], grown)
            if longer is None or place_of([*run, op], uses) is None:
                gone |= _join(builder, run, joined, shared, grown, uses)
                run, joined = [op], op.reads[grown]
            else:
                run, joined = [*run, op], longer
        gone |= _join(builder, run, joined, shared, grown, uses)
    builder.ops = sorted((op for op in builder.ops if id(op) not in gone), key=lambda op: op.sequence)


def place_of(run: Sequence[Op], uses: Uses) -> float | None:
    """The sequence number of a member at which all operands of a run are ready and no result is wanted yet."""
    ready = max((_ready(view, uses) for op in run for view in op.reads), default=-1.0)
    wanted = min((reader.sequence for op in run for reader in uses.readers(op.writes[0].value)), default=1e18)
    for op in sorted(run, key=lambda op: op.sequence):
        if ready < op.sequence < wanted:
            return op.sequence
    return None


def _ready(view: View, uses: Uses) -> float:
    return max([view.value.ready, *(op.sequence for op in uses.writers(view.value))])


def _join(
    builder: Builder, run: Sequence[Op], joined: View | None, shared: int, grown: int, uses: Uses
) -> set[int]:
    """Put one product in place of a run; returns the operations that it replaces."""
    if len(run) < 2 or joined is None:
        return set()
    place = place_of(run, uses)
    assert place is not None
    operands = [joined, joined]
    operands[shared] = run[0].reads[shared]
    shape = (operands[0].shape[0], operands[1].shape[1])
    result = builder.value(ValueKind.buffer, shape, float32)
    at = 0
    parts: list[tuple[Op, View]] = []
    for op in run:
        rows, columns = op.writes[0].shape
        start = (at, 0) if grown == 0 else (0, at)
        part = View.whole(result).at(tuple(slice(s, s + n) for s, n in zip(start, (rows, columns))))
        parts.append((op, part))
        at += rows if grown == 0 else columns
    if not all(uses.can_substitute(op.writes[0].value, part) for op, part in parts):
        return set()
    for op, part in parts:
        uses.substitute(op.writes[0].value, part)
    keeper = next(op for op in run if op.sequence == place)
    keeper.reads, keeper.writes = tuple(operands), (View.whole(result),)
    result.ready = int(place)
    return {id(op) for op in run if op is not keeper}
