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
    """The right operands of the second products of each level, used in turn; columns of second blocks stay 0."""
    found = []
    for _ in LEVELS:
        turns = []
        for _ in range(IN_TURN):
            tile = nl.ndarray((PARTITIONS, heads, HALF), dtype=dtype, buffer=nl.sbuf)
            nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
            turns.append(tile)
        found.append(turns)
    return found


def blocks_of(tile, size, second):
    """The first or second ones of pairs of blocks, [row, head, pair, column of block]."""
    pairs = tile.reshape_dim(2, (HALF // (2 * size), 2 * size))
    return pairs[:, :, :, size : 2 * size] if second else pairs[:, :, :, 0:size]


def products(stationary, moving):
    """stationary^T @ moving of all heads and both halves: [row of half, head, pair, column] in PSUM."""
    bank = nl.ndarray(moving.shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(moving.shape[1]):
        for half in range(2):
            part = slice(half * HALF, half * HALF + HALF)
            own = stationary[part, head, part] if stationary.shape[2] > HALF else stationary[part, head, :]
            nisa.nc_matmul(
                dst=bank[part, head, :, :],
                stationary=own,
                moving=moving[part, head, :, :],
                accumulate=False,
                tile_position=(half * HALF, half * HALF),
                tile_size=CELLS,
            )
    return bank


def link(case, unit, level):
    """The first product of a level, which joins blocks two by two: rows of second blocks, columns of first ones."""
    size = LEVELS[level]
    inner = products(unit["negated"], blocks_of(unit["x"], size, False))
    right = case["right_operands"][level][unit["number"] % IN_TURN][:, 0 : inner.shape[1], :]
    pairs = inner.shape[2]
    of_second = case["constants"]["second"][level].reshape((PARTITIONS, 1, pairs, 1))
    across = of_second.broadcast(1, inner.shape[1]).broadcast(3, size)
    nisa.tensor_tensor(dst=blocks_of(right, size, False), data1=inner, data2=across, op=nl.multiply)
    unit["right"] = right


def join(case, unit, level):
    """The inverses of the joined blocks, each in the columns that change."""
    size, right = LEVELS[level], unit["right"]
    x, y = blocks_of(unit["x"], size, False), blocks_of(unit["y"], size, True)
    for stationary, moving, kept in ((unit["y"], blocks_of(right, size, False), x), (right, y, y)):
        bank = products(stationary, moving)
        nisa.nc_matmul(dst=bank, stationary=case["constants"]["identity"], moving=kept, accumulate=True)
        unit["joined"].append((kept, bank))


def keep_joined(case, unit, level):
    """Write what `join` computed."""
    for kept, bank in unit["joined"]:
        nisa.activation(dst=kept, op=nl.copy, data=bank)
    unit["joined"] = []


def link_halves(case, unit):
    """The first product of the last level."""
    x, negated = unit["x"], unit["negated"]
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
    unit["right"] = nl.ndarray(inner.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.activation(dst=unit["right"][HALF:PARTITIONS, :, :], op=nl.copy, data=inner[HALF:PARTITIONS, :, :])


def join_halves(case, unit):
    """What the transposed inverse of the whole chunk has beside those of its halves, [column, head, row]."""
    y, right = unit["y"], unit["right"]
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
    unit["corner"] = nl.ndarray(joined.shape, dtype=y.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=unit["corner"], src=joined)
