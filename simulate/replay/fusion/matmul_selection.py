"""Selection of matmuls: every matmul gets operands that BLAS takes, and the fastest implementation for them.

A narrow operand has elements of fewer bytes than float32, and to widen is to convert to float32. A blocked matmul
widens an operand block by block in scratch (`blocked_matmul`); a narrow matmul needs no widening (`narrow_matmul`).
"""

from __future__ import annotations

import numpy as np

from simulate.memory import views
from simulate.numerics.dtypes import float32
from simulate.replay.fusion.blocked_matmul import LARGE, BlockedMatmul, count_scratch_elements
from simulate.replay.fusion.builder import Builder, identify
from simulate.replay.fusion.graph import Op, ValueLocation, View
from simulate.replay.fusion.narrow_matmul import (
    NarrowMatmul,
    find_narrow_operand,
    is_narrow_matmul,
    split_matmul,
    transpose_matmul,
)
from simulate.replay.fusion.opcodes import Copy, Matmul, Widen


def select_matmuls(builder: Builder, narrow: bool) -> None:
    """Choose an implementation for every matmul, and copy operands that it cannot take; changes `builder.ops`.

    Operands of BLAS have stride 1 along an axis, and dtype float32 unless a library takes bfloat16. A large narrow
    operand is widened block by block inside the matmul.

    Args:
        builder: The program.
        narrow: Whether a library may multiply bfloat16 matrices without widening.
    """
    packed_views: dict[tuple[object, ...], View] = {}
    ops: list[Op] = []

    def pack_operand(view: View, narrow: bool, sequence: float) -> View:
        if (narrow or view.value.element == np.float32) and _is_blas_layout(view):
            return view
        key = identify(view), narrow
        if key not in packed_views:
            packed_views[key] = _pack_by_copy(builder, view, narrow, sequence, ops)
        return packed_views[key]

    for op in builder.ops:
        if isinstance(op.opcode, Matmul):
            left, right = op.reads
            if narrow and is_narrow_matmul(op):
                op.opcode = NarrowMatmul()
                op.reads = pack_operand(left, True, op.sequence), pack_operand(right, True, op.sequence)
            else:
                split_operand = find_narrow_operand(op) if narrow else None
                blocked = _find_large_narrow(op) if split_operand is None else None
                op.reads = tuple(
                    view if number == blocked else pack_operand(view, number == split_operand, op.sequence)
                    for number, view in enumerate(op.reads)
                )
                if blocked is not None:
                    _block_matmul(builder, op, blocked)
                elif split_operand is not None:
                    split_matmul(builder, op, split_operand)
        ops.append(op)
    builder.ops = ops


def _find_large_narrow(op: Op) -> int | None:
    """Return the position, 0 or 1, of the largest narrow operand of more than LARGE elements, to widen in blocks.

    Returns None if there is none.
    """
    candidates = [
        (views.count(view.shape), number)
        for number, view in enumerate(op.reads)
        if view.value.element != np.float32 and views.count(view.shape) > LARGE
    ]
    return max(candidates)[1] if candidates else None


def _block_matmul(builder: Builder, op: Op, blocked: int) -> None:
    """Make a matmul widen its operand at position `blocked` in blocks, in a new scratch buffer.

    A left operand becomes the right one by transposition, as (A @ B).T = B.T @ A.T.
    """
    if blocked == 0:
        transpose_matmul(op)
    left, right = op.reads
    size = count_scratch_elements(left.shape[0], *right.shape)
    scratch = builder.add_value(ValueLocation.buffer, (size,), float32)
    op.opcode = BlockedMatmul(right.value.dtype)
    op.writes = (*op.writes, View.full(scratch))


def _pack_by_copy(builder: Builder, view: View, narrow: bool, sequence: float, ops: list[Op]) -> View:
    """Append a contiguous copy of a matrix to `ops` and return its view, of the matrix's shape.

    The copy is transposed in memory if the matrix is column-major; it is float32 unless `narrow`.
    """
    is_transposed = abs(view.strides[0]) < abs(view.strides[1])
    source = view.transpose() if is_transposed else view
    wide = not narrow and source.value.element != np.float32
    dtype = float32 if wide else source.value.dtype
    target = View.full(builder.add_value(ValueLocation.buffer, source.shape, dtype))
    ops.append(Op(Widen(source.value.dtype) if wide else Copy(), (source,), (target,), sequence))
    return target.transpose() if is_transposed else target


def _is_blas_layout(view: View) -> bool:
    """Return whether BLAS takes a matrix: stride 1 along one axis, and rows or columns that do not overlap."""
    (rows, columns), (down, right) = view.shape, view.strides
    if rows == 1 or columns == 1:
        return (down if columns == 1 else right) == 1 or rows == columns
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)
