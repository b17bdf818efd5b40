"""The inverses of the blocks of 16 on the diagonal of (1 + A) transposed, element by element, a block on a partition.

For every head of a chunk of 128 tokens `gated_delta` inverts 1 + A, with A strictly lower triangular. The
steps of `delta/wave_steps.py` call the methods here for a wave: up to four units that are computed together,
each a chunk and up to four of its heads; `delta/chunk_inverse.py` joins the blocks to the whole inverse.

Two neighbouring blocks of w rows, whose inverses are Y1 and Y2, are joined to a block of 2w rows. N is the
block of -A transposed that lies right of the first and above the second one. Then the larger inverse has Y1 N
Y2 in the place of N. GpSimd multiplies the elements of the two products in float32, and the Vector engine
sums them.

Tiles of a wave have the n heads of all its units. The blocks of one tile lie on the partitions in the order
[half, block of the half, head]; a half is 64 of the chunk's tokens. Only DMAs move numbers between
partitions, so the blocks pass through HBM: the triangles on their way in, and the inverses, among zeros, on
their way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import PARTITIONS, filled

BLOCK = 16
"""Rows and columns of a block."""

HALF = PARTITIONS // 2
"""Tokens of each half of a chunk; the triangles of both halves are inverted side by side."""

SQUARE = HALF * HALF
IN_HALF = HALF // BLOCK
"""Blocks on the diagonal of a half."""

IN_TURN = 3
"""Scratch buffers in HBM: so many waves can have their blocks on their way through HBM at a time."""


@dataclass
class ScratchBuffers(nl.NKIObject):
    """Buffers in HBM that change the layout of a wave's blocks; one wave after another uses them.

    triangles: the diagonal squares of -A transposed, [half, row, head, column]. inverses: the squares [64,
    64] with the inverses of the blocks, [y or x, half, row, head, column]. y (index 0) is of (1 + A)
    transposed, x (index 1) of 1 + A.
    """

    triangles: nl.NkiTensor
    inverses: nl.NkiTensor


@dataclass
class BlockInverses(nl.NKIObject):
    """-A transposed of the heads of a wave, and the inverses of its diagonal blocks of 16.

    A tile is None until the method that computes it. turn: the index of the wave's `ScratchBuffers`. heads:
    the number of heads of the wave. negated: -A transposed, [j, head, i] for tokens j and i of the chunk.
    blocks: the blocks on its diagonal, [half and block and head, row, column]. inverses: of the blocks of (1
    + A) transposed, float32 in the layout of `blocks`. y, x: the inverses of both halves of (1 + A)
    transposed and of 1 + A, [row of both halves, head, column of the half].
    """

    turn: int
    heads: int
    negated: nl.NkiTensor | None = None
    blocks: nl.NkiTensor | None = None
    inverses: nl.NkiTensor | None = None
    y: nl.NkiTensor | None = None
    x: nl.NkiTensor | None = None

    def allocate(self, prompt):
        """Allocate `negated`, an SBUF tile [128, head, 128] in y's dtype without contents.

        `ChunkScores.compute_scores` of each unit of the wave writes its heads: -A transposed, for the
        triangle A of a head's chunk of 128 tokens.
        """
        shape = (PARTITIONS, self.heads, PARTITIONS)
        self.negated = nl.ndarray(shape, dtype=prompt.y.dtype, buffer=nl.sbuf)

    def store_triangles(self, prompt):
        """Store the two diagonal squares [64, 64] of `negated` (-A transposed), for all heads, to HBM.

        They go to `triangles` [half, row, head, column] of the wave's scratch buffer.
        """
        for half in range(2):
            tokens = slice(half * HALF, half * HALF + HALF)
            target = prompt.scratch[self.turn].triangles[half, :, 0 : self.heads, :]
            transfer(target, self.negated[tokens, :, tokens], COMPILER)

    def load_blocks(self, prompt):
        """Load the blocks [16, 16] on the diagonal of -A transposed from HBM to a new SBUF tile, `blocks`.

        The tile is [partition, row, column], with one block of one head on each partition.
        """
        triangles = prompt.scratch[self.turn].triangles
        shape = (2 * IN_HALF * self.heads, BLOCK, BLOCK)
        self.blocks = nl.ndarray(shape, dtype=triangles.dtype, buffer=nl.sbuf)
        pattern = build_diagonal_pattern(triangles.shape[2], self.heads)
        nisa.dma_copy(dst=self.blocks, src=triangles.ap(pattern=pattern))

    def invert_pairs(self, prompt):
        """Set `inverses` to the inverses of the 2 x 2 blocks on the diagonals of (1 + A) transposed.

        It is a new float32 SBUF tile in the layout of `blocks`, one block [16, 16] on each partition. Each 2
        x 2 block has ones on its diagonal and one element of -A transposed, copied from `blocks`, above it.
        All other elements are 0.
        """
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
        """Cast `inverses` to the dtype of the scratch buffer in HBM, and store them to its `inverses`, among zeros.

        Index 0 (y) gets the blocks [16, 16] as they are, and index 1 (x) each block transposed.
        """
        target, rows = prompt.scratch[self.turn].inverses, self.inverses.shape[0]
        both = nl.ndarray((rows, 2, BLOCK, BLOCK), dtype=target.dtype, buffer=nl.sbuf)
        # The Vector and the Scalar engine copy one layout each, side by side.
        nisa.tensor_copy(dst=both[:, 0, :, :], src=self.inverses)
        transposed = self.inverses.ap(pattern=[[BLOCK * BLOCK, rows], [1, BLOCK], [BLOCK, BLOCK]])
        nisa.activation(dst=both[:, 1, :, :], op=nl.copy, data=transposed)
        pattern = build_diagonal_pattern(target.shape[3], self.heads)
        pattern.insert(3, [2 * SQUARE * target.shape[3], 2])
        transfer(target.ap(pattern=pattern), both, COMPILER)

    def load_squares(self, prompt):
        """Load the inverses back from HBM, as squares [64, 64] of each half of a chunk: set `y` and `x`.

        Each is a new SBUF tile [64 * half + row, head, column], with zeros outside the blocks [16, 16] on the
        diagonals. y is of (1 + A) transposed, x of 1 + A.
        """
        inverses = prompt.scratch[self.turn].inverses
        self.y = load_halves(inverses[0, :, :, 0 : self.heads, :])
        self.x = load_halves(inverses[1, :, :, 0 : self.heads, :])


@dataclass
class BlockLevel(nl.NKIObject):
    """A level of the inversion of a wave's blocks of 16: inverses of `size` rows are joined in pairs.

    For each pair of neighbours the larger inverse gets Y1 N Y2. Y1 and Y2 are the inverses of the two; N is
    the block of -A transposed between them. terms: elementwise products of the latest matrix product, [half
    and block and head, pair, row, column, term] float32. inner: the product N Y2, [half and block and head,
    pair, row, column] float32. Both lie in SBUF.
    """

    wave: BlockInverses
    size: int
    terms: nl.NkiTensor | None = None
    inner: nl.NkiTensor | None = None

    def view_pairs(self, tile, pattern, offset):
        """Return a view of the pairs of neighbouring diagonal blocks of a tile [partition, 16, 16].

        The view is [partition, pair, ...], where the pattern gives the further dims.

        Args:
            pattern: the further dims of the view, [step in elements, count] each, as in `NkiTensor.ap`.
            offset: elements from the first diagonal element of a pair to the first element of the view.
        """
        step = 2 * self.size * (BLOCK + 1)
        rows = [[BLOCK * BLOCK, tile.shape[0]], [step, BLOCK // (2 * self.size)]]
        return tile.ap(pattern=rows + pattern, offset=offset)

    def multiply_first(self, prompt):
        """Set `terms` to the elementwise products that sum up to N Y2: a new float32 SBUF tile, by GpSimd.

        For each pair of neighbouring diagonal blocks of `size` rows, Y2 is the inverse of the second one, and
        N the block of -A transposed above it. terms is [partition, pair, row, column, term].
        """
        size = self.size
        left = self.view_pairs(self.wave.blocks, [[BLOCK, size], [0, size], [1, size]], size)
        right_pattern = [[0, size], [1, size], [BLOCK, size]]
        self.terms = multiply_terms(
            left, self.view_pairs(self.wave.inverses, right_pattern, size * (BLOCK + 1))
        )

    def sum_first(self, prompt):
        """Set `inner` to the sums of `terms` over their last dim, by the Vector engine.

        It is the product N Y2, a new SBUF tile [partition, pair, row, column] float32; see `multiply_first`.
        """
        self.inner = nl.ndarray(self.terms.shape[0:4], dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=self.inner, op=nl.add, data=self.terms, axis=4)

    def multiply_second(self, prompt):
        """Set `terms` to the elementwise products that sum up to Y1 `inner`: a new float32 SBUF tile, by GpSimd.

        For each pair of neighbouring diagonal blocks of `size` rows, Y1 is the inverse of the first one.
        terms is [partition, pair, row, column, term].
        """
        rows, pairs, size, _ = self.inner.shape
        square = size * size
        right = self.inner.ap(
            pattern=[[pairs * square, rows], [square, pairs], [0, size], [1, size], [size, size]]
        )
        left = self.view_pairs(self.wave.inverses, [[BLOCK, size], [0, size], [1, size]], 0)
        self.terms = multiply_terms(left, right)

    def sum_second(self, prompt):
        """Write the sums of `terms` over their last dim to the wave's `inverses`, above the second block of each pair.

        This completes the inverses of blocks of 2 * `size` rows. The Vector engine sums.
        """
        target = self.view_pairs(self.wave.inverses, [[BLOCK, self.size], [1, self.size]], self.size)
        nisa.tensor_reduce(dst=target, op=nl.add, data=self.terms, axis=4)


def allocate_scratch_buffers(heads, dtype):
    """Return a list of IN_TURN `ScratchBuffers`, tensors in HBM, for waves of up to `heads` heads.

    Stores zeros to `inverses` of each; `triangles` have no contents yet. Wave i is to use number i % IN_TURN.
    """
    zeros = filled((PARTITIONS, 2 * 2 * SQUARE // PARTITIONS * heads), 0.0, dtype)
    buffers = []
    for _ in range(IN_TURN):
        shape = (2, HALF, heads, HALF)
        triangles = nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm, name="triangles")
        inverses = nl.ndarray((2, 2, HALF, heads, HALF), dtype=dtype, buffer=nl.private_hbm, name="inverses")
        transfer(inverses, zeros, COMPILER)
        buffers.append(ScratchBuffers(triangles, inverses))
    return buffers


def build_diagonal_pattern(total_heads, heads):
    """Return the pattern for `NkiTensor.ap` of the blocks of 16 on the diagonals of the squares of `heads` heads.

    The tensor is [half, row, head, column] with `total_heads` heads, of which the first `heads` are used. The view
    is [half, block, head, row, column].
    """
    row = total_heads * HALF
    return [[HALF * row, 2], [BLOCK * (row + 1), IN_HALF], [HALF, heads], [row, BLOCK], [1, BLOCK]]


def multiply_terms(left, right):
    """Return the elementwise product of two views of equal shape as a new float32 tile in SBUF; GpSimd multiplies."""
    terms = nl.ndarray(left.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=terms, data1=left, data2=right, op=nl.multiply, engine=nisa.engine.gpsimd)
    return terms


def load_halves(squares):
    """Load squares [half, row, head, column] of HBM to a new SBUF tile [64 * half + row, head, column]."""
    tile = nl.ndarray((PARTITIONS, squares.shape[2], HALF), dtype=squares.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=squares)
    return tile
