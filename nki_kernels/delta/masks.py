"""Constant tiles of a chunk of 128 tokens: triangles, and which blocks a level of the triangular inverse fills."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import MASKED, PARTITIONS

HALF = PARTITIONS // 2
"""Tokens of the two halves of a chunk, whose triangles are inverted side by side."""

LEVELS = (1, 2, 4, 8, 16, 32)
"""Sizes of the blocks that a level joins two by two, inside a half."""


def triangle(dtype, value, fill, comparison, step):
    """A tile [128, 128] of `value` where step * (column - row) compares with 0, and of `fill` elsewhere."""
    tile = nl.ndarray((PARTITIONS, PARTITIONS), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    nisa.affine_select(
        dst=tile,
        pattern=[[step, PARTITIONS]],
        channel_multiplier=-step,
        on_true_tile=tile,
        on_false_value=fill,
        cmp_op=comparison,
    )
    return tile


def constants(dtype):
    """Triangles of ones [t, i], of zeros beside `MASKED`, identities, and the masks of the levels."""
    return {
        "until": triangle(nl.float32, 1.0, 0.0, nl.greater_equal, 1),  # t <= i
        "after": triangle(nl.float32, 1.0, 0.0, nl.less, 1),  # t > j
        "ones": triangle(nl.float32, 1.0, 1.0, nl.equal, 1),
        "seen": triangle(dtype, 0.0, MASKED, nl.greater_equal, 1),  # j <= i
        "identity": triangle(dtype, 1.0, 0.0, nl.equal, 1),
        "halves": apart_by(dtype, nl.equal),
        "levels": level_masks(dtype),
    }


def apart_by(dtype, comparison):
    """Ones where column and row of a half compare so: [row of both halves, column]."""
    tile = nl.ndarray((PARTITIONS, HALF), dtype=dtype, buffer=nl.sbuf)
    row, column = places()
    nisa.tensor_tensor(dst=tile, data1=column, data2=row, op=comparison)
    return tile


def places():
    """The row in its half and the column of each element [128, 64], int32."""
    shape = (PARTITIONS, HALF)
    row = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[0, HALF]], channel_multiplier=1)
    nisa.tensor_scalar(dst=row, data=row, op0=nl.bitwise_and, operand0=HALF - 1)
    column = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=column, pattern=[[1, HALF]])
    return row, column


def level_masks(dtype):
    """Ones where level after level joins two blocks, [row of both halves, level, column], right of the diagonal.

    Row r and column c lie in neighbouring blocks of w that form one of 2w just where w <= r ^ c < 2w.
    """
    row, column = places()
    apart = nl.ndarray(row.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=apart, data1=row, data2=column, op=nl.bitwise_xor)
    side = nl.ndarray(row.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=side, data1=column, data2=row, op=nl.greater)
    nisa.tensor_tensor(dst=side, data1=side, data2=apart, op=nl.multiply)
    masks = nl.ndarray((PARTITIONS, len(LEVELS), HALF), dtype=dtype, buffer=nl.sbuf)
    reached = at_least(side, LEVELS[0])
    for level in range(len(LEVELS)):
        beyond = at_least(side, 2 * LEVELS[level])
        nisa.tensor_tensor(dst=masks[:, level, :], data1=reached, data2=beyond, op=nl.subtract)
        reached = beyond
    return masks


def at_least(side, size):
    """Ones where an element reaches a size."""
    result = nl.ndarray(side.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=side, op0=nl.greater_equal, operand0=float(size))
    return result
