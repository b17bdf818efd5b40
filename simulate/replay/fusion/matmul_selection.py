"""The last pass: every matmul gets operands that BLAS takes, and the implementation that is fastest for them."""

from __future__ import annotations

import numpy as np

from simulate.memory import views
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.blocked_matmul import LARGE, BlockedMatmul, scratch_elements
from simulate.replay.fusion.builder import Builder, identity
from simulate.replay.fusion.graph import Op, ValueKind, View
from simulate.replay.fusion.narrow_matmul import (
    NarrowMatmul,
    is_narrow_matmul,
    narrow_operand,
    split_matmul,
    turn,
)
from simulate.replay.fusion.opcodes import Copy, Matmul, Widen


def select_matmuls(builder: Builder, narrow: bool) -> None:
    """Give matmuls operands that BLAS takes: one stride of 1, and float32 unless a library multiplies the narrow dtype.

    A large narrow operand is widened block by block inside the matmul. With `narrow`, a library multiplies bfloat16
    matrices without widening.
    """
    made: dict[tuple[object, ...], View] = {}
    ops: list[Op] = []

    def packed(view: View, narrow: bool, sequence: float) -> View:
        if (narrow or view.value.element == np.float32) and _is_blas_layout(view):
            return view
        key = identity(view), narrow
        if key not in made:
            made[key] = _packed(builder, view, narrow, sequence, ops)
        return made[key]

    for op in builder.ops:
        if isinstance(op.opcode, Matmul):
            left, right = op.reads
            if narrow and is_narrow_matmul(op):
                op.opcode = NarrowMatmul()
                op.reads = packed(left, True, op.sequence), packed(right, True, op.sequence)
            else:
                split_operand = narrow_operand(op) if narrow else None
                blocked = _large_narrow(op) if split_operand is None else None
                op.reads = tuple(
                    view if number == blocked else packed(view, number == split_operand, op.sequence)
                    for number, view in enumerate(op.reads)
                )
                if blocked is not None:
                    _block_matmul(builder, op, blocked)
                elif split_operand is not None:
                    split_matmul(builder, op, split_operand)
        ops.append(op)
    builder.ops = ops


def _large_narrow(op: Op) -> int | None:
    """Which operand of a matmul is widened in blocks: the larger one of those narrow and large, if any."""
    found = [
        (views.count(view.shape), number)
        for number, view in enumerate(op.reads)
        if view.value.element != np.float32 and views.count(view.shape) > LARGE
    ]
    return max(found)[1] if found else None


def _block_matmul(builder: Builder, op: Op, blocked: int) -> None:
    """Let a matmul widen an operand in blocks; it becomes the right one, as (A @ B).T = B.T @ A.T."""
    if blocked == 0:
        turn(op)
    left, right = op.reads
    size = scratch_elements(left.shape[0], *right.shape)
    scratch = builder.value(ValueKind.buffer, (size,), float32)
    op.opcode = BlockedMatmul(right.value.dtype)
    op.writes = (*op.writes, View.whole(scratch))


def _packed(builder: Builder, view: View, narrow: bool, sequence: float, ops: list[Op]) -> View:
    """A contiguous copy of a matrix, float32 unless `narrow`, row- or column-major as the matrix is."""
    turned = abs(view.strides[0]) < abs(view.strides[1])
    source = view.transposed() if turned else view
    wide = not narrow and source.value.element != np.float32
    dtype = float32 if wide else source.value.dtype
    target = View.whole(builder.value(ValueKind.buffer, source.shape, dtype))
    ops.append(Op(Widen(source.value.dtype) if wide else Copy(), (source,), (target,), sequence))
    return target.transposed() if turned else target


def _is_blas_layout(view: View) -> bool:
    (rows, columns), (down, right) = view.shape, view.strides
    if rows == 1 or columns == 1:
        return (down if columns == 1 else right) == 1 or rows == columns
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)
