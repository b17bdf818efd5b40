"""Norms of transposed rows, whose elements lie on the partitions: [element in block, block, row].

The blocks are those of `tiles`, or runs: with C = ceil(H / 128), elements p * C … p * C + C - 1 lie on partition p,
element i of each in block i. RMSNorm needs no normalised rows before a product: its weight is multiplied into one of
the operands, and 1 / rms, one number for each row, is applied to what leaves PSUM.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS, blocks, in_block, ranges

SQUARED_BLOCKS = 16
"""Blocks whose squares are added on the Vector engine, while the Scalar engine squares the next ones."""


@dataclass
class BlockNorm(nl.NKIObject):
    """Operands of a norm in SBUF: weight and bias as `column_of` gives them, or None; eps: [row, 1] float32."""

    weight: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    eps: nl.NkiTensor


def load_norm_blocks(norm, eps, runs):
    """Load weight, offset and bias of a norm in blocks, or in runs. eps: column of the norm's eps."""
    weight = None if norm.weight is None else column_of(norm.weight, norm.offset, runs)
    bias = None if norm.bias is None else column_of(norm.bias, 0.0, runs)
    return BlockNorm(weight, bias, eps)


def column_of(row, offset, runs):
    """Spread a row [1, H] of HBM over the partitions: [partition, block] float32, plus a number."""
    depth = row.shape[1]
    count = blocks(depth)
    height = in_block(depth, 0, runs)
    column = nl.ndarray((height, count), dtype=nl.float32, buffer=nl.sbuf)
    if runs:
        raw = nl.ndarray((height, count), dtype=row.dtype, buffer=nl.sbuf)
        load_runs(raw, row)
    else:
        # In blocks a partition's elements lie 128 apart in HBM, so whole lines are loaded and transposed on chip.
        lines = nl.ndarray((count, height), dtype=row.dtype, buffer=nl.sbuf)
        full = depth // height
        if full < count:
            # On gen2 a transpose is a product, in which a NaN behind the short line would spread to other elements.
            nisa.memset(dst=lines, value=0.0)
            nisa.dma_copy(dst=lines[full:count, 0 : depth - full * height], src=row[:, full * height : depth])
        nisa.dma_copy(dst=lines[0:full, :], src=row[:, 0 : full * height].reshape((full, height)))
        raw = nl.ndarray((height, count), dtype=row.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=raw, data=lines)
    nisa.tensor_scalar(dst=column, data=raw, op0=nl.add, operand0=offset)
    return column


def load_runs(column, row):
    """Load a row [1, H] of HBM in runs: [partition, block]; what the last partition lacks becomes 0."""
    depth = row.shape[1]
    count = blocks(depth)
    full = depth // count
    if full < column.shape[0]:
        nisa.memset(dst=column, value=0.0)
        nisa.dma_copy(dst=column[full : full + 1, 0 : depth - full * count], src=row[:, full * count : depth])
    source = row[:, 0 : full * count].reshape((full, count))
    transfer(column[0:full, :], source, SCALAR)


def squared(x, first, depth):
    """Square blocks [k in block, block, row] of transposed rows, from block `first` on, and add them up.

    Returns [k in block, group, row]: a group for each SQUARED_BLOCKS whole blocks, and one for a short block.
    """
    height, count, rows = x.shape
    full = max(0, min(count, depth // PARTITIONS - first))
    groups = ranges(0, full, SQUARED_BLOCKS) + ranges(full, count)
    sums = nl.ndarray((height, len(groups), rows), dtype=x.dtype, buffer=nl.sbuf)
    for group in range(len(groups)):
        start, end = groups[group]
        used = in_block(depth, first + start, False)
        target = sums[0:used, group : group + 1, :]
        squares = target
        if end - start > 1:
            squares = nl.ndarray((used, end - start, rows), dtype=x.dtype, buffer=nl.sbuf)
        nisa.activation(dst=squares, op=nl.square, data=x[0:used, start:end, :])
        add_blocks(target, squares)
    return sums


def add_blocks(total, tile):
    """Sum all blocks of a tile [partition, block, row], half of them added to the other half at a time."""
    count = tile.shape[1]
    while count > 1:
        half = count // 2
        added = total
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


def weighted(target, source, norm, first):
    """Write source * weight + bias of a BlockNorm, from block `first` on, or copy the source without a norm."""
    used, count, rows = source.shape
    if norm is None or norm.weight is None:
        nisa.tensor_copy(dst=target, src=source)
        return
    factor = norm.weight[0:used, first : first + count].reshape((used, count, 1)).broadcast(2, rows)
    product = target
    if norm.bias is not None:
        product = nl.ndarray(source.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=source, data2=factor, op=nl.multiply)
    if norm.bias is not None:
        added = norm.bias[0:used, first : first + count].reshape((used, count, 1)).broadcast(2, rows)
        # The Vector engine alone would hold up the products of a prompt's LayerNorm, so GpSimd adds the bias.
        adder = nisa.engine.gpsimd if rows == PARTITIONS else nisa.engine.vector
        nisa.tensor_tensor(dst=target, data1=product, data2=added, op=nl.add, engine=adder)


def weighted_by_block(target, source, norm, first):
    """Write source * weight + bias of a BlockNorm as `weighted`, on the Scalar engine, block by block."""
    used, count, _ = source.shape
    for block in range(count):
        nisa.activation(
            dst=target[:, block, :],
            op=nl.copy,
            data=source[:, block, :],
            scale=norm.weight[0:used, first + block : first + block + 1],
            bias=norm.bias[0:used, first + block : first + block + 1],
        )
