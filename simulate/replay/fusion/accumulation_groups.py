"""Fusing accumulation groups: a0 @ b0 + a1 @ b1 + a2 @ b2 … becomes [a0 a1 a2 …] @ [b0 b1 b2 …].

The parts of a sum may follow one another in any order, as long as it is the same in both operands. Where a kernel
gives each partition neighbouring rows of a matrix, the parts are every n-th row of it: interleaved, they are the
matrix. Where only some of the parts belong to one matrix, these become one matmul, and the additions of others stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from simulate.replay.fusion.builder import Builder, identity
from simulate.replay.fusion.concatenation import Order, concatenate_by_copies, concatenated_views
from simulate.replay.fusion.graph import DefUse, Op, Value, ValueKind, View
from simulate.replay.fusion.opcodes import Matmul, Ufunc

_MULTIPLICATIONS_PER_COPY_MIN = 8
"""An element is copied to fuse matmuls if the copy enters at least so many multiplications."""

Concatenations = dict[Any, View]
"""Operands that were concatenated, by axis, order and identities of the parts."""


def fuse_accumulation_groups(builder: Builder) -> None:
    """Fuse the matmuls of each sum."""
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
    concatenations: Concatenations = {}
    for members, sums in sorted(
        zip(groups.values(), additions.values()), key=lambda each: each[1][-1].sequence
    ):
        removed |= _fuse_group(builder, members, sums, concatenations)
    builder.ops = sorted((op for op in builder.ops if id(op) not in removed), key=lambda op: op.sequence)


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


def _fuse_group(
    builder: Builder, members: list[Op], sums: list[Op], concatenations: Concatenations
) -> set[int]:
    """Replace a sum of matmuls by one matmul, or by a sum of fewer; returns the ids of the operations that go."""
    operands = _operands(builder, members, sums[-1], concatenations)
    if operands is not None:
        sums[-1].opcode, sums[-1].reads = Matmul(), operands
        return {id(op) for op in (*members, *sums[:-1])}
    removed: set[int] = set()
    products: list[Op] = []
    for run in _runs(members):
        last = max(run, key=lambda op: op.sequence)
        operands = _operands(builder, run, last, concatenations) if len(run) > 1 else None
        if operands is None:
            products += run
        else:
            last.reads = operands
            products.append(last)
            removed |= {id(op) for op in run if op is not last}
    if not removed:
        return set()
    products.sort(key=lambda op: op.sequence)
    kept = sums[len(sums) + 1 - len(products) :]
    total = products[0].writes[0]
    for add, product in zip(kept, products[1:]):
        add.reads = (total, product.writes[0])
        total = add.writes[0]
    return removed | {id(op) for op in sums[: len(sums) - len(kept)]}


def _operands(
    builder: Builder, members: Sequence[Op], at: Op, concatenations: Concatenations
) -> tuple[View, ...] | None:
    """The operands of one matmul for several, concatenated in the order that takes the fewest copies; None if none may.

    Copies come right before the operation `at`.
    """
    rows, columns = at.writes[0].shape
    sides = [
        ([op.reads[number] for op in members], axis, reused)
        for number, (axis, reused) in enumerate(((1, columns), (0, rows)))
    ]

    def known(order: Order) -> list[View | None]:
        return [
            concatenated_views(views, axis, order) or concatenations.get(_key(views, axis, order))
            for views, axis, _ in sides
        ]

    def copied(order: Order) -> float:
        return sum(
            sum(view.shape[0] * view.shape[1] for view in views)
            if reused >= _MULTIPLICATIONS_PER_COPY_MIN
            else np.inf
            for (views, _, reused), whole in zip(sides, known(order))
            if whole is None
        )

    order = min(_orders(members), key=copied)
    if copied(order) == np.inf:
        return None
    copies: list[Op] = []
    operands = known(order)
    for number, (views, axis, _) in enumerate(sides):
        if operands[number] is None:
            operands[number] = concatenate_by_copies(builder, views, axis, order, at.sequence, copies)
    found = tuple(each for each in operands if each is not None)
    if len(found) < len(sides):
        return None
    concatenations.update({_key(*side[:2], order): view for side, view in zip(sides, found)})
    builder.ops += copies
    # A stable sort by sequence would put the copies behind the product that reads them.
    for place, copy in enumerate(copies):
        copy.sequence = at.sequence - 0.5 + place / (2 * len(copies) + 2)
    return found


def _orders(members: Sequence[Op]) -> list[Order]:
    """The orders in which the parts can follow one another: only parts of one depth can be interleaved."""
    depths = {op.reads[0].shape[1] for op in members}
    return [Order.one_after_other] if len(depths) > 1 else list(Order)


def _key(views: Sequence[View], axis: int, order: Order) -> tuple[Any, ...]:
    return axis, order, *map(identity, views)


# -- sums of which some parts belong together ---------------------------------------------------------------------


def _runs(members: Sequence[Op]) -> list[list[Op]]:
    """The matmuls of a sum; those together, in order, whose parts of the operand that is not copied are one matrix."""
    number = 1 if members[0].writes[0].shape[0] < _MULTIPLICATIONS_PER_COPY_MIN else 0
    alike: dict[Any, dict[int, Op]] = {}
    runs: list[list[Op]] = []
    for op in members:
        view = op.reads[number]
        by_offset = alike.setdefault((view.value.number, view.shape, view.strides), {})
        if view.offset in by_offset:
            runs.append([op])
        else:
            by_offset[view.offset] = op
    for (_, shape, strides), by_offset in alike.items():
        axis = 1 - number
        while by_offset:
            run = _longest_run(by_offset, shape[axis], strides[axis])
            runs.append([by_offset.pop(offset) for offset in run])
    return runs


def _longest_run(offsets: Collection[int], extent: int, stride: int) -> list[int]:
    """Offsets of the parts that form one matrix with the first part; a part has `extent` elements, `stride` apart."""
    first = min(offsets)
    found = [first]
    while stride and found[-1] + extent * stride in offsets:
        found.append(found[-1] + extent * stride)
    for count in range(len(offsets), len(found), -1):
        interleaved = [first + place * stride // count for place in range(count)]
        if extent > 1 and stride % count == 0 and all(offset in offsets for offset in interleaved):
            return interleaved
    return found
