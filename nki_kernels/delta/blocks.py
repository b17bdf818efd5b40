"""The inverses of the blocks of 16 on the diagonal of (1 + A) transposed, element by element, a block on a partition.

With Y the inverses of blocks of w, those of 2w have Y N Y beside them, with -A transposed for N: first the product of N
and the second Y, then that of the first Y and the result. GpSimd multiplies in float32 what the Vector engine adds up.

Tiles of a wave have n heads, of all its units. Blocks lie on the partitions as [half, block of half, head]. They come
from the tiles of chunks, and go back to them, by way of HBM, which zeros surround there: both halves of a chunk are
loaded as squares of 64 with nothing beside the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import PARTITIONS

BLOCK = 16
"""Rows of the blocks."""

HALF = PARTITIONS // 2
"""Tokens of the two halves of a chunk, whose triangles are inverted side by side."""

SQUARE = HALF * HALF
IN_HALF = HALF // BLOCK
"""Blocks on the diagonal of a half."""

IN_TURN = 3
"""Waves whose inverses are on their way through HBM."""


@dataclass
class ScratchBuffers(nl.NKIObject):
    """Buffers in HBM: triangles [half, row, head, column], and inverses [y or x, half, row, head, column]."""

    triangles: nl.NkiTensor
    inverses: nl.NkiTensor


@dataclass
class BlockInverse(nl.NKIObject):
    """Blocks of -A transposed of a wave, and their inverses y: [half and block and head, row, column].

    y is float32. terms: of the latest product of a level, [row of block, pair, row, column, term] float32. inner: the
    first product of the level, [row of block, pair, row, column] float32.
    """

    blocks: nl.NkiTensor
    y: nl.NkiTensor | None = None
    terms: nl.NkiTensor | None = None
    inner: nl.NkiTensor | None = None


def scratch_buffers(heads, dtype):
    """Return the buffers that waves of up to `heads` heads use in turn; the inverses are zeros."""
    zeros = nl.ndarray((PARTITIONS, 2 * 2 * SQUARE // PARTITIONS * heads), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    buffers = []
    for _ in range(IN_TURN):
        shape = (2, HALF, heads, HALF)
        triangles = nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm, name="triangles")
        inverses = nl.ndarray((2, 2, HALF, heads, HALF), dtype=dtype, buffer=nl.private_hbm, name="inverses")
        transfer(inverses, zeros, COMPILER)
        buffers.append(ScratchBuffers(triangles, inverses))
    return buffers


def store_triangles(negated, triangles):
    """Store both halves of -A transposed, [j, head, i], to HBM."""
    heads = negated.shape[1]
    for half in range(2):
        tokens = slice(half * HALF, half * HALF + HALF)
        target = triangles[half, :, 0:heads, :]
        transfer(target, negated[tokens, :, tokens], COMPILER)


def load_blocks(triangles, heads):
    """Load the blocks of -A transposed, [half and block and head, row, column]."""
    shape = (2 * IN_HALF * heads, BLOCK, BLOCK)
    blocks = nl.ndarray(shape, dtype=triangles.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=blocks, src=triangles.ap(pattern=diagonal(triangles.shape[2], heads)))
    return blocks


def diagonal(most, heads):
    """Return the pattern of the blocks of squares [half, row, head of `most`, column].

    Its dims are [half, block, head, row, column].
    """
    row = most * HALF
    return [[HALF * row, 2], [BLOCK * (row + 1), IN_HALF], [HALF, heads], [row, BLOCK], [1, BLOCK]]


def invert_pairs(blocks, unit_block):
    """Return the inverses of blocks of two, float32: 1 less the element off the diagonal."""
    rows = blocks.shape[0]
    y = nl.ndarray(blocks.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=y, src=unit_block[0:rows, :, :])
    off_diagonal = [[BLOCK * BLOCK, rows], [2 * (BLOCK + 1), BLOCK // 2]]
    nisa.tensor_copy(dst=y.ap(pattern=off_diagonal, offset=1), src=blocks.ap(pattern=off_diagonal, offset=1))
    return y


def first_terms(blocks, y, size):
    """Return the terms of the first product of a level, [row of block, pair, row, column, term] float32."""
    rows, pairs = y.shape[0], BLOCK // (2 * size)
    step = 2 * size * (BLOCK + 1)
    pitch = BLOCK * BLOCK
    left = blocks.ap(pattern=[[pitch, rows], [step, pairs], [BLOCK, size], [0, size], [1, size]], offset=size)
    right = y.ap(
        pattern=[[pitch, rows], [step, pairs], [0, size], [1, size], [BLOCK, size]],
        offset=size * (BLOCK + 1),
    )
    return multiply_terms(left, right)


def second_terms(y, inner, size):
    """Return the terms of the second product of a level, in the layout of the first ones."""
    rows, pairs = y.shape[0], BLOCK // (2 * size)
    step = 2 * size * (BLOCK + 1)
    left = y.ap(pattern=[[BLOCK * BLOCK, rows], [step, pairs], [BLOCK, size], [0, size], [1, size]])
    right = inner.ap(
        pattern=[
            [pairs * size * size, rows],
            [size * size, pairs],
            [0, size],
            [1, size],
            [size, size],
        ]
    )
    return multiply_terms(left, right)


def multiply_terms(left, right):
    """Multiply element by element on GpSimd: float32."""
    terms = nl.ndarray(left.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=terms, data1=left, data2=right, op=nl.multiply, engine=nisa.engine.gpsimd)
    return terms


def sum_inner(terms):
    """Return the first product of a level, [row of block, pair, row, column] float32."""
    inner = nl.ndarray(terms.shape[0:4], dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=inner, op=nl.add, data=terms, axis=4)
    return inner


def sum_into(y, terms, size):
    """Write the second product of a level to y: the inverses of twice the size have it off their diagonal."""
    rows, pairs = y.shape[0], BLOCK // (2 * size)
    pattern = [[BLOCK * BLOCK, rows], [2 * size * (BLOCK + 1), pairs], [BLOCK, size], [1, size]]
    nisa.tensor_reduce(dst=y.ap(pattern=pattern, offset=size), op=nl.add, data=terms, axis=4)


def store_inverses(y, inverses, heads):
    """Store the inverses, transposed (y) and not (x), to HBM."""
    rows = y.shape[0]
    both = nl.ndarray((rows, 2, BLOCK, BLOCK), dtype=inverses.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=both[:, 0, :, :], src=y)
    across = y.ap(pattern=[[BLOCK * BLOCK, rows], [1, BLOCK], [BLOCK, BLOCK]])
    nisa.activation(dst=both[:, 1, :, :], op=nl.copy, data=across)
    most = inverses.shape[3]
    pattern = diagonal(most, heads)
    pattern.insert(3, [2 * SQUARE * most, 2])
    transfer(inverses.ap(pattern=pattern), both, COMPILER)


def load_squares(inverses, side, heads):
    """Load the inverses y (side 0) or x (1) as squares of both halves with zeros: [row, head, column]."""
    tile = nl.ndarray((PARTITIONS, heads, HALF), dtype=inverses.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=inverses[side, :, :, 0:heads, :])
    return tile
