"""The inverse of the unit triangle of a chunk, (1 + A)^-1 with A strictly lower triangular, by joining blocks.

With X the inverses of the diagonal blocks of size w, those of size 2w are X - X A X in the blocks of A that join two
neighbours. So no power of A is ever taken: the inverse is as exact as forward substitution, also where keys repeat
and powers of A grow beyond all bounds. The two halves of a chunk are inverted side by side, each by 64 x 64 cells of
the array; the last step joins them. Everything is kept transposed as well, since a product contracts over partitions.

`negated` is -A transposed, [j, head, i]; what it has on its diagonal is never used.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.masks import HALF
from nki_kernels.tiles import PARTITIONS

CELLS = (HALF, HALF)


def products(stationary, moving):
    """stationary^T @ moving of all heads and both halves: [row of half, head, column of half] in PSUM."""
    heads = stationary.shape[1]
    bank = nl.ndarray((PARTITIONS, heads, HALF), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        for first in (0, HALF):
            end = first + HALF
            nisa.nc_matmul(
                dst=bank[first:end, head, :],
                stationary=stationary[first:end, head, :],
                moving=moving[first:end, head, :],
                accumulate=False,
                tile_position=(first, first),
                tile_size=CELLS,
            )
    return bank


def plus(source, tile):
    """The sum of a tile of PSUM and one of SBUF, in the latter's dtype."""
    result = nl.ndarray(source.shape, dtype=tile.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=source, data2=tile, op=nl.add)
    return result


def begin(unit, constants, level):
    """Blocks of one: the inverses are identities, and -A is laid out by the levels that it joins."""
    negated, masks = unit["negated"], constants["levels"]
    heads, dtype, levels = negated.shape[1], negated.dtype, masks.shape[1]
    halves = nl.ndarray((PARTITIONS, heads, HALF), dtype=dtype, buffer=nl.sbuf)
    for first in (0, HALF):
        part = slice(first, first + HALF)
        nisa.activation(dst=halves[part, :, :], op=nl.copy, data=negated[part, :, part])
    joins = nl.ndarray((PARTITIONS, levels, heads, HALF), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=joins,
        data1=halves.reshape((PARTITIONS, 1, heads, HALF)).broadcast(1, levels),
        data2=masks.reshape((PARTITIONS, levels, 1, HALF)).broadcast(2, heads),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )
    unit["joins"] = joins
    unit["x"] = unit["y"] = constants["halves"].reshape((PARTITIONS, 1, HALF)).broadcast(1, heads)


def link(unit, constants, level):
    """The first product of a level, which joins blocks two by two."""
    inner = products(unit["joins"][:, level, :, :], unit["x"])
    if level == 0:
        unit["right"] = inner
        return
    unit["right"] = nl.ndarray(inner.shape, dtype=unit["x"].dtype, buffer=nl.sbuf)
    nisa.activation(dst=unit["right"], op=nl.copy, data=inner)


def join(unit, constants, level):
    """The inverses of the joined blocks. The products do not change blocks of one row."""
    x, y, right = unit["x"], unit["y"], unit["right"]
    if level == 0:
        unit["x"] = plus(right, x)
        unit["y"] = plus(unit["joins"][:, level, :, :], y)
        return
    unit["x"] = plus(products(y, right), x)
    unit["y"] = plus(products(right, y), y)


def link_halves(unit, constants, level):
    """The first product of the last level, and the inverses of both halves in their places, transposed."""
    x, y, negated = unit["x"], unit["y"], unit["negated"]
    heads, dtype = x.shape[1], x.dtype
    inner = nl.ndarray((PARTITIONS, heads, HALF), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=inner[HALF:PARTITIONS, head, :],
            stationary=negated[0:HALF, head, HALF:PARTITIONS],
            moving=x[0:HALF, head, :],
            accumulate=False,
            tile_position=(0, HALF),
            tile_size=CELLS,
        )
    unit["right"] = nl.ndarray(inner.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=unit["right"][HALF:PARTITIONS, :, :], op=nl.copy, data=inner[HALF:PARTITIONS, :, :])
    whole = nl.ndarray((PARTITIONS, heads, PARTITIONS), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=whole[HALF:PARTITIONS, :, 0:HALF], value=0.0, engine=nisa.engine.gpsimd)
    for first in (0, HALF):
        part = slice(first, first + HALF)
        nisa.tensor_copy(dst=whole[part, :, part], src=y[part, :, :], engine=nisa.engine.gpsimd)
    unit["inverse"] = whole


def join_halves(unit, constants, level):
    """The transposed inverse of the whole chunk, [column, head, row]."""
    y, right = unit["y"], unit["right"]
    heads = y.shape[1]
    joined = nl.ndarray((PARTITIONS, heads, HALF), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=joined[0:HALF, head, :],
            stationary=right[HALF:PARTITIONS, head, :],
            moving=y[HALF:PARTITIONS, head, :],
            accumulate=False,
            tile_position=(HALF, 0),
            tile_size=CELLS,
        )
    nisa.tensor_copy(dst=unit["inverse"][0:HALF, :, HALF:PARTITIONS], src=joined[0:HALF, :, :])
