"""Rows of activations before a product: their norm, and their transpose with the contraction on the partitions.

A row of H elements is spread over the partitions in one of two ways, and the rows of the weight that it meets likewise:

- in *blocks*: element h on partition h % 128, in block h // 128, as `tiles` has it;
- in *runs*: with C = ceil(H / 128), elements p * C … p * C + C - 1 on partition p, element i of each in block i. A
  partition's part of a weight then is one piece of HBM, which a DMA reads at its full rate.

The order of summation differs, the sum does not. RMSNorm needs no normalised rows: its weight is multiplied into one of
the operands, and 1 / rms, one number for each row, is applied to what leaves PSUM.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, blocks, cast, psum_slots, ranges, slot_width

SQUARED_BLOCKS = 16
"""Blocks whose squares are added on the Vector engine, while the Scalar engine squares the next ones."""

STATISTICS = 512
"""Elements of which bn_stats takes the mean and the variance (nl.tile_size.bn_stats_fmax)."""

SCALAR_SHARE = 2
"""Of so many PSUM banks of 128 transposed rows the Scalar engine weights and shifts one."""

BANK_BYTES = 2048
"""Bytes per partition of a PSUM bank, which transposes fill."""


def in_block(depth, block, runs):
    """Partitions that a block of a row of `depth` elements takes."""
    if runs:
        return (depth - block + blocks(depth) - 1) // blocks(depth)
    return min(PARTITIONS, depth - block * PARTITIONS)


def column_of(row, offset, runs):
    """A row [1, H] of HBM spread over the partitions: [partition, block] in float32, plus a number."""
    depth = row.shape[1]
    count = blocks(depth)
    height = in_block(depth, 0, runs)
    result = nl.ndarray((height, count), dtype=nl.float32, buffer=nl.sbuf)
    if runs:
        raw = nl.ndarray((height, count), dtype=row.dtype, buffer=nl.sbuf)
        load_runs(raw, row)
    else:
        lines = nl.ndarray((count, height), dtype=row.dtype, buffer=nl.sbuf)
        full = depth // height
        if full < count:
            nisa.memset(dst=lines, value=0.0)
            nisa.dma_copy(dst=lines[full:count, 0 : depth - full * height], src=row[:, full * height : depth])
        nisa.dma_copy(dst=lines[0:full, :], src=row[:, 0 : full * height].reshape((full, height)))
        raw = nl.ndarray((height, count), dtype=row.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=raw, data=lines)
    nisa.tensor_scalar(dst=result, data=raw, op0=nl.add, operand0=offset)
    return result


def load_runs(result, row):
    """A row [1, H] of HBM in runs: [partition, block]; what the last partition lacks becomes 0."""
    depth = row.shape[1]
    count = blocks(depth)
    full = depth // count
    if full < result.shape[0]:
        nisa.memset(dst=result, value=0.0)
        nisa.dma_copy(dst=result[full : full + 1, 0 : depth - full * count], src=row[:, full * count : depth])
    source = row[:, 0 : full * count].reshape((full, count))
    transfer(result[0:full, :], source, SCALAR)


def inverse_rms(rows, eps):
    """1 / sqrt(mean of the squares + eps) for each row of a tile [rows <= 128, H]: [rows, 1] float32."""
    count, width = rows.shape
    squares = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    unused = nl.ndarray(rows.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(
        dst=unused,
        op=nl.square,
        data=rows,
        reduce_op=nl.add,
        reduce_res=squares,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    return inverse_root(squares, 1.0 / width, eps)


def squared(x, first, depth):
    """The squares of blocks [k in block, block, row] of transposed rows, from block `first` on, added up.

    Returns [k in block, group, row]: a group for each SQUARED_BLOCKS whole blocks, and one for a short block.
    """
    height, count, rows = x.shape
    full = max(0, min(count, depth // PARTITIONS - first))
    groups = ranges(0, full, SQUARED_BLOCKS) + ranges(full, count)
    result = nl.ndarray((height, len(groups), rows), dtype=x.dtype, buffer=nl.sbuf)
    for group in range(len(groups)):
        start, end = groups[group]
        used = in_block(depth, first + start, False)
        target = result[0:used, group : group + 1, :]
        squares = target
        if end - start > 1:
            squares = nl.ndarray((used, end - start, rows), dtype=x.dtype, buffer=nl.sbuf)
        nisa.activation(dst=squares, op=nl.square, data=x[0:used, start:end, :])
        add_blocks(target, squares)
    return result


def add_blocks(result, tile):
    """The sum of all blocks of a tile [partition, block, row], half of them added to the other half at a time."""
    count = tile.shape[1]
    while count > 1:
        half = count // 2
        added = result
        if half > 1:
            added = nl.ndarray((tile.shape[0], half, tile.shape[2]), dtype=tile.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=added, data1=tile[:, 0:half, :], data2=tile[:, half : 2 * half, :], op=nl.add)
        if count > 2 * half:
            odd = tile[:, 2 * half : count, :]
            nisa.tensor_tensor(dst=added[:, 0:1, :], data1=added[:, 0:1, :], data2=odd, op=nl.add)
        tile = added
        count = half


def add_squares(sums, squares, ones, tiles, first, end, depth):
    """Add the squares of blocks first … end, as `squared` gives them, to the sums of rows: one column a row tile.

    A sum over partitions is a product with `ones`, a column.
    """
    groups = squares.shape[1]
    for group in range(groups):
        used = in_block(depth, end - 1, False) if group == groups - 1 else PARTITIONS
        for tile in range(len(tiles)):
            left, right = tiles[tile]
            nisa.nc_matmul(
                dst=sums[tile][0],
                stationary=squares[0:used, group, left:right],
                moving=ones[0:used, :],
                accumulate=first + group > 0,
            )


def constant(rows, value):
    """A float32 column [rows, 1] of one value, such as the eps of a norm."""
    result = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=result, value=value)
    return result


def inverse_root(squares, scale, eps):
    """1 / sqrt(squares * scale + eps), a tile of the same shape; eps: a column of at least as many rows."""
    result = nl.ndarray(squares.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.rsqrt, data=squares, scale=scale, bias=eps[0 : squares.shape[0], :])
    return result


def standardise(rows, eps):
    """Rows [rows, H] in SBUF less their mean and over their standard deviation, in place."""
    count, width = rows.shape
    groups = blocks(width, STATISTICS)
    statistics = nl.ndarray((count, 6 * groups), dtype=nl.float32, buffer=nl.sbuf)
    for group in range(groups):
        part = rows[:, group * STATISTICS : min(width, (group + 1) * STATISTICS)]
        nisa.bn_stats(dst=statistics[:, 6 * group : 6 * group + 6], data=part)
    moments = nl.ndarray((count, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_aggr(dst=moments, data=statistics)
    scale = inverse_root(moments[:, 1:2], 1.0, eps)
    nisa.tensor_scalar(
        dst=rows, data=rows, op0=nl.subtract, operand0=moments[:, 0:1], op1=nl.multiply, operand1=scale
    )


def spread(rows, runs, weight=None, bias=None):
    """Rows [rows, H] in SBUF transposed, [partition, block, row], by the Tensor engine; see `spread_into`."""
    count, depth = rows.shape
    shape = (in_block(depth, 0, runs), blocks(depth), count)
    result = nl.ndarray(shape, dtype=rows.dtype, buffer=nl.sbuf)
    spread_into(result, rows, runs, weight, bias)
    return result


def spread_into(result, rows, runs, weight=None, bias=None, shared=False):
    """Rows [rows, H] in SBUF transposed to `result` [partition, block, row].

    weight, bias: what each element is multiplied by and what is added to it, as `column_of` gives them. As many
    transposes as fit share a PSUM bank, which one instruction moves to SBUF. Without a weight the Scalar engine moves
    one of SCALAR_SHARE if they are `shared`.
    """
    count, depth = rows.shape
    number = blocks(depth)
    per_bank = BANK_BYTES // (4 if rows.dtype == nl.float32 else 2) // slot_width(count, rows.dtype)
    first = banks = 0
    while first < number:
        used = in_block(depth, first, runs)
        end = first + 1
        while end < min(number, first + per_bank) and in_block(depth, end, runs) == used:
            end += 1
        bank = psum_slots(used, end - first, count, rows.dtype)
        for block in range(first, end):
            piece = (
                rows[:, block:depth:number]
                if runs
                else rows[:, block * PARTITIONS : block * PARTITIONS + used]
            )
            nisa.nc_transpose(dst=bank[:, block - first, :], data=piece)
        target = result[0:used, first:end, :]
        if bias is not None and count == PARTITIONS and banks % SCALAR_SHARE == 0:
            weighted_by_block(target, bank, weight, bias, first)
        elif shared and banks % SCALAR_SHARE == 0:
            nisa.activation(dst=target, op=nl.copy, data=bank)
        else:
            weighted(target, bank, weight, bias, first)
        banks += 1
        first = end


def weighted(target, source, weight, bias, first):
    """Write source * weight + bias, with columns of weight and bias from `first` on repeated along the rows."""
    used, count, rows = source.shape
    if weight is None:
        nisa.tensor_copy(dst=target, src=source)
        return
    factor = weight[0:used, first : first + count].reshape((used, count, 1)).broadcast(2, rows)
    product = target
    if bias is not None:
        product = nl.ndarray(source.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=source, data2=factor, op=nl.multiply)
    if bias is not None:
        added = bias[0:used, first : first + count].reshape((used, count, 1)).broadcast(2, rows)
        adder = nisa.engine.gpsimd if rows == PARTITIONS else nisa.engine.vector
        nisa.tensor_tensor(dst=target, data1=product, data2=added, op=nl.add, engine=adder)


def weighted_by_block(target, source, weight, bias, first):
    """As `weighted`, on the Scalar engine, block by block."""
    used, count, _ = source.shape
    for block in range(count):
        at = first + block
        nisa.activation(
            dst=target[:, block, :],
            op=nl.copy,
            data=source[:, block, :],
            scale=weight[0:used, at : at + 1],
            bias=bias[0:used, at : at + 1],
        )


def repeated_row(row, rows, offset=0.0):
    """A row [1, n] of HBM on each of `rows` partitions, in float32, plus a number."""
    columns = row.shape[1]
    tile = nl.ndarray((rows, columns), dtype=row.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=row.ap(pattern=[[0, rows], [1, columns]]))
    if offset == 0.0:
        return cast(tile, nl.float32)
    result = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=tile, op0=nl.add, operand0=offset)
    return result
