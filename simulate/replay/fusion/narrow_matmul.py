"""Matmuls of bfloat16 matrices without widening: a library multiplies them, with float32 sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.memory import views
from simulate.numerics.dtypes import bfloat16, float32
from simulate.replay.fusion import speed
from simulate.replay.fusion.blocked_matmul import LARGE, block_shape
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import Op, ValueKind, View
from simulate.replay.fusion.opcodes import NumpyCall

_PARTS = 3
"""bfloat16 numbers whose sum is a float32: each has 8 of its 24 bits. Below 2**-103 the last bits of a float32 may be
subnormal in bfloat16 and are lost; the loss is less than 2**-126."""

_SCRATCH = 1 << 22  # elements of the products of all parts
_NAN = 0x7FC0  # quiet NaN in bfloat16; the upper half of another float32 NaN may be that of infinity
_ONEMKL_MULTIPLICATIONS_MIN = 1 << 18  # with fewer, numpy widens and multiplies as fast
_TORCH_MULTIPLICATIONS_MIN = 1 << 24  # a call of torch costs about as much as a thousandth of these
_TORCH_ROWS_MIN = 64
"""With fewer rows, converting a matrix costs torch more than multiplying it. With 2048 by 8192 weights, 16 rows took
27 ms of CPU time and numpy 16 ms; 128 rows took 35 ms and numpy 61 ms."""


@dataclass(frozen=True, slots=True)
class NarrowMatmul:
    """A matmul of bfloat16 matrices with float32 sums."""

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        left, right = reads
        out = writes[0]
        if speed.has_onemkl():
            return [(speed.multiply, [left, right, out])]
        if views.count(left.shape) > views.count(right.shape):
            left, right, out = right.transposed(), left.transposed(), out.transposed()
        blocks = block_shape(left.shape[0], *right.shape)
        return [(speed.multiply_widened, [left, right, out, *blocks])]


@dataclass(frozen=True, slots=True)
class SplitMatmul:
    """A matmul of a float32 and a bfloat16 matrix; further results are scratch, for as many rows as fit."""

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """One call."""
        return [(multiply, [*reads, *writes])]


def is_narrow_matmul(op: Op) -> bool:
    """Whether a library multiplies two bfloat16 matrices faster than numpy multiplies their float32 copies."""
    (rows, depth), columns = op.reads[0].shape, op.reads[1].shape[1]
    work = rows * depth * columns
    if not all(map(_is_narrow, op.reads)):
        return False
    if speed.has_onemkl():
        return work >= _ONEMKL_MULTIPLICATIONS_MIN
    return min(rows, columns) >= _TORCH_ROWS_MIN and work >= _TORCH_MULTIPLICATIONS_MIN


def narrow_operand(op: Op) -> int | None:
    """Which operand is a large bfloat16 matrix beside a float32 one; None if neither is, or without oneMKL."""
    for number, view in enumerate(op.reads):
        other = op.reads[1 - number]
        if _is_narrow(view) and views.count(view.shape) > LARGE and other.value.element == np.float32:
            return number if speed.has_onemkl() else None
    return None


def turn(op: Op) -> None:
    """Make the left operand of a matmul the right one: (A @ B).T = B.T @ A.T."""
    op.reads = (op.reads[1].transposed(), op.reads[0].transposed())
    op.writes = (op.writes[0].transposed(),)


def split_matmul(builder: Builder, op: Op, number: int) -> None:
    """Let a matmul split its float32 operand; the narrow one becomes the right one, as (A @ B).T = B.T @ A.T."""
    if number == 0:
        turn(op)
    (rows, depth), columns = op.reads[0].shape, op.reads[1].shape[1]
    at_once = max(1, min(rows, _SCRATCH // (_PARTS * max(depth, columns))))
    scratch = (
        builder.value(ValueKind.buffer, (_PARTS * at_once, depth), bfloat16),
        builder.value(ValueKind.buffer, (at_once, depth), float32),
        builder.value(ValueKind.buffer, (_PARTS * at_once, columns), float32),
    )
    op.opcode = SplitMatmul()
    op.writes = (*op.writes, *map(View.whole, scratch))


def multiply(
    left: np.ndarray,
    right: np.ndarray,
    out: np.ndarray,
    parts: np.ndarray,
    rest: np.ndarray,
    products: np.ndarray,
) -> None:
    """out = left @ right for a float32 `left` and a bfloat16 `right`, by blocks of as many rows as `rest` has."""
    for first in range(0, len(left), len(rest)):
        some = slice(first, min(first + len(rest), len(left)))
        rows = some.stop - first
        split_float32(left[some], parts[: _PARTS * rows], rest[:rows])
        speed.multiply(parts[: _PARTS * rows], right, products[: _PARTS * rows])
        _sum_parts(products[: _PARTS * rows], out[some])


def _is_narrow(view: View) -> bool:
    return view.value.dtype == "bfloat16" and view.value.element.itemsize == 2


def split_float32(values: np.ndarray, parts: np.ndarray, rest: np.ndarray) -> None:
    """parts[0] + parts[1] + parts[2] = values without rounding: each part is the upper 8 bits of the remainder."""
    rows = len(values)
    np.copyto(rest, values)
    narrow = parts.view(np.uint16)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        for start in range(0, len(narrow), rows):
            part = narrow[start : start + rows]
            np.right_shift(rest.view(np.uint32), 16, out=part, casting="unsafe")
            np.subtract(rest, (part.astype(np.uint32) << 16).view(np.float32), out=rest)
    finite = np.isfinite(values)
    if not finite.all():
        narrow[:rows][np.isnan(values)] = _NAN
        narrow[rows:].reshape(_PARTS - 1, *values.shape)[:, ~finite] = 0


def _sum_parts(products: np.ndarray, out: np.ndarray) -> None:
    """out = the sum of the products of all parts."""
    upper, lower = products[: len(out)], products[len(out) :]
    _add_parts(upper, lower, out)
    if not np.isfinite(out).all():  # a lower part of zero times an infinite weight is NaN
        lower[~np.isfinite(lower)] = 0
        _add_parts(upper, lower, out)


def _add_parts(upper: np.ndarray, lower: np.ndarray, out: np.ndarray) -> None:
    rows = len(out)
    np.add(lower[:rows], lower[rows:], out=out)
    np.add(upper, out, out=out)
