"""Norms of transposed rows, whose elements lie on the partitions: [element in block, block, row].

A row of H elements has C = ceil(H / 128) blocks in one of two layouts. In *blocks* element i * 128 + p lies on
partition p in block i. In *runs* element p * C + i does, so that a partition has C neighbouring elements. RMSNorm
needs no normalised rows before a product: its weight is multiplied into one of the operands, and 1 / rms, one number
for each row, is applied to what leaves PSUM. The projections of prompts use these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.nibbles import view_paired_runs
from nki_kernels.tiles import PARTITIONS, blocks, count_block_partitions, ranges

SQUARED_BLOCKS = 16
"""Blocks whose squares are added on the Vector engine, while the Scalar engine squares the next ones."""


@dataclass
class BlockNorm(nl.NKIObject):
    """Weight and bias of a norm in SBUF, spread over the partitions, and its eps.

    weight, bias: results of `load_column`, [partition, block] float32, or None. eps: the same number on every
    partition, [row, 1] float32.
    """

    weight: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    eps: nl.NkiTensor


def load_norm_blocks(norm, eps, runs):
    """Load weight and bias of a `Norm` from HBM into a `BlockNorm`, spread over the partitions as `load_column` does.

    The norm's offset is added to the weight. A norm without a weight gives None for it, likewise for the
    bias.

    Args:
        eps: tile [row, 1] float32 in SBUF with the norm's eps, which is kept as it is.
        runs: whether element p * blocks + i of a row lies on partition p, block i; else element i * 128 + p
            does.
    """
    weight = None if norm.weight is None else load_column(norm.weight, norm.offset, runs)
    bias = None if norm.bias is None else load_column(norm.bias, 0.0, runs)
    return BlockNorm(weight, bias, eps)


def load_column(row, offset, runs, paired=False):
    """Load a row [1, H] of HBM, spread over the partitions, plus `offset`: [partition, block] float32 in SBUF.

    There are C = ceil(H / 128) blocks. With `runs` element p * C + i of the row lies on partition p in block
    i, else element i * 128 + p does. Places without an element get the offset. paired: whether the runs are paired, as
    for weights of 4 bits, see `nibbles`.
    """
    depth = row.shape[1]
    count = blocks(depth)
    height = count_block_partitions(depth, 0, runs)
    column = nl.ndarray((height, count), dtype=nl.float32, buffer=nl.sbuf)
    if runs:
        raw = nl.ndarray((height, count), dtype=row.dtype, buffer=nl.sbuf)
        load_runs(raw, row, paired)
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


def load_runs(column, row, paired):
    """Load a row [1, H] of HBM into `column` [partition, C] in SBUF, where C = ceil(H / 128).

    Element p * C + i goes to partition p, block i. Elements that the last partition lacks become 0. paired: as for
    `load_column`.
    """
    depth = row.shape[1]
    count = blocks(depth)
    if paired:
        for half in range(2):
            elements = column[:, half * count // 2 : (half + 1) * count // 2]
            transfer(elements, view_paired_runs(row, half), STATIC)
        return
    full = depth // count
    if full < column.shape[0]:
        nisa.memset(dst=column, value=0.0)
        nisa.dma_copy(dst=column[full : full + 1, 0 : depth - full * count], src=row[:, full * count : depth])
    source = row[:, 0 : full * count].reshape((full, count))
    transfer(column[0:full, :], source, SCALAR)


def sum_block_squares(x, first, depth):
    """Return sums of squares of transposed rows, each over at most SQUARED_BLOCKS blocks.

    The result is [k in block, group, row] in SBUF, in x's dtype. A group is a list of neighbouring blocks; a
    short last block is a group of its own. `add_squares` adds up groups and partitions.

    Args:
        x: blocks [k in block, block, row] of 128 elements of each row, in SBUF.
        first: index of x's first block among the blocks of a whole row.
        depth: elements of a whole row, which tell whether x has the short last block.
    """
    height, count, rows = x.shape
    full = max(0, min(count, depth // PARTITIONS - first))
    groups = ranges(0, full, SQUARED_BLOCKS) + ranges(full, count)
    sums = nl.ndarray((height, len(groups), rows), dtype=x.dtype, buffer=nl.sbuf)
    for group in range(len(groups)):
        start, end = groups[group]
        used = count_block_partitions(depth, first + start, False)
        target = sums[0:used, group : group + 1, :]
        squares = target
        if end - start > 1:
            squares = nl.ndarray((used, end - start, rows), dtype=x.dtype, buffer=nl.sbuf)
        nisa.activation(dst=squares, op=nl.square, data=x[0:used, start:end, :])
        add_blocks(target, squares)
    return sums


def add_blocks(total, tile):
    """Write the sum of all blocks of `tile` [partition, block, row] to `total` [partition, 1, row].

    Halves are added to each other until one block is left. For a single block nothing is written: `total` has
    to be it.
    """
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
    """Add the squares of blocks first … end - 1 of transposed rows to the sums of all rows, in PSUM.

    A product with a column of ones adds over the partitions. The sums begin anew if `first` is 0.

    Args:
        sums: for each row tile a list or tuple, whose first element takes the sums, [row, 1] in PSUM.
        squares: result of `sum_block_squares` for these blocks, [k in block, group, row].
        ones: [128, 1] in SBUF.
        tiles: for each row tile its rows (start, end) among those of `squares`.
        depth: elements of a whole row.
    """
    groups = squares.shape[1]
    for group in range(groups):
        used = count_block_partitions(depth, end - 1, False) if group == groups - 1 else PARTITIONS
        for tile in range(len(tiles)):
            left, right = tiles[tile]
            nisa.nc_matmul(
                dst=sums[tile][0],
                stationary=squares[0:used, group, left:right],
                moving=ones[0:used, :],
                accumulate=first + group > 0,
            )


def weight_blocks(target, source, norm, first):
    """Write source * weight + bias to `target`; both are [partition, block, row].

    Without a norm, or without its weight, the source is copied.

    Args:
        norm: `BlockNorm`, or None.
        first: index of the source's first block among the norm's blocks.
    """
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


def weight_block_by_block(target, source, norm, first):
    """Write source * weight + bias to `target` on the Scalar engine, one instruction for each block.

    source and target are [partition, block, row].

    Args:
        norm: `BlockNorm` with a weight and a bias.
        first: index of the source's first block among the norm's blocks.
    """
    used, count, _ = source.shape
    for block in range(count):
        nisa.activation(
            dst=target[:, block, :],
            op=nl.copy,
            data=source[:, block, :],
            scale=norm.weight[0:used, first + block : first + block + 1],
            bias=norm.bias[0:used, first + block : first + block + 1],
        )
