"""Fusion of accumulation groups: a0 @ b0 + a1 @ b1 + a2 @ b2 … becomes [a0 a1 a2 …] @ [b0 b1 b2 …].

An accumulation group is a sum of matmuls that instructions accumulate in PSUM; its members are the matmuls. The
blocks a0, a1, … may be concatenated in any order, as long as b0, b1, … have the same order. If a kernel gives each
partition neighbouring rows of a matrix, a block has every n-th row, and the interleaved blocks are the matrix. If
only some blocks belong to one matrix, their matmuls become one, and the other additions stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from simulate.replay.fusion.builder import Builder, identify
from simulate.replay.fusion.concatenation import Order, concatenate_by_copies, concatenate_views
from simulate.replay.fusion.graph import DefUse, Op, Value, ValueLocation, View
from simulate.replay.fusion.opcodes import Matmul, Ufunc

_MULTIPLICATIONS_PER_COPY_MIN = 8
"""Multiplications that each copied element must enter, so that copying the blocks pays."""

Concatenations = dict[Any, View]
"""Concatenated operands, by axis, order and identities of the blocks."""


def fuse_accumulation_groups(builder: Builder) -> None:
    """Fuse the matmuls of each accumulation group; changes `builder.ops`."""
    def_use = DefUse(builder.ops)
    groups: dict[int, list[Op]] = {}  # the matmuls of a sum, by the id of its last addition
    additions: dict[int, list[Op]] = {}
    for op in builder.ops:
        addition = _match_addition(op, def_use)
        if addition is None:
            continue
        accumulator, product = addition
        accumulator_writer = _find_only_writer(accumulator.value, def_use)
        if (
            accumulator_writer is None
            or len(def_use.get_readers(accumulator.value)) != 1
            or not accumulator.is_full
        ):
            continue
        if isinstance(accumulator_writer.opcode, Matmul):
            members = [accumulator_writer]
        elif id(accumulator_writer) in groups:
            members = groups.pop(id(accumulator_writer))
        else:
            continue
        groups[id(op)] = [*members, product]
        additions[id(op)] = [*additions.pop(id(accumulator_writer), []), op]
    removed: set[int] = set()
    concatenations: Concatenations = {}
    for members, sums in sorted(
        zip(groups.values(), additions.values()), key=lambda group: group[1][-1].sequence
    ):
        removed |= _fuse_group(builder, members, sums, concatenations)
    builder.ops = sorted((op for op in builder.ops if id(op) not in removed), key=lambda op: op.sequence)


def _match_addition(op: Op, def_use: DefUse) -> tuple[View, Op] | None:
    """Return the accumulator and the matmul of an operation `accumulator + matmul`.

    Returns None if the operation is no such sum or if another operation reads the matmul's result.
    """
    if not isinstance(op.opcode, Ufunc) or op.opcode.function is not np.add or len(op.reads) != 2:
        return None
    accumulator, view = op.reads
    product = _find_only_writer(view.value, def_use)
    if product is None or not isinstance(product.opcode, Matmul):
        return None
    if len(def_use.get_readers(view.value)) != 1 or not view.is_full or accumulator.shape != view.shape:
        return None
    return accumulator, product


def _find_only_writer(value: Value, def_use: DefUse) -> Op | None:
    """Return the operation that writes a buffer; None if there are several, or if the value is no buffer."""
    writers = def_use.get_writers(value)
    return writers[0] if len(writers) == 1 and value.location is ValueLocation.buffer else None


def _fuse_group(
    builder: Builder, members: list[Op], sums: list[Op], concatenations: Concatenations
) -> set[int]:
    """Replace a sum of matmuls by one matmul, or by a sum of fewer matmuls; operations are changed in place.

    Args:
        builder: The program.
        members: The matmuls of the sum.
        sums: The additions, in order; the last one has the total.
        concatenations: Concatenated operands of earlier groups, to which new ones are added.

    Returns:
        The ids of the operations that the caller has to remove; empty if nothing was fused.
    """
    operands = _concatenate_operands(builder, members, sums[-1], concatenations)
    if operands is not None:
        sums[-1].opcode, sums[-1].reads = Matmul(), operands
        return {id(op) for op in (*members, *sums[:-1])}
    removed: set[int] = set()
    products: list[Op] = []
    for run in _split_into_runs(members):
        last = max(run, key=lambda op: op.sequence)
        operands = _concatenate_operands(builder, run, last, concatenations) if len(run) > 1 else None
        if operands is None:
            products += run
        else:
            last.reads = operands
            products.append(last)
            removed |= {id(op) for op in run if op is not last}
    if not removed:
        return set()
    products.sort(key=lambda op: op.sequence)
    kept_sums = sums[len(sums) + 1 - len(products) :]
    total = products[0].writes[0]
    for add, product in zip(kept_sums, products[1:]):
        add.reads = (total, product.writes[0])
        total = add.writes[0]
    return removed | {id(op) for op in sums[: len(sums) - len(kept_sums)]}


def _concatenate_operands(
    builder: Builder, members: Sequence[Op], consumer: Op, concatenations: Concatenations
) -> tuple[View, ...] | None:
    """Concatenate the operands of several matmuls for one matmul, in the order that copies the fewest elements.

    Args:
        builder: The program, to which copies are added.
        members: The matmuls.
        consumer: The operation that becomes the one matmul; the copies get sequence numbers right before it.
        concatenations: Concatenated operands of earlier calls, to which the new ones are added.

    Returns:
        The two operands; None if no order is possible or if copying does not pay.
    """
    rows, columns = consumer.writes[0].shape
    sides = [
        ([op.reads[number] for op in members], axis, multiplications)
        for number, (axis, multiplications) in enumerate(((1, columns), (0, rows)))
    ]

    def find_views(order: Order) -> list[View | None]:
        return [
            concatenate_views(views, axis, order) or concatenations.get(_build_key(views, axis, order))
            for views, axis, _ in sides
        ]

    def count_copied_elements(order: Order) -> float:
        return sum(
            sum(view.shape[0] * view.shape[1] for view in views)
            if multiplications >= _MULTIPLICATIONS_PER_COPY_MIN
            else np.inf
            for (views, _, multiplications), joined in zip(sides, find_views(order))
            if joined is None
        )

    order = min(_list_orders(members), key=count_copied_elements)
    if count_copied_elements(order) == np.inf:
        return None
    copies: list[Op] = []
    operands = find_views(order)
    for number, (views, axis, _) in enumerate(sides):
        if operands[number] is None:
            operands[number] = concatenate_by_copies(builder, views, axis, order, consumer.sequence, copies)
    joined_operands = tuple(operand for operand in operands if operand is not None)
    if len(joined_operands) < len(sides):
        return None
    concatenations.update({_build_key(*side[:2], order): view for side, view in zip(sides, joined_operands)})
    builder.ops += copies
    # A stable sort by sequence would put the copies behind the product that reads them.
    for index, copy in enumerate(copies):
        copy.sequence = consumer.sequence - 0.5 + index / (2 * len(copies) + 2)
    return joined_operands


def _list_orders(members: Sequence[Op]) -> list[Order]:
    """Return the possible orders of concatenation: interleaved only if all left blocks have as many columns."""
    depths = {op.reads[0].shape[1] for op in members}
    return [Order.one_after_other] if len(depths) > 1 else list(Order)


def _build_key(views: Sequence[View], axis: int, order: Order) -> tuple[Any, ...]:
    """Return the key of concatenated views in `Concatenations`."""
    return axis, order, *map(identify, views)


# -- sums with several runs of adjacent blocks ---------------------------------------------------------------------


def _split_into_runs(members: Sequence[Op]) -> list[list[Op]]:
    """Split the matmuls of a sum into runs, whose blocks of one operand form one matrix, in order.

    That operand is the right one if the product has few rows, else the left one; the blocks of the other are copied.
    """
    number = 1 if members[0].writes[0].shape[0] < _MULTIPLICATIONS_PER_COPY_MIN else 0
    ops_by_layout: dict[Any, dict[int, Op]] = {}
    runs: list[list[Op]] = []
    for op in members:
        view = op.reads[number]
        by_offset = ops_by_layout.setdefault((view.value.number, view.shape, view.strides), {})
        if view.offset in by_offset:
            runs.append([op])
        else:
            by_offset[view.offset] = op
    for (_, shape, strides), by_offset in ops_by_layout.items():
        axis = 1 - number
        while by_offset:
            run = _find_longest_run(by_offset, shape[axis], strides[axis])
            runs.append([by_offset.pop(offset) for offset in run])
    return runs


def _find_longest_run(offsets: Collection[int], extent: int, stride: int) -> list[int]:
    """Return the offsets of blocks that form one matrix with the first block, adjacent or interleaved, in order.

    Args:
        offsets: The offsets of all blocks in elements of one value.
        extent: The number of elements of a block along the axis of concatenation.
        stride: The distance of these elements.
    """
    first = min(offsets)
    run = [first]
    while stride and run[-1] + extent * stride in offsets:
        run.append(run[-1] + extent * stride)
    for count in range(len(offsets), len(run), -1):
        interleaved = [first + index * stride // count for index in range(count)]
        if extent > 1 and stride % count == 0 and all(offset in offsets for offset in interleaved):
            return interleaved
    return run
