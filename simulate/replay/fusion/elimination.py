"""What no result needs goes; what is copied once is made where the copy would be; products get float32 operands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.memory import Storage, views
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.blocked_matmul import LARGE, BlockedProduct, scratch_elements
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import Op, Uses, Value, ValueKind, View
from simulate.replay.fusion.narrow_matmul import NarrowProduct, narrow_operand, narrow_pair, split
from simulate.replay.fusion.opcodes import Copy, Product, Widened


def drop_unused(builder: Builder) -> None:
    """Keep what has effects, and what that reads."""
    needed: set[int] = set()
    kept: list[Op] = []
    for op in reversed(builder.ops):
        if op.keep or any(view.value.number in needed for view in op.writes):
            kept.append(op)
            needed.update(view.value.number for view in op.reads)
    builder.ops = kept[::-1]


def make_in_place(builder: Builder, results: dict[int, Storage]) -> int:
    """Let operations write where a copy would put their result; returns how many copies go.

    A copy into a buffer that is put together from pieces may go, and one into `results`: homes that are written once
    and that no operation reads.
    """
    uses = Uses(builder.ops)
    gone: set[int] = set()
    for op in builder.ops:
        if not isinstance(op.work, Copy):
            continue
        source, target = op.reads[0], op.writes[0]
        value, into = source.value, target.value
        if value.kind is not ValueKind.buffer or not source.is_whole or value.element != into.element:
            continue
        if into.kind is ValueKind.home and (into.storage is None or id(into.storage) not in results):
            continue
        place = simplified(View(into, target.offset, source.shape, target.strides))
        if not uses.can_substitute(value, place):
            continue
        op.reads = ()
        op.writes = ()
        uses.substitute(value, place)
        gone.add(id(op))
        for writer in uses.writers(into):
            writer.keep = writer.keep or into.kind is ValueKind.home
    builder.ops = [op for op in builder.ops if id(op) not in gone]
    return len(gone)


def show_neighbours(builder: Builder) -> int:
    """Let a matrix that copies put together from neighbouring parts of one value be those parts; returns the copies.

    Products that were joined leave such matrices: their results lay apart before, and side by side now.
    """
    uses = Uses(builder.ops)
    gone: set[int] = set()
    for value in {op.writes[0].value.number: op.writes[0].value for op in builder.ops if op.writes}.values():
        copies = uses.writers(value)
        shown = _shown(value, copies)
        if shown is None or not uses.can_substitute(value, shown):
            continue
        uses.substitute(value, shown)
        for op in copies:
            op.reads, op.writes = (), ()
            gone.add(id(op))
    builder.ops = [op for op in builder.ops if id(op) not in gone]
    return len(gone)


def _shown(value: Value, copies: Sequence[Op]) -> View | None:
    """The view of another buffer of which `copies` make a whole matrix, if there is one."""
    if value.kind is not ValueKind.buffer or len(value.shape) != 2 or not copies:
        return None
    first = copies[0]
    if not all(isinstance(op.work, Copy) and not op.keep and len(op.reads[0].shape) == 2 for op in copies):
        return None
    source, strides = first.reads[0].value, first.reads[0].strides
    if source.kind is not ValueKind.buffer or source is value or source.dtype != value.dtype:
        return None
    if sum(views.count(op.writes[0].shape) for op in copies) != value.size:
        return None
    offsets = set()
    for op in copies:
        part, place = op.reads[0], op.writes[0]
        steps = zip(part.shape, part.strides, strides, place.strides, (value.shape[1], 1))
        if part.value is not source or any(
            extent > 1 and (own != wanted or there != unit) for extent, own, wanted, there, unit in steps
        ):
            return None
        row, column = divmod(place.offset, value.shape[1])
        offsets.add(part.offset - row * strides[0] - column * strides[1])
    if len(offsets) != 1:
        return None
    return View(source, offsets.pop(), value.shape, strides)


def simplified(view: View) -> View:
    """The same elements in the same order with as few dims as possible."""
    shape: list[int] = []
    strides: list[int] = []
    for extent, stride in zip(view.shape, view.strides):
        if extent == 1:
            continue
        if shape and strides[-1] == extent * stride:
            shape[-1], strides[-1] = shape[-1] * extent, stride
        else:
            shape.append(extent)
            strides.append(stride)
    return View(view.value, view.offset, tuple(shape) or (1,), tuple(strides) or (1,))


def prepare_products(builder: Builder, fast: bool) -> None:
    """Give products operands that a BLAS takes: one stride of 1, and float32 unless they stay narrow.

    A large narrow operand stays as it is, and the product widens it in blocks. With `fast`, a library multiplies
    bfloat16 matrices as they lie.
    """
    made: dict[tuple[object, ...], View] = {}
    ops: list[Op] = []

    def laid_out(view: View, narrow: bool, sequence: float) -> View:
        if (narrow or view.value.element == np.float32) and _fits_blas(view):
            return view
        key = view.value.number, view.offset, view.shape, view.strides, narrow
        if key not in made:
            made[key] = _laid_out(builder, view, narrow, sequence, ops)
        return made[key]

    for op in builder.ops:
        if isinstance(op.work, Product):
            left, right = op.reads
            if fast and narrow_pair(op):
                op.work = NarrowProduct()
                op.reads = laid_out(left, True, op.sequence), laid_out(right, True, op.sequence)
            else:
                taken = narrow_operand(op) if fast else None
                large = _large_narrow(op) if taken is None else None
                op.reads = tuple(
                    view if number == large else laid_out(view, number == taken, op.sequence)
                    for number, view in enumerate(op.reads)
                )
                if large is not None:
                    _in_blocks(builder, op, large)
                elif taken is not None:
                    split(builder, op, taken)
        ops.append(op)
    builder.ops = ops


def _large_narrow(op: Op) -> int | None:
    """Which operand of a product is widened in blocks: the larger one of those narrow and large, if there is one."""
    found = [
        (views.count(view.shape), number)
        for number, view in enumerate(op.reads)
        if view.value.element != np.float32 and views.count(view.shape) > LARGE
    ]
    return max(found)[1] if found else None


def _in_blocks(builder: Builder, op: Op, large: int) -> None:
    """Let a product widen an operand in blocks; it becomes the right one, as (A @ B).T = B.T @ A.T."""
    if large == 0:
        op.reads = (op.reads[1].turned(), op.reads[0].turned())
        op.writes = (op.writes[0].turned(),)
    left, right = op.reads
    size = scratch_elements(left.shape[0], *right.shape)
    scratch = builder.value(ValueKind.buffer, (size,), float32)
    op.work = BlockedProduct(right.value.dtype)
    op.writes = (*op.writes, View.whole(scratch))


def _laid_out(builder: Builder, view: View, narrow: bool, sequence: float, ops: list[Op]) -> View:
    """A contiguous float32 copy of a matrix, in the order in which its elements lie."""
    turned = abs(view.strides[0]) < abs(view.strides[1])
    source = view.turned() if turned else view
    wide = not narrow and source.value.element != np.float32
    dtype = float32 if wide else source.value.dtype
    target = View.whole(builder.value(ValueKind.buffer, source.shape, dtype))
    ops.append(Op(Widened(source.value.dtype) if wide else Copy(), (source,), (target,), sequence))
    return target.turned() if turned else target


def _fits_blas(view: View) -> bool:
    (rows, columns), (down, right) = view.shape, view.strides
    if rows == 1 or columns == 1:
        return (down if columns == 1 else right) == 1 or rows == columns
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)
