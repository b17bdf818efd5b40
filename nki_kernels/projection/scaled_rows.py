"""Products of few rows with fp8 weights that have a scale for each block of 128 rows and 128 columns.

Elements go to the Tensor engine as they are. Each block of columns multiplies a copy of the rows, times the block's
scale, so that PSUM adds the products of all K blocks. `gated_product` has the weights as stationary operand, and
`residual_product` the copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.block_scales import choose_engine, copy_scaled_rows
from nki_kernels.tiles import BANK, PARTITIONS, blocks, count_block_partitions, ranges
from nki_kernels.weights import is_fp8

COPIES_AHEAD = 3
"""Pieces of the weight for which copies are made before the products of the present one."""

VECTOR_ROWS = 16
"""Most rows that the Vector engine copies alone: GpSimd starts later, because it also triggers stores."""


def scale_rows(weights, dtype):
    """Let products of `dtype` rows scale copies of the rows, if that fits all of a list of WeightMatrix.

    It fits weights of one fp8 dtype with block scales, and rows of 16 bits. Otherwise loads multiply elements.
    """
    elements = weights[0].elements.dtype
    fits = dtype != nl.float32 and is_fp8(elements)
    for weight in weights:
        fits = fits and weight.block_scales is not None and weight.elements.dtype == elements
    for weight in weights:
        weight.scales_rows = fits


def choose_copy_engine(index, rows):
    """Return the engine that makes copies number `index` of `rows` rows."""
    return choose_engine(index if rows > VECTOR_ROWS else 0, 2)


def copy_rows(x, weights, k_blocks, depth, index):
    """Return rows times the block scales of each weight: a list of SBUF tiles [k in block, K block, column block, row].

    Args:
        x: SBUF tile [k in block, K block, row] with all K blocks.
        weights: list of WeightMatrix with block scales, whose rows begin with K block 0.
        k_blocks: range (first, end) of K blocks.
        depth: length of the contraction.
        index: number of the copies among those that are made one after the other.
    """
    first, end = k_blocks
    k_heights = list_heights(k_blocks, depth)
    copies = []
    for side in range(len(weights)):
        scales = weights[side].block_scales[:, first:end, :]
        engine = choose_copy_engine(index + side, x.shape[2])
        copies.append(copy_scaled_rows(x[:, first:end, :], scales, k_heights, engine))
    return copies


def list_heights(k_blocks, depth):
    """Return the partitions of each of a range (first, end) of K blocks of a contraction of `depth` elements."""
    heights = []
    for k in range(k_blocks[0], k_blocks[1]):
        heights.append(count_block_partitions(depth, k, False))
    return heights


def select_block(copies, block, height):
    """Return views [k in block, column block, row] of one K block of the results of `copy_rows`; None for None.

    block: index of the block in the copies. height: its partitions.
    """
    if copies is None:
        return None
    views = []
    for tile in copies:
        views.append(tile[0:height, block, :, :])
    return views


def accumulate_scaled(accumulators, x, piece, matrix, add, group_width):
    """Add the product of few rows and a piece of a weight with block scales to the accumulators of a chunk, in PSUM.

    Accumulators take groups of `group_width` columns of the PE array in turn.

    Args:
        accumulators: Accumulators of one row tile, see `residual_product`.
        x: SBUF tile [k in block, block, row] with all K blocks of the weight.
        piece: WeightPiece of the chunk's columns.
        matrix: WeightMatrix of the chunk's columns, with all rows.
        add: whether the accumulators hold sums already; else the product with K block 0 overwrites them.
    """
    first = piece.first_block
    depth = first * PARTITIONS + piece.rows
    count = blocks(piece.rows)
    copies = copy_rows(x, [matrix], (first, first + count), depth, first // piece.tiles[0].shape[1])[0]
    tile_width = piece.tiles[0].shape[2]
    for k in range(count):  # k: K block of the piece
        used = count_block_partitions(depth, first + k, False)
        for column in range(0, BANK, PARTITIONS):
            # Matmuls of different groups follow each other, so that they run at the same time.
            for i in range(len(accumulators)):
                bank, start = accumulators[i].bank, accumulators[i].first_column + column
                end = min(bank.shape[1], column + PARTITIONS)
                if column < end:
                    tile, offset = piece.tiles[start // tile_width], start % tile_width
                    nisa.nc_matmul(
                        dst=bank[:, column:end],
                        stationary=copies[0:used, k, start // PARTITIONS, :],
                        moving=tile[0:used, k, offset : offset + end - column],
                        accumulate=add or first + k > 0,
                        tile_position=(0, i * group_width % PARTITIONS),
                        tile_size=(PARTITIONS, group_width),
                    )


def add_scaled_panels(sums, copies, weights, panels, first_block, depth, group_width, block_start):
    """Add the products of scaled rows and some K blocks of a weight to sums in PSUM; block 0 overwrites them.

    Args:
        sums: PSUM tiles [row, column], one for each panel.
        copies: result of `RowCopies.make` for these K blocks.
        weights: SBUF tile [k in block, K block, column]; its block 0 is block `first_block` of the contraction.
        panels: ranges (start, end) of columns of `weights`.
        first_block: number of blocks of the contraction before those in `weights`.
        depth: length of the contraction.
        group_width: columns of the PE array of a group.
        block_start: position of column 0 of `weights` in its block.
    """
    pieces = []  # of the panels, each inside a block of columns
    for step in range(blocks(panels[0][1] - panels[0][0]) + 1):
        for index in range(len(panels)):
            start, end = panels[index]
            block = (block_start + start) // PARTITIONS + step
            first = max(start, block * PARTITIONS - block_start)
            last = min(end, (block + 1) * PARTITIONS - block_start)
            if first < last:
                pieces.append((index, first, last, block))
    rows = sums[0].shape[0]
    for within in range(weights.shape[1]):
        used = count_block_partitions(depth, first_block + within, False)
        # Matmuls of different groups follow each other, so that they run at the same time.
        for index, first, last, block in pieces:
            start = panels[index][0]
            nisa.nc_matmul(
                dst=sums[index][:, first - start : last - start],
                stationary=copies[0:used, within, block, 0:rows],
                moving=weights[0:used, within, first:last],
                accumulate=first_block + within > 0,
                tile_position=(0, index * group_width % PARTITIONS),
                tile_size=(PARTITIONS, group_width),
            )


@dataclass
class RowCopies(nl.NKIObject):
    """Copies of few rows for a product in groups of columns of the PE array, with zeros up to the width of a group.

    buffers: SBUF tiles [k in block, K block, column block, column of a group], used in turn. made: number of copies
    made so far.
    """

    buffers: list
    made: int = 0

    def make(self, x, matrix, first_block):
        """Return rows times the block scales of a piece of a weight, [k in block, K block, column block, column].

        Args:
            x: SBUF tile [k in block, K block, row] with all K blocks of the weight.
            matrix: WeightMatrix of the piece.
            first_block: its first K block.
        """
        depth = matrix.count_rows()
        heights = list_heights((0, blocks(depth)), depth)
        buffer = self.buffers[self.made % len(self.buffers)]
        engine = choose_copy_engine(self.made, x.shape[2])
        self.made += 1
        rows = x[:, first_block : first_block + len(heights), :]
        copy_scaled_rows(
            rows, matrix.block_scales, heights, engine, buffer[:, :, 0 : matrix.block_scales.shape[2], :]
        )
        return buffer


def create_row_copies(shape, dtype, rows, count):
    """Return RowCopies for `rows` rows, with `count` buffers of a shape [k in block, K block, column block, column]."""
    buffers = []
    for _ in range(count):
        buffer = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        if rows < shape[3]:
            nisa.memset(dst=buffer[:, :, :, rows:], value=0.0, engine=nisa.engine.gpsimd)
        buffers.append(buffer)
    return RowCopies(buffers)


def add_scaled_piece(bank, copies, tile, depth, accumulate, layout):
    """Add the product of scaled rows and a piece of a weight to a PSUM bank [partition, column of the group].

    Args:
        copies: result of `RowCopies.make`.
        tile: elements [k in block, K block, column of the chunk] in SBUF.
        depth: rows of the piece.
        accumulate: whether the bank has sums already; else they are overwritten.
        layout: GroupLayout, whose groups have whole blocks of columns.
    """
    for k in range(tile.shape[1]):  # k: K block of the piece
        used = count_block_partitions(depth, k, False)
        for column, end in ranges(0, layout.size):
            # Matmuls of different groups follow each other, so that they run at the same time.
            for group in range(layout.count_groups()):
                first, start = group * layout.width, group * layout.size + column
                nisa.nc_matmul(
                    dst=bank[first : first + layout.width, column:end],
                    stationary=copies[0:used, k, start // PARTITIONS, :],
                    moving=tile[0:used, k, start : start + end - column],
                    accumulate=accumulate or k > 0,
                    tile_position=(0, first),
                    tile_size=(PARTITIONS, layout.width),
                )
