"""The inverse of the unit triangle of a chunk, (1 + A)^-1 with A strictly lower triangular, by joining blocks.

With X the inverses of the diagonal blocks of size w, those of size 2w are X - X A X in the blocks of A that join two
neighbours. So no power of A is ever taken: the inverse is as exact as forward substitution, also where keys repeat
and powers of A grow beyond all bounds. The inverses of blocks of 16 are given (`delta/blocks.py`). The two halves of a
chunk are inverted side by side, each by 64 x 64 cells of the array; the last step joins them. Everything is kept
transposed as well (y), since a product contracts over partitions.

`negated` is -A transposed, [j, head, i]; what it has on its diagonal is never used. Of two blocks that are joined, x
changes in the columns of the first one, and y in those of the second one: only these are computed.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.blocks import HALF
from nki_kernels.delta.masks import LEVELS
from nki_kernels.tiles import PARTITIONS

CELLS = (HALF, HALF)

IN_TURN = 4
"""Units whose blocks are joined at a time."""


def right_operands(heads, dtype):
    """Return right operands of the second products, used in turn, for each level; columns of second blocks stay 0."""
    levels = []
    for _ in LEVELS:
        turns = []
        for _ in range(IN_TURN):
            tile = nl.ndarray((PARTITIONS, heads, HALF), dtype=dtype, buffer=nl.sbuf)
            nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
            turns.append(tile)
        levels.append(turns)
    return levels


def select_blocks(tile, size, second):
    """Return the first or second ones of pairs of blocks, [row, head, pair, column of block]."""
    pairs = tile.reshape_dim(2, (HALF // (2 * size), 2 * size))
    return pairs[:, :, :, size : 2 * size] if second else pairs[:, :, :, 0:size]


def products(stationary, moving):
    """Return stationary^T @ moving of all heads and both halves: [row of half, head, pair, column] in PSUM."""
    bank = nl.ndarray(moving.shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(moving.shape[1]):
        for half in range(2):
            rows = slice(half * HALF, half * HALF + HALF)
            columns = rows if stationary.shape[2] > HALF else slice(0, HALF)
            nisa.nc_matmul(
                dst=bank[rows, head, :, :],
                stationary=stationary[rows, head, columns],
                moving=moving[rows, head, :, :],
                accumulate=False,
                tile_position=(half * HALF, half * HALF),
                tile_size=CELLS,
            )
    return bank


def link(negated, x, right_operand, second_blocks, size):
    """Return the first product of a level, which joins blocks two by two: the right operand of the second products.

    It has rows of second blocks and columns of first ones, and is part of `right_operand`.
    """
    inner = products(negated, select_blocks(x, size, False))
    right = right_operand[:, 0 : inner.shape[1], :]
    mask = second_blocks.reshape((PARTITIONS, 1, inner.shape[2], 1))
    across = mask.broadcast(1, inner.shape[1]).broadcast(3, size)
    nisa.tensor_tensor(dst=select_blocks(right, size, False), data1=inner, data2=across, op=nl.multiply)
    return right


def join(stationary, moving, blocks, identity):
    """Return joined blocks, in the columns that change: their product, plus the blocks before, in PSUM."""
    bank = products(stationary, moving)
    nisa.nc_matmul(dst=bank, stationary=identity, moving=blocks, accumulate=True)
    return bank


def link_halves(negated, x):
    """Return the first product of the last level, [row, head, column]; it has the rows of the second half only."""
    inner = nl.ndarray((PARTITIONS, x.shape[1], HALF), dtype=nl.float32, buffer=nl.psum)
    for head in range(x.shape[1]):
        nisa.nc_matmul(
            dst=inner[HALF:PARTITIONS, head, :],
            stationary=negated[0:HALF, head, HALF:PARTITIONS],
            moving=x[0:HALF, head, :],
            accumulate=False,
            tile_position=(0, HALF),
            tile_size=CELLS,
        )
    right = nl.ndarray(inner.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.activation(dst=right[HALF:PARTITIONS, :, :], op=nl.copy, data=inner[HALF:PARTITIONS, :, :])
    return right


def join_halves(y, right):
    """Return the block of the chunk's transposed inverse that joins its halves, [column, head, row]."""
    joined = nl.ndarray((HALF, y.shape[1], HALF), dtype=nl.float32, buffer=nl.psum)
    for head in range(y.shape[1]):
        nisa.nc_matmul(
            dst=joined[:, head, :],
            stationary=right[HALF:PARTITIONS, head, :],
            moving=y[HALF:PARTITIONS, head, :],
            accumulate=False,
            tile_position=(HALF, 0),
            tile_size=CELLS,
        )
    corner = nl.ndarray(joined.shape, dtype=y.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=corner, src=joined)
    return corner
