"""The term of a product that comes from zero points: - zero[n] * sum over k of x[k, t], for weights of 4 bits.

The products multiply the nibbles alone. The term is one more block of their contraction, with a row for each of three
parts of the sums: the sum of a row of x in float32 is split into three numbers of 16 bits, which add up to it. The
rows lie on the first partition of three quadrants, where engines can begin. All others are zeros.

Weights that many rows meet lose their zero points in SBUF instead, see `load_centred_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.nibbles import SYMMETRIC_ZERO, UNIT
from nki_kernels.tiles import PARTITIONS, blocks, count_block_partitions, filled, load_repeated
from nki_kernels.weights import choose_operand_dtype, load_blocks_into

QUADRANT = PARTITIONS // 4
ROWS = 2 * QUADRANT + 1
"""Partitions of the block: the three parts are on 0, 32 and 64."""

LEAST_COLUMNS = 64
"""Columns of a moving operand, below which a matmul takes no less time."""


def fill_minus_ones(dtype):
    """Return a new SBUF tile [128, 128] of -1, with which `negate_sums` multiplies rows of `dtype`."""
    return filled((PARTITIONS, PARTITIONS), -1.0, dtype)


def negate_sums(x, depth, minus_ones):
    """Return the block of minus the sums of the rows of `x`, [ROWS, row] in SBUF in x's dtype.

    x: SBUF tile [k in block, block, row] with `depth` elements of each row. It is float32 or has 16 bits; float32 needs
    one part. minus_ones: result of `fill_minus_ones`.
    """
    return split_sums(add_up_rows(x, depth, minus_ones), x.dtype)


def add_up_rows(x, depth, minus_ones):
    """Return minus the sums of the rows of `x` on every partition, [128, block, row] in PSUM, still to be added up.

    A matmul of fewer than LEAST_COLUMNS columns takes no less time, so neighbouring blocks of few rows share one. Their
    sums are those of `together` blocks apart. The arguments are those of `negate_sums`.
    """
    rows, full = x.shape[2], depth // PARTITIONS
    together = 1
    while 2 * together * rows <= LEAST_COLUMNS and full % (2 * together) == 0 and full > 0:
        together = 2 * together
    bank = nl.ndarray((PARTITIONS, together, rows), dtype=nl.float32, buffer=nl.psum)
    for block in range(0, full, together):
        moving = x[:, block : block + together, :]
        nisa.nc_matmul(
            dst=bank, stationary=minus_ones[0 : x.shape[0], :], moving=moving, accumulate=block > 0
        )
    if full < blocks(depth):
        used = count_block_partitions(depth, full, False)
        last = x[0:used, full, :]
        nisa.nc_matmul(dst=bank[:, 0, :], stationary=minus_ones[0:used, :], moving=last, accumulate=full > 0)
    return bank


@dataclass
class NegatedSums(nl.NKIObject):
    """Minus the sums of rows, which are split into terms when the first product asks for them.

    bank: result of `add_up_rows`. dtype: the rows'. terms: result of `split_sums` once `split` has run, else None.
    """

    bank: nl.NkiTensor
    dtype: object
    terms: nl.NkiTensor | None = None

    def split(self):
        """Return the result of `split_sums`; the first call computes it on the Vector engine."""
        if self.terms is None:
            self.terms = split_sums(self.bank, self.dtype)
        return self.terms


def split_sums(bank, dtype):
    """Return the result of `negate_sums` in `dtype`, the rows', for what `add_up_rows` returned."""
    rows = bank.shape[2]
    sums = nl.ndarray((ROWS, rows), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=sums, value=0.0, engine=nisa.engine.vector)
    remaining = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    if bank.shape[1] == 1:
        nisa.tensor_copy(dst=remaining, src=bank[:, 0, :])
    else:
        nisa.tensor_reduce(dst=remaining, op=nl.add, data=bank.permute((0, 2, 1)), axis=2)
    for first in range(0, ROWS, QUADRANT):
        # Every partition has the sums, so each part is taken where its row lies.
        nisa.tensor_copy(dst=sums[first : first + 1, :], src=remaining[first : first + 1, :])
        if dtype == nl.float32:
            break
        if first + QUADRANT < ROWS:
            rounded = nl.ndarray((PARTITIONS, rows), dtype=dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=remaining)
            below = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=below, data1=remaining, data2=rounded, op=nl.subtract)
            remaining = below
    return sums


def load_zero_points(weights, dtype):
    """Return the zero points of weights of 4 bits in the block of `negate_sums`: [ROWS, weight, column] in SBUF.

    weights: list of WeightMatrix of equal width. dtype: of the tile, in which products take the weights' nibbles.
    """
    columns = weights[0].elements.shape[1]
    shape = (ROWS, len(weights), columns)
    if weights[0].nibbles.zeros is None:
        column = filled((ROWS, 1, 1), SYMMETRIC_ZERO * UNIT, dtype)
        return column.broadcast(1, len(weights)).broadcast(2, columns)
    raw = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    words = raw.view(nl.uint32) if columns % 4 == 0 else raw
    nisa.memset(dst=words, value=0, engine=nisa.engine.vector)
    for first in range(0, ROWS, QUADRANT):
        for side in range(len(weights)):
            transfer(raw[first : first + 1, side, :], weights[side].nibbles.zeros, SCALAR)
    if dtype == nl.float8_e4m3:
        return raw.view(dtype)
    zero_points = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=zero_points, op=nl.copy, data=raw, scale=UNIT)
    return zero_points


def load_zero_rows(matrix):
    """Return the zero points of a WeightMatrix of 4 bits as multiples of 2^-9, bfloat16 [k in block, column] in SBUF.

    They are the same on every partition. None without stored zero points, and for a weight of another format.
    """
    if matrix.nibbles is None or matrix.nibbles.zeros is None:
        return None
    repeated = load_repeated(matrix.nibbles.zeros, min(PARTITIONS, matrix.count_rows()))
    rows = nl.ndarray(repeated.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=rows, op=nl.copy, data=repeated, scale=UNIT)
    return rows


def load_centred_blocks(matrix, start, end, dtype, zero_rows, weight=None):
    """Load K blocks of a WeightMatrix of 4 bits without zero points into a new SBUF tile [k in block, block, column].

    (nibble - zero point) * 2^-9 is exact in `dtype`, bfloat16 or float32, and is rounded once where it is multiplied.
    Many rows meet such a weight without the term of `negate_sums`.

    Args:
        start, end: first K block, which is even, and the one behind the last.
        dtype: of the tile.
        zero_rows: result of `load_zero_rows` for the columns of the matrix.
        weight: float32 [k in block, block] in SBUF, by which the rows of the matrix are multiplied, or None.
    """
    depth, columns = matrix.count_rows(), matrix.elements.shape[1]
    shape = (min(PARTITIONS, depth), end - start, columns)
    raw = nl.ndarray(shape, dtype=choose_operand_dtype([matrix], dtype), buffer=nl.sbuf)
    rows = (start * PARTITIONS, min(depth, end * PARTITIONS))
    load_blocks_into(raw, matrix.submatrix(rows, (0, columns)), STATIC)
    centred = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    for block in range(end - start):
        used = count_block_partitions(depth, start + block, False)
        nibbles, dst = raw[0:used, block, :], centred[0:used, block, :]
        factor = 1.0 if weight is None else weight[0:used, start + block : start + block + 1]
        if zero_rows is None:
            nisa.tensor_scalar(
                dst=dst,
                data=nibbles,
                op0=nl.subtract,
                operand0=SYMMETRIC_ZERO * UNIT,
                op1=nl.multiply,
                operand1=factor,
            )
            continue
        difference = dst if weight is None else nl.ndarray(dst.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=difference, data1=nibbles, data2=zero_rows[0:used, :], op=nl.subtract)
        if weight is not None:
            nisa.tensor_scalar(dst=dst, data=difference, op0=nl.multiply, operand0=factor)
    return centred
