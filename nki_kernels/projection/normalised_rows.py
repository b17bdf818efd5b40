"""RMSNorm and LayerNorm of row tiles, and the transpose that makes them an operand of a product.

A row tile is [row, H] with up to 128 rows. The Scalar engine reduces each row to its statistics. The Vector engine
scales the row. The Tensor engine transposes the tile into K blocks [h in block, block, row], see `tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, load, psum_slots, slot_width

SCRATCH_ELEMENTS = 2048
"""Elements per partition of the scratch tile for the terms of a row sum."""

BANK_BYTES = 4 * BANK


@dataclass
class Norm(nl.NKIObject):
    """Operands of a norm in SBUF, repeated on every partition that a row tile uses.

    weight: [row, H], offset included. bias: [row, H] for LayerNorm, None for RMSNorm. eps: [row, 1] float32.
    scratch: [row, SCRATCH_ELEMENTS or H], which row sums overwrite with their terms.
    """

    weight: nl.NkiTensor
    bias: nl.NkiTensor | None
    eps: nl.NkiTensor
    scratch: nl.NkiTensor


@dataclass
class RowStatistics(nl.NKIObject):
    """Statistics of each row of a tile, [row, 1] float32: -mean, which RMSNorm lacks; and 1 / rms or 1 / std."""

    negative_mean: nl.NkiTensor | None
    rstd: nl.NkiTensor


def row_scratch(rows, hidden, dtype):
    """Allocate the scratch tile for the row sums of tiles of up to `rows` rows of `hidden` elements."""
    return nl.ndarray((rows, min(hidden, SCRATCH_ELEMENTS)), dtype=dtype, buffer=nl.sbuf)


def load_norm(norm_weight, norm_bias, norm_offset, eps, scratch, dtype):
    """Load a norm's weight [1, H] and bias [1, H] or None, for row tiles of as many rows as `scratch` has.

    With an offset, weight + offset is kept in float32; everything else in `dtype`.
    """
    rows = scratch.shape[0]
    weight = on_every_row(norm_weight, rows, dtype if norm_offset == 0.0 else nl.float32, norm_offset)
    bias = None if norm_bias is None else on_every_row(norm_bias, rows, dtype, 0.0)
    eps_column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=eps_column, value=eps)
    return Norm(weight, bias, eps_column, scratch)


def on_every_row(row, rows, dtype, offset):
    """Broadcast a row [1, n] of HBM, plus a constant, to `rows` partitions, by a product with a column of ones."""
    columns = row.shape[1]
    tile = load(row, row.dtype)
    result = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.sbuf)
    if rows == 1:
        nisa.tensor_scalar(dst=result, data=tile, op0=nl.add, operand0=offset)
        return result
    ones = nl.ndarray((1, rows), dtype=row.dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    for first in range(0, columns, BANK):
        last = min(columns, first + BANK)
        bank = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=ones, moving=tile[:, first:last], accumulate=False)
        nisa.tensor_scalar(dst=result[:, first:last], data=bank, op0=nl.add, operand0=offset)
    return result


def row_statistics(tile, norm):
    """Compute the statistics of each row of a tile [row, H] on the Scalar engine. LayerNorm subtracts the mean."""
    rows, columns = tile.shape
    sums = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    rstd = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    negative_mean = None
    if norm.bias is not None:
        negative_mean = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        sum_rows(sums, nl.copy, tile, None, norm.scratch)
        nisa.tensor_scalar(dst=negative_mean, data=sums, op0=nl.multiply, operand0=-1.0 / columns)
    sum_rows(sums, nl.square, tile, negative_mean, norm.scratch)
    nisa.activation(dst=rstd, op=nl.rsqrt, data=sums, scale=1.0 / columns, bias=norm.eps[0:rows, :])
    return RowStatistics(negative_mean, rstd)


def normalise(dst, tile, statistics, norm):
    """Normalise the rows of a tile into dst, on the Vector engine, rounded once; dst may be the tile itself."""
    rows, columns = tile.shape
    if norm.bias is None:
        nisa.scalar_tensor_tensor(
            dst=dst,
            data=tile,
            op0=nl.multiply,
            operand0=statistics.rstd,
            op1=nl.multiply,
            operand1=norm.weight[0:rows, :],
        )
        return
    for first in range(0, columns, SCRATCH_ELEMENTS):
        last = min(columns, first + SCRATCH_ELEMENTS)
        weighted = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=weighted,
            data=tile[:, first:last],
            op0=nl.add,
            operand0=statistics.negative_mean,
            op1=nl.multiply,
            operand1=norm.weight[0:rows, first:last],
        )
        nisa.scalar_tensor_tensor(
            dst=dst[:, first:last],
            data=weighted,
            op0=nl.multiply,
            operand0=statistics.rstd,
            op1=nl.add,
            operand1=norm.bias[0:rows, first:last],
        )


def sum_rows(dst, op, tile, shift, scratch):
    """Sum op(element + shift) over each row into dst [row, 1], in float32; the terms go to `scratch`."""
    rows, columns = tile.shape
    for first in range(0, columns, SCRATCH_ELEMENTS):
        last = min(columns, first + SCRATCH_ELEMENTS)
        command = nisa.reduce_cmd.reset_reduce if first == 0 else nisa.reduce_cmd.reduce
        nisa.activation(
            dst=scratch[0:rows, 0 : last - first],
            op=op,
            data=tile[:, first:last],
            bias=shift,
            reduce_op=nl.add,
            reduce_res=dst if last == columns else None,
            reduce_cmd=command,
        )


def transpose_rows(result, first_row, tile, vector_share=0):
    """Transpose a tile [row, n] into rows `first_row` … of the K blocks `result` [k in block, block, row].

    As many transposes as fit share a PSUM bank, which one copy moves to SBUF; for `vector_share` see `copy_bank`.
    """
    rows, columns = tile.shape
    width = result.shape[0]
    full = columns // width
    itemsize = 4 if tile.dtype == nl.float32 else 2
    blocks_per_bank = BANK_BYTES // itemsize // slot_width(rows, tile.dtype)
    end_row = first_row + rows
    copies = 0
    for first in range(0, full, blocks_per_bank):
        count = min(blocks_per_bank, full - first)
        bank = psum_slots(width, count, rows, tile.dtype)
        for i in range(count):
            start = (first + i) * width
            nisa.nc_transpose(dst=bank[:, i, :], data=tile[:, start : start + width])
        copy_bank(result[:, first : first + count, first_row:end_row], bank, copies, vector_share)
        copies += 1
    short = columns - full * width
    if short > 0:
        bank = nl.ndarray((short, rows), dtype=tile.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=tile[:, full * width : columns])
        copy_bank(result[0:short, full, first_row:end_row], bank, copies, vector_share)


def copy_bank(dst, bank, index, vector_share, row_scale=None):
    """Copy PSUM bank number `index` to SBUF, its rows times a float32 column `row_scale`, if there is one.

    The Vector engine copies every `vector_share`-th bank (0: none), the Scalar engine the others.
    """
    if vector_share == 0 or index % vector_share != 0:
        nisa.activation(dst=dst, op=nl.copy, data=bank, scale=1.0 if row_scale is None else row_scale)
    elif row_scale is None:
        nisa.tensor_copy(dst=dst, src=bank)
    else:
        nisa.tensor_scalar(dst=dst, data=bank, op0=nl.multiply, operand0=row_scale)
