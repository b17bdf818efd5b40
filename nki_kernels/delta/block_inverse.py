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
from nki_kernels.tiles import PARTITIONS, filled

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
class BlockInverses(nl.NKIObject):
    """-A transposed of the heads of a wave, and the inverses of its blocks of 16.

    turn: the index of its `ScratchBuffers`. negated: -A transposed, [j, head, i]. blocks: those on its diagonal, [half
    and block and head, row, column]. inverses: of the blocks, float32 in the same layout. y, x: the inverses of both
    halves, transposed and not, [row of both halves, head, column].
    """

    turn: int
    heads: int
    negated: nl.NkiTensor | None = None
    blocks: nl.NkiTensor | None = None
    inverses: nl.NkiTensor | None = None
    y: nl.NkiTensor | None = None
    x: nl.NkiTensor | None = None

    def allocate(self, prompt):
        """Allocate `negated`, to which units write their heads."""
        shape = (PARTITIONS, self.heads, PARTITIONS)
        self.negated = nl.ndarray(shape, dtype=prompt.y.dtype, buffer=nl.sbuf)

    def store_triangles(self, prompt):
        """Store both halves of `negated` to HBM."""
        for half in range(2):
            tokens = slice(half * HALF, half * HALF + HALF)
            target = prompt.scratch[self.turn].triangles[half, :, 0 : self.heads, :]
            transfer(target, self.negated[tokens, :, tokens], COMPILER)

    def load_blocks(self, prompt):
        """Load `blocks`."""
        triangles = prompt.scratch[self.turn].triangles
        shape = (2 * IN_HALF * self.heads, BLOCK, BLOCK)
        self.blocks = nl.ndarray(shape, dtype=triangles.dtype, buffer=nl.sbuf)
        pattern = diagonal_pattern(triangles.shape[2], self.heads)
        nisa.dma_copy(dst=self.blocks, src=triangles.ap(pattern=pattern))

    def invert_pairs(self, prompt):
        """Begin `inverses` with those of blocks of two: 1 less the element off the diagonal."""
        rows = self.blocks.shape[0]
        self.inverses = nl.ndarray(self.blocks.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=self.inverses, src=prompt.constants.unit_block[0:rows, :, :])
        # The blocks hold -A, so the element off the diagonal is copied without a change of sign.
        off_diagonal = [[BLOCK * BLOCK, rows], [2 * (BLOCK + 1), BLOCK // 2]]
        nisa.tensor_copy(
            dst=self.inverses.ap(pattern=off_diagonal, offset=1),
            src=self.blocks.ap(pattern=off_diagonal, offset=1),
        )

    def store_inverses(self, prompt):
        """Store `inverses`, transposed (y) and not (x), to HBM."""
        target, rows = prompt.scratch[self.turn].inverses, self.inverses.shape[0]
        both = nl.ndarray((rows, 2, BLOCK, BLOCK), dtype=target.dtype, buffer=nl.sbuf)
        # The Vector and the Scalar engine copy one layout each, side by side.
        nisa.tensor_copy(dst=both[:, 0, :, :], src=self.inverses)
        transposed = self.inverses.ap(pattern=[[BLOCK * BLOCK, rows], [1, BLOCK], [BLOCK, BLOCK]])
        nisa.activation(dst=both[:, 1, :, :], op=nl.copy, data=transposed)
        pattern = diagonal_pattern(target.shape[3], self.heads)
        pattern.insert(3, [2 * SQUARE * target.shape[3], 2])
        transfer(target.ap(pattern=pattern), both, COMPILER)

    def load_squares(self, prompt):
        """Load `y` and `x`, with zeros beyond the blocks."""
        inverses = prompt.scratch[self.turn].inverses
        self.y = load_rows(inverses[0, :, :, 0 : self.heads, :])
        self.x = load_rows(inverses[1, :, :, 0 : self.heads, :])


@dataclass
class BlockLevel(nl.NKIObject):
    """A level of the inverses of a wave's blocks: those of `size` rows are joined two by two.

    terms: of the latest product, [half and block and head, pair, row, column, term] float32. inner: the first product,
    [half and block and head, pair, row, column] float32.
    """

    wave: BlockInverses
    size: int
    terms: nl.NkiTensor | None = None
    inner: nl.NkiTensor | None = None

    def view_pairs(self, tile, pattern, offset):
        """Return a view of the pairs of blocks of a tile: `pattern` and `offset` say which elements of a pair."""
        step = 2 * self.size * (BLOCK + 1)
        rows = [[BLOCK * BLOCK, tile.shape[0]], [step, BLOCK // (2 * self.size)]]
        return tile.ap(pattern=rows + pattern, offset=offset)

    def multiply_first(self, prompt):
        """Multiply the terms of the first product, of N and the second Y."""
        size = self.size
        left = self.view_pairs(self.wave.blocks, [[BLOCK, size], [0, size], [1, size]], size)
        right_pattern = [[0, size], [1, size], [BLOCK, size]]
        self.terms = multiply_terms(
            left, self.view_pairs(self.wave.inverses, right_pattern, size * (BLOCK + 1))
        )

    def sum_first(self, prompt):
        """Add up the first product."""
        self.inner = nl.ndarray(self.terms.shape[0:4], dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=self.inner, op=nl.add, data=self.terms, axis=4)

    def multiply_second(self, prompt):
        """Multiply the terms of the second product, of the first Y and the first product."""
        rows, pairs, size, _ = self.inner.shape
        square = size * size
        right = self.inner.ap(
            pattern=[[pairs * square, rows], [square, pairs], [0, size], [1, size], [size, size]]
        )
        left = self.view_pairs(self.wave.inverses, [[BLOCK, size], [0, size], [1, size]], 0)
        self.terms = multiply_terms(left, right)

    def sum_second(self, prompt):
        """Add up the second product: the inverses of twice the size have it off their diagonal."""
        target = self.view_pairs(self.wave.inverses, [[BLOCK, self.size], [1, self.size]], self.size)
        nisa.tensor_reduce(dst=target, op=nl.add, data=self.terms, axis=4)


def scratch_buffers(heads, dtype):
    """Return the buffers that waves of up to `heads` heads use in turn; the inverses are zeros."""
    zeros = filled((PARTITIONS, 2 * 2 * SQUARE // PARTITIONS * heads), 0.0, dtype)
    buffers = []
    for _ in range(IN_TURN):
        shape = (2, HALF, heads, HALF)
        triangles = nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm, name="triangles")
        inverses = nl.ndarray((2, 2, HALF, heads, HALF), dtype=dtype, buffer=nl.private_hbm, name="inverses")
        transfer(inverses, zeros, COMPILER)
        buffers.append(ScratchBuffers(triangles, inverses))
    return buffers


def diagonal_pattern(most, heads):
    """Return the pattern of the blocks of squares [half, row, head of `most`, column].

    Its dims are [half, block, head, row, column].
    """
    row = most * HALF
    return [[HALF * row, 2], [BLOCK * (row + 1), IN_HALF], [HALF, heads], [row, BLOCK], [1, BLOCK]]


def multiply_terms(left, right):
    """Return products of elements, float32, by GpSimd."""
    terms = nl.ndarray(left.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=terms, data1=left, data2=right, op=nl.multiply, engine=nisa.engine.gpsimd)
    return terms


def load_rows(squares):
    """Load squares [half, row, head, column] with the rows of both halves on the partitions."""
    tile = nl.ndarray((PARTITIONS, squares.shape[2], HALF), dtype=squares.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=squares)
    return tile
