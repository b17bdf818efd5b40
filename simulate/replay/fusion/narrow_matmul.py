"""Products with bfloat16 matrices that stay narrow: a library multiplies them as they lie, with float32 sums."""

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
from simulate.replay.fusion.opcodes import Step

_PARTS = 3
"""bfloat16 numbers whose sum is a float32: each holds 8 of its 24 bits. Of a float32 below 2**-103 the last bits may
be subnormal in bfloat16 and are lost, less than 2**-126."""

_SCRATCH = 1 << 22  # elements of the products of all parts
_NAN = 0x7FC0  # in bfloat16; one whose upper bits are those of infinity would turn into it
_WORTH_A_CALL = 1 << 18  # multiplications; with fewer, numpy widens and multiplies as fast
_WORTH_TORCH = 1 << 24  # multiplications; a call of torch costs about as much as a thousandth of that
_ROWS_FOR_TORCH = 64
"""Below, converting a matrix to and fro costs torch more than multiplying it: 16 rows took 27 ms of CPU time where
numpy took 16, 128 rows 35 where it took 61, with 2048 by 8192 weights."""


@dataclass(frozen=True, slots=True)
class NarrowProduct:
    """A product of bfloat16 matrices with float32 sums."""

    def steps(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[Step]:
        """One call."""
        left, right = reads
        out = writes[0]
        if speed.multiplies_as_they_lie():
            return [(speed.multiply, [left, right, out])]
        if views.count(left.shape) > views.count(right.shape):
            left, right, out = right.turned(), left.turned(), out.turned()
        blocks = block_shape(left.shape[0], *right.shape)
        return [(speed.multiply_widened, [left, right, out, *blocks])]


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """A product of a float32 and a bfloat16 matrix; further results are the scratch for some rows."""

    def steps(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[Step]:
        """One call."""
        return [(multiply, [*reads, *writes])]


def narrow_pair(op: Op) -> bool:
    """Whether a product of two bfloat16 matrices is faster than numpy's of their float32 copies."""
    (rows, depth), columns = op.reads[0].shape, op.reads[1].shape[1]
    work = rows * depth * columns
    if not all(map(_is_narrow, op.reads)):
        return False
    if speed.multiplies_as_they_lie():
        return work >= _WORTH_A_CALL
    return min(rows, columns) >= _ROWS_FOR_TORCH and work >= _WORTH_TORCH


def narrow_operand(op: Op) -> int | None:
    """Which operand is a large bfloat16 matrix while the other is float32, if oneMKL can multiply them."""
    for number, view in enumerate(op.reads):
        other = op.reads[1 - number]
        if _is_narrow(view) and views.count(view.shape) > LARGE and other.value.element == np.float32:
            return number if speed.multiplies_as_they_lie() else None
    return None


def split(builder: Builder, op: Op, number: int) -> None:
    """Let a product take its float32 operand apart; the narrow one becomes the right, as (A @ B).T = B.T @ A.T."""
    if number == 0:
        op.reads = (op.reads[1].turned(), op.reads[0].turned())
        op.writes = (op.writes[0].turned(),)
    (rows, depth), columns = op.reads[0].shape, op.reads[1].shape[1]
    at_once = max(1, min(rows, _SCRATCH // (_PARTS * max(depth, columns))))
    scratch = (
        builder.value(ValueKind.buffer, (_PARTS * at_once, depth), bfloat16),
        builder.value(ValueKind.buffer, (at_once, depth), float32),
        builder.value(ValueKind.buffer, (_PARTS * at_once, columns), float32),
    )
    op.work = SplitProduct()
    op.writes = (*op.writes, *map(View.whole, scratch))


def multiply(
    left: np.ndarray,
    right: np.ndarray,
    out: np.ndarray,
    parts: np.ndarray,
    rest: np.ndarray,
    products: np.ndarray,
) -> None:
    """out = left @ right for `left` in float32 and `right` in bfloat16, as many rows at once as `rest` has."""
    for first in range(0, len(left), len(rest)):
        some = slice(first, min(first + len(rest), len(left)))
        rows = some.stop - first
        _take_apart(left[some], parts[: _PARTS * rows], rest[:rows])
        speed.multiply(parts[: _PARTS * rows], right, products[: _PARTS * rows])
        _add_up(products[: _PARTS * rows], out[some])


def _is_narrow(view: View) -> bool:
    return view.value.dtype == "bfloat16" and view.value.element.itemsize == 2


def _take_apart(values: np.ndarray, parts: np.ndarray, rest: np.ndarray) -> None:
    """parts[0] + parts[1] + parts[2] = values, without a rounding: each takes the upper 8 bits of what is left."""
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


def _add_up(products: np.ndarray, out: np.ndarray) -> None:
    """The sum of the products of all parts."""
    upper, lower = products[: len(out)], products[len(out) :]
    _add_parts(upper, lower, out)
    if not np.isfinite(out).all():  # a part that is zero times a weight that is infinite is no number
        lower[~np.isfinite(lower)] = 0
        _add_parts(upper, lower, out)


def _add_parts(upper: np.ndarray, lower: np.ndarray, out: np.ndarray) -> None:
    rows = len(out)
    np.add(lower[:rows], lower[rows:], out=out)
    np.add(upper, out, out=out)
