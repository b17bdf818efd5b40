"""Rows that a norm has scaled, and their transposes: what every product of normalised rows begins with.

A row tile is [up to 128 rows, H]. The Scalar engine takes the statistics, the Vector engine scales. Then the Tensor
engine transposes the rows into blocks [h in block, block, row], see `tiles`.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, load, psum_slots, slot_width

SCRATCH_ELEMENTS = 2048
"""Elements per partition of the tile for squares, of which only the sum is used."""

BANK_BYTES = 4 * BANK


def load_norm(norm_weight, norm_bias, norm_offset, eps, rows, dtype):
    """What a norm needs on each of up to `rows` rows: weight + offset, bias or None, and eps as a column.

    A sum of weight and offset is kept in float32.
    """
    weight = on_every_row(norm_weight, rows, dtype if norm_offset == 0.0 else nl.float32, norm_offset)
    bias = None if norm_bias is None else on_every_row(norm_bias, rows, dtype, 0.0)
    epsilon = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=epsilon, value=eps)
    return weight, bias, epsilon


def on_every_row(row, rows, dtype, offset):
    """A row [1, n] of HBM plus a number, on each of `rows` partitions: its product with a column of ones."""
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


def statistics(tile, norm, scratch):
    """Of the rows of a tile [rows, H] the columns (minus the mean or None, 1 / root mean square).

    A norm with a bias is LayerNorm, which subtracts the mean first.
    """
    rows, columns = tile.shape
    sums = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    scale = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    center = None
    if norm[1] is not None:
        center = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        sum_of(nl.copy, tile, None, sums, scratch)
        nisa.tensor_scalar(dst=center, data=sums, op0=nl.multiply, operand0=-1.0 / columns)
    sum_of(nl.square, tile, center, sums, scratch)
    nisa.activation(dst=scale, op=nl.rsqrt, data=sums, scale=1.0 / columns, bias=norm[2][0:rows, :])
    return center, scale


def normalise(dst, tile, found, norm):
    """dst = the rows of a tile, normalised by what `statistics` found; dst may be the tile. Rounds once."""
    rows, columns = tile.shape
    weight, bias = norm[0], norm[1]
    center, scale = found
    if bias is None:
        nisa.scalar_tensor_tensor(
            dst=dst,
            data=tile,
            op0=nl.multiply,
            operand0=scale,
            op1=nl.multiply,
            operand1=weight[0:rows, :],
        )
        return
    for first in range(0, columns, SCRATCH_ELEMENTS):
        last = min(columns, first + SCRATCH_ELEMENTS)
        weighted = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=weighted,
            data=tile[:, first:last],
            op0=nl.add,
            operand0=center,
            op1=nl.multiply,
            operand1=weight[0:rows, first:last],
        )
        nisa.scalar_tensor_tensor(
            dst=dst[:, first:last],
            data=weighted,
            op0=nl.multiply,
            operand0=scale,
            op1=nl.add,
            operand1=bias[0:rows, first:last],
        )


def sum_of(function, tile, center, sums, scratch):
    """The sum over each row of function(element + center), in float32; `scratch` takes the terms."""
    rows, columns = tile.shape
    for first in range(0, columns, SCRATCH_ELEMENTS):
        last = min(columns, first + SCRATCH_ELEMENTS)
        command = nisa.reduce_cmd.reset_reduce if first == 0 else nisa.reduce_cmd.reduce
        nisa.activation(
            dst=scratch[0:rows, 0 : last - first],
            op=function,
            data=tile[:, first:last],
            bias=center,
            reduce_op=nl.add,
            reduce_res=sums if last == columns else None,
            reduce_cmd=command,
        )


def transpose_rows(result, first_row, tile, vector_share=0):
    """Write a tile [rows, n] as blocks into rows first_row … of `result` [h in block, block, row].

    As many transposes as fit share a PSUM bank. The Scalar engine copies the banks to SBUF; of every `vector_share`
    of them the Vector engine copies one, none if that is 0.
    """
    rows, columns = tile.shape
    width = result.shape[0]
    full = columns // width
    itemsize = 4 if tile.dtype == nl.float32 else 2
    per_bank = BANK_BYTES // itemsize // slot_width(rows, tile.dtype)
    end_row = first_row + rows
    copies = 0
    for first in range(0, full, per_bank):
        count = min(per_bank, full - first)
        bank = psum_slots(width, count, rows, tile.dtype)
        for i in range(count):
            start = (first + i) * width
            nisa.nc_transpose(dst=bank[:, i, :], data=tile[:, start : start + width])
        to_sbuf(result[:, first : first + count, first_row:end_row], bank, copies, vector_share)
        copies += 1
    short = columns - full * width
    if short > 0:
        bank = nl.ndarray((short, rows), dtype=tile.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=tile[:, full * width : columns])
        to_sbuf(result[0:short, full, first_row:end_row], bank, copies, vector_share)


def to_sbuf(dst, bank, number, vector_share, factor=None):
    """Copy a PSUM bank to SBUF on the Vector engine if it is the first of `vector_share`, else on the Scalar engine.

    factor: a float32 column that multiplies its rows, or None.
    """
    if vector_share == 0 or number % vector_share != 0:
        nisa.activation(dst=dst, op=nl.copy, data=bank, scale=1.0 if factor is None else factor)
    elif factor is None:
        nisa.tensor_copy(dst=dst, src=bank)
    else:
        nisa.tensor_scalar(dst=dst, data=bank, op0=nl.multiply, operand0=factor)
