"""Matmuls with bfloat16 matrices that a library multiplies without widening them to float32; sums are float32.

The libraries are oneMKL and torch (`simulate.replay.fusion.speed`). A float32 operand of a bfloat16 one is split into
three bfloat16 terms, whose products are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.memory import views
from simulate.numerics.dtypes import bfloat16, float32
from simulate.replay.fusion import speed
from simulate.replay.fusion.blocked_matmul import LARGE, choose_block_shape
from simulate.replay.fusion.builder import Builder
from simulate.replay.fusion.graph import Op, ValueLocation, View
from simulate.replay.fusion.opcodes import NumpyCall

_TERMS = 3
"""Number of bfloat16 terms whose sum is a float32: each has 8 of its 24 bits. Below 2**-103 the last bits of a float32
may be subnormal in bfloat16 and are lost; the loss is less than 2**-126."""

_SCRATCH = 1 << 22  # elements of the products of all terms
_NAN = 0x7FC0  # quiet NaN in bfloat16; the upper half of another float32 NaN may be that of infinity
_ONEMKL_MULTIPLICATIONS_MIN = 1 << 18  # with fewer, numpy widens and multiplies as fast
_TORCH_MULTIPLICATIONS_MIN = 1 << 24  # a call of torch costs about as much as a thousandth of these
_TORCH_ROWS_MIN = 64
"""With fewer rows, converting a matrix costs torch more than multiplying it. With 2048 by 8192 weights, 16 rows took
27 ms of CPU time and numpy 16 ms; 128 rows took 35 ms and numpy 61 ms."""


@dataclass(frozen=True, slots=True)
class NarrowMatmul:
    """Opcode of a matmul of two bfloat16 matrices with float32 sums and a float32 result."""

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes `reads[0] @ reads[1]` to `writes[0]`.

        oneMKL multiplies if torch contains it, else torch.
        """
        left, right = reads
        out = writes[0]
        if speed.has_onemkl():
            return [(speed.multiply, [left, right, out])]
        if views.count(left.shape) > views.count(right.shape):
            left, right, out = right.transpose(), left.transpose(), out.transpose()
        blocks = choose_block_shape(left.shape[0], *right.shape)
        return [(speed.multiply_widened, [left, right, out, *blocks])]


@dataclass(frozen=True, slots=True)
class SplitMatmul:
    """Opcode of a matmul of a float32 and a bfloat16 matrix; results after the first are scratch for `multiply`."""

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes `reads[0] @ reads[1]` to `writes[0]`.

        `reads[0]` is float32, and the other results are scratch.
        """
        return [(multiply, [*reads, *writes])]


def is_narrow_matmul(op: Op) -> bool:
    """Return whether a library multiplies the two bfloat16 operands faster than numpy multiplies float32 copies."""
    (rows, depth), columns = op.reads[0].shape, op.reads[1].shape[1]
    multiplications = rows * depth * columns
    if not all(map(_is_narrow, op.reads)):
        return False
    if speed.has_onemkl():
        return multiplications >= _ONEMKL_MULTIPLICATIONS_MIN
    return min(rows, columns) >= _TORCH_ROWS_MIN and multiplications >= _TORCH_MULTIPLICATIONS_MIN


def find_narrow_operand(op: Op) -> int | None:
    """Return the position, 0 or 1, of a bfloat16 operand of more than LARGE elements whose other operand is float32.

    Returns None if there is no such operand or no oneMKL.
    """
    for number, view in enumerate(op.reads):
        other = op.reads[1 - number]
        if _is_narrow(view) and views.count(view.shape) > LARGE and other.value.element == np.float32:
            return number if speed.has_onemkl() else None
    return None


def transpose_matmul(op: Op) -> None:
    """Replace a matmul C = A @ B by C.T = B.T @ A.T: operands and result become transposed views, in place."""
    op.reads = (op.reads[1].transpose(), op.reads[0].transpose())
    op.writes = (op.writes[0].transpose(),)


def split_matmul(builder: Builder, op: Op, number: int) -> None:
    """Make a matmul split its float32 operand, with new scratch buffers; the bfloat16 one becomes the right operand.

    Args:
        builder: The program.
        op: The matmul, which is changed.
        number: The position of the bfloat16 operand.
    """
    if number == 0:
        transpose_matmul(op)
    (rows, depth), columns = op.reads[0].shape, op.reads[1].shape[1]
    block_rows = max(1, min(rows, _SCRATCH // (_TERMS * max(depth, columns))))
    scratch = (
        builder.add_value(ValueLocation.buffer, (_TERMS * block_rows, depth), bfloat16),
        builder.add_value(ValueLocation.buffer, (block_rows, depth), float32),
        builder.add_value(ValueLocation.buffer, (_TERMS * block_rows, columns), float32),
    )
    op.opcode = SplitMatmul()
    op.writes = (*op.writes, *map(View.full, scratch))


def multiply(
    left: np.ndarray,
    right: np.ndarray,
    out: np.ndarray,
    terms: np.ndarray,
    remainder: np.ndarray,
    products: np.ndarray,
) -> None:
    """Write left @ right to `out`, in blocks of as many rows as `remainder` has.

    Args:
        left: float32 [rows, depth], which is split into bfloat16 terms.
        right: bfloat16 [depth, columns].
        out: float32 [rows, columns].
        terms: Scratch, bfloat16 [3 * block rows, depth].
        remainder: Scratch, float32 [block rows, depth].
        products: Scratch, float32 [3 * block rows, columns].
    """
    for first in range(0, len(left), len(remainder)):
        block_rows = slice(first, min(first + len(remainder), len(left)))
        rows = block_rows.stop - first
        split_float32(left[block_rows], terms[: _TERMS * rows], remainder[:rows])
        speed.multiply(terms[: _TERMS * rows], right, products[: _TERMS * rows])
        _sum_terms(products[: _TERMS * rows], out[block_rows])


def _is_narrow(view: View) -> bool:
    """Return whether a view has bfloat16 elements that are stored in two bytes."""
    return view.value.dtype == "bfloat16" and view.value.element.itemsize == 2


def split_float32(values: np.ndarray, terms: np.ndarray, remainder: np.ndarray) -> None:
    """Split float32 values into three bfloat16 terms that add up to them without rounding.

    Each term is the upper half of the remainder's bits. The first term alone represents infinities and NaN.

    Args:
        values: float32 [rows, depth].
        terms: bfloat16 [3 * rows, depth], which receives all first terms, then all second and third ones.
        remainder: Scratch, float32 [rows, depth].
    """
    rows = len(values)
    np.copyto(remainder, values)
    term_bits = terms.view(np.uint16)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        for start in range(0, len(term_bits), rows):
            term = term_bits[start : start + rows]
            np.right_shift(remainder.view(np.uint32), 16, out=term, casting="unsafe")
            np.subtract(remainder, (term.astype(np.uint32) << 16).view(np.float32), out=remainder)
    finite = np.isfinite(values)
    if not finite.all():
        term_bits[:rows][np.isnan(values)] = _NAN
        term_bits[rows:].reshape(_TERMS - 1, *values.shape)[:, ~finite] = 0


def _sum_terms(products: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of the products of all three terms to `out`.

    Products of lower terms that are not finite count as 0 if a sum is not finite: a term of zero times an infinite
    weight is NaN.

    Args:
        products: float32 [3 * rows, columns], those of the first terms first.
        out: float32 [rows, columns].
    """
    upper, lower = products[: len(out)], products[len(out) :]
    _add_terms(upper, lower, out)
    if not np.isfinite(out).all():  # a lower term of zero times an infinite weight is NaN
        lower[~np.isfinite(lower)] = 0
        _add_terms(upper, lower, out)


def _add_terms(upper: np.ndarray, lower: np.ndarray, out: np.ndarray) -> None:
    """Write upper + (the sum of the two halves of `lower`) to `out`."""
    rows = len(out)
    np.add(lower[:rows], lower[rows:], out=out)
    np.add(upper, out, out=out)
