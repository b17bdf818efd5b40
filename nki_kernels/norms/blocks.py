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
from nki_kernels.image_rows import list_image_runs
from nki_kernels.nibbles import view_paired_runs
from nki_kernels.tiles import PARTITIONS, allocate_aligned_tile, blocks, count_block_partitions, ranges

SQUARED_BLOCKS = 16
"""Blocks whose squares are added on the Vector engine, while the Scalar engine squares the next ones."""

SCALAR_SHARE = 2
"""The Scalar engine copies one of so many PSUM banks of transposes to SBUF, the Vector engine the others."""


@dataclass
class BlockNorm(nl.NKIObject):
    """Weight and bias of a norm in SBUF, spread over the partitions, and its eps.

    weight, bias: results of `load_image_columns`, [partition, block, image] float32, or None. eps: the same number on
    every partition, [row, 1] float32. image_rows: rows of an image; one image has all. scalar_share: the Scalar engine
    applies weight and bias of a LayerNorm in one of so many PSUM banks of transposes.
    """

    weight: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    eps: nl.NkiTensor
    image_rows: int
    scalar_share: int = SCALAR_SHARE


def load_norm_blocks(norm, eps, runs, tokens):
    """Load weight and bias of a `Norm` from HBM into a `BlockNorm`, spread over the partitions as `load_column` does.

    The norm's offset is added to the weight. A norm without a weight gives None for it, likewise for the
    bias.

    Args:
        eps: tile [row, 1] float32 in SBUF with the norm's eps, which is kept as it is.
        runs: whether element p * blocks + i of a row lies on partition p, block i; else element i * 128 + p
            does.
        tokens: rows of all images.
    """
    weight = None if norm.weight is None else load_image_columns(norm.weight, norm.offset, runs)
    bias = None if norm.bias is None else load_image_columns(norm.bias, 0.0, runs)
    return BlockNorm(weight, bias, eps, tokens // norm.count_images())


def load_image_columns(rows, offset, runs):
    """Load rows [N, H] of HBM, spread over the partitions, plus `offset`: [partition, block, image] float32 in SBUF.

    runs: as for `load_column`, which loads one row.
    """
    images, depth = rows.shape
    if images == 1:
        column = load_column(rows, offset, runs)
        return column.reshape((column.shape[0], column.shape[1], 1))
    count = blocks(depth)
    shape = (count_block_partitions(depth, 0, runs), count, images)
    raw = allocate_aligned_tile(shape, rows.dtype)
    columns = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    if runs:
        for image in range(images):
            load_runs(raw[:, :, image], rows[image : image + 1, :], False)
    else:
        full = depth // PARTITIONS
        if full < count:
            nisa.memset(dst=raw[:, full, :], value=0.0)
            nisa.dma_transpose(
                dst=raw[0 : depth - full * PARTITIONS, full, :], src=rows[:, full * PARTITIONS :]
            )
        if full > 0:
            source = rows[:, 0 : full * PARTITIONS].reshape_dim(1, (full, PARTITIONS))
            nisa.dma_transpose(dst=raw[:, 0:full, :], src=source)
    nisa.tensor_scalar(dst=columns, data=raw, op0=nl.add, operand0=offset)
    return columns


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


def weight_blocks(target, source, norm, first, first_row):
    """Write source * weight + bias to `target`; both are [partition, block, row].

    Without a norm, or without its weight, the source is copied.

    Args:
        norm: `BlockNorm`, or None.
        first: index of the source's first block among the norm's blocks.
        first_row: index of the source's first row among the rows of all images.
    """
    used, count, rows = source.shape
    if norm is None or norm.weight is None:
        nisa.tensor_copy(dst=target, src=source)
        return
    product = target
    if norm.bias is not None:
        product = nl.ndarray(source.shape, dtype=nl.float32, buffer=nl.sbuf)
    for start, end, image, images in list_image_runs(first_row, rows, norm.image_rows):
        columns = (used, first, count, image, images)
        factor = repeat_columns(norm.weight, columns, end - start)
        run = view_images(product, start, end, images)
        nisa.tensor_tensor(
            dst=run, data1=view_images(source, start, end, images), data2=factor, op=nl.multiply
        )
        if norm.bias is not None:
            added = repeat_columns(norm.bias, columns, end - start)
            # The Vector engine alone would hold up the products of a prompt's LayerNorm, so GpSimd adds the bias.
            adder = nisa.engine.gpsimd if rows == PARTITIONS else nisa.engine.vector
            dst = view_images(target, start, end, images)
            nisa.tensor_tensor(dst=dst, data1=run, data2=added, op=nl.add, engine=adder)


def view_images(tile, start, end, images):
    """View rows start … end - 1 of a tile [partition, block, row], of several images as [.., image, row]."""
    rows = tile[:, :, start:end]
    return rows if images == 1 else rows.reshape_dim(2, (images, (end - start) // images))


def repeat_columns(tile, columns, rows):
    """View some columns of images repeated for rows in the form of `view_images`.

    Args:
        tile: [partition, block, image] in SBUF.
        columns: (partitions, first block, blocks, first image, images) of the view.
        rows: rows of all these images together.
    """
    used, first, count, image, images = columns
    selected = tile[0:used, first : first + count, image : image + images]
    return selected.broadcast(2, rows) if images == 1 else selected.expand_dim(3).broadcast(3, rows // images)


def weight_block_by_block(target, source, norm, first, runs):
    """Write source * weight + bias to `target` on the Scalar engine, an instruction for each block of each image.

    source and target are [partition, block, row].

    Args:
        norm: `BlockNorm` with a weight and a bias.
        first: index of the source's first block among the norm's blocks.
        runs: result of `list_image_runs` for the rows; each run has one image.
    """
    used, count, _ = source.shape
    for start, end, image, _ in runs:
        for block in range(count):
            nisa.activation(
                dst=target[:, block, start:end],
                op=nl.copy,
                data=source[:, block, start:end],
                scale=norm.weight[0:used, first + block, image : image + 1],
                bias=norm.bias[0:used, first + block, image : image + 1],
            )


def find_single_images(norm, first_row, rows):
    """Return the `list_image_runs` of some rows of a LayerNorm for `weight_block_by_block`; None if it takes none.

    It takes a whole row tile of few images: short rows would keep the Scalar engine too long. norm: `BlockNorm`, or
    None.
    """
    if norm is None or norm.bias is None or rows != PARTITIONS:
        return None
    runs = list_image_runs(first_row, rows, norm.image_rows)
    return runs if len(runs) <= 2 and runs[0][3] == 1 and runs[len(runs) - 1][3] == 1 else None
