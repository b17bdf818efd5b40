"""Joining matrix products: an accumulation group into one, then neighbouring columns, then neighbouring rows.

A kernel multiplies tiles of 128 by 128 by 512 because the array has that size. What their operands show is, after the
copies are gone, mostly neighbouring parts of two large matrices; one product of those does the same work faster. The
order of the float32 sums changes with it, nothing else: each product and each sum is still float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulate.numerics.dtypes import float32
from simulate.run.fusion.builder import Builder
from simulate.run.fusion.graph import Kind, Op, Uses, Value, View
from simulate.run.fusion.works import Product, Ufunc


def join_products(builder: Builder) -> int:
    """Join what can be joined; returns how many products were."""
    before = sum(isinstance(op.work, Product) for op in builder.ops)
    _accumulation_groups(builder)
    _neighbours(builder, shared=0, grown=1)
    _neighbours(builder, shared=1, grown=0)
    return before - sum(isinstance(op.work, Product) for op in builder.ops)


def _accumulation_groups(builder: Builder) -> None:
    """sum + a1 @ b1 + a2 @ b2 … becomes sum + [a1 a2 …] @ [b1 b2 …]."""
    uses = Uses(builder.ops)
    gone: set[int] = set()
    for op in builder.ops:
        add = _addition(op, uses)
        if add is None:
            continue
        before, product = add
        earlier = _only_writer(before.value, uses)
        if (
            earlier is None
            or not isinstance(earlier.work, Product)
            or len(uses.readers(before.value)) != 1
            or not before.is_whole
        ):
            continue
        left = stacked(earlier.reads[0], product.reads[0], 1)
        right = stacked(earlier.reads[1], product.reads[1], 0)
        if left is None or right is None or len(earlier.reads) != 2:
            continue
        op.work, op.reads = Product(), (left, right)
        gone |= {id(earlier), id(product)}
    builder.ops = [op for op in builder.ops if id(op) not in gone]


def _addition(op: Op, uses: Uses) -> tuple[View, Op] | None:
    """The accumulator and the product of `accumulator + product`, if nothing else reads the product."""
    if not isinstance(op.work, Ufunc) or op.work.function is not np.add or len(op.reads) != 2:
        return None
    before, view = op.reads
    product = _only_writer(view.value, uses)
    if product is None or not isinstance(product.work, Product) or len(product.reads) != 2:
        return None
    if len(uses.readers(view.value)) != 1 or not view.is_whole or before.shape != view.shape:
        return None
    return before, product


def _only_writer(value: Value, uses: Uses) -> Op | None:
    writers = uses.writers(value)
    return writers[0] if len(writers) == 1 and value.kind is Kind.buffer else None


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


def _neighbours(builder: Builder, shared: int, grown: int) -> None:
    """Join products with one operand in common whose other operands follow each other."""
    uses = Uses(builder.ops)
    groups: dict[Any, list[Op]] = {}
    for op in builder.ops:
        if isinstance(op.work, Product) and len(op.reads) == 2:
            view, other = op.reads[shared], op.reads[grown]
            key = (
                view.value.number,
                view.offset,
                view.shape,
                view.strides,
                other.value.number,
                other.shape[1 - grown],
            )
            groups.setdefault(key, []).append(op)
    gone: set[int] = set()
    for members in groups.values():
        members.sort(key=lambda op: op.reads[grown].offset)
        run: list[Op] = []
        joined: View | None = None
        for op in members:
            longer = None if joined is None else stacked(joined, op.reads[grown], grown)
            if longer is None or _place([*run, op], uses) is None:
                gone |= _join(builder, run, joined, shared, grown, uses)
                run, joined = [op], op.reads[grown]
            else:
                run, joined = [*run, op], longer
        gone |= _join(builder, run, joined, shared, grown, uses)
    builder.ops = sorted((op for op in builder.ops if id(op) not in gone), key=lambda op: op.sequence)


def _place(run: Sequence[Op], uses: Uses) -> float | None:
    """A sequence number at which all operands of a run are ready and no result is wanted yet."""
    ready = max(_ready(view, uses) for op in run for view in op.reads)
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
    place = _place(run, uses)
    assert place is not None
    operands = [joined, joined]
    operands[shared] = run[0].reads[shared]
    shape = (operands[0].shape[0], operands[1].shape[1])
    result = builder.value(Kind.buffer, shape, float32)
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
