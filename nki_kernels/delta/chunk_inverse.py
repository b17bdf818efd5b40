"""The inverse of the unit triangle of a chunk, (1 + A)^-1 with A strictly lower triangular, by joining blocks.

`gated_delta` needs X = (1 + A)^-1 for every head of a chunk of 128 tokens; the steps of `delta/wave_steps.py`
call the methods here for a unit, a chunk and up to four heads. `delta/block_inverse.py` has inverted the
blocks of 16 rows on the diagonal. `JoinLevel` joins neighbouring blocks in pairs, from 16 to 32 and from 32
to 64 rows. `ChunkInverse` joins the two halves of 64 tokens.

With X the inverses of the diagonal blocks of size w, those of size 2w are X - X A X in the blocks of A
between two neighbours. So no power of A is ever taken: the inverse is as exact as forward substitution, also
where keys repeat and powers of A grow beyond all bounds.

The inverses of a wave (up to four units computed together) are in two SBUF tiles [row of both halves, head,
column of the half]: x has X and y has X transposed, since a product contracts over partitions. `negated` is
-A transposed, [j, head, i]; what it has on its diagonal is never used. Of two blocks that are joined, x
changes in the columns of the first one, and y in the columns of the second one: only these are computed. Both
halves are computed side by side, each by 64 x 64 cells of the PE array.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.block_inverse import HALF
from nki_kernels.delta.chunk_scores import ChunkScores
from nki_kernels.delta.masks import LEVELS
from nki_kernels.tiles import PARTITIONS

CELLS = (HALF, HALF)

IN_TURN = 4
"""Tiles for each level's `JoinLevel.right`: so many units can have their blocks joined at a time."""


@dataclass
class ChunkInverse(nl.NKIObject):
    """The inverse X of a unit's triangle; a tile is None until the method that computes it.

    The inverses of both halves are in the wave's x and y, see `BlockInverses`. right: -A X for the rows of
    the second half and the columns of the first one, [row, head, column] in SBUF on partitions 64 to 127.
    corner: the block of X transposed with rows of the first half and columns of the second one, [row, head,
    column] in SBUF. reading: -(X exp(G) k) transposed, [depth, head, i] in SBUF, which multiplies the state.
    exp(G) k are the keys times their decays from the start of the chunk.
    """

    scores: ChunkScores
    right: nl.NkiTensor | None = None
    corner: nl.NkiTensor | None = None
    reading: nl.NkiTensor | None = None

    def select_heads(self, tile):
        """Return a view of the unit's heads of a tile [row, head, column] that has all heads of the wave."""
        return self.scores.unit.select_heads(tile)

    def multiply_across_halves(self, prompt):
        """Set `right` to -A X for the rows of the second half, the first of the two products that join the halves.

        A is the triangle of a chunk of 128 tokens and X = (1 + A)^-1, known for each half of 64. `right` is a
        new SBUF tile [128, head, 64], which has these rows on partitions 64 to 127 and no contents on the
        others.
        """
        x, negated = self.select_heads(self.scores.blocks.x), self.select_heads(self.scores.blocks.negated)
        inner = nl.ndarray((PARTITIONS, x.shape[1], HALF), dtype=nl.float32, buffer=nl.psum)
        for head in range(x.shape[1]):
            # Columns from 64 on of the array write partitions from 64 on, where the next product contracts with y.
            nisa.nc_matmul(
                dst=inner[HALF:PARTITIONS, head, :],
                stationary=negated[0:HALF, head, HALF:PARTITIONS],
                moving=x[0:HALF, head, :],
                accumulate=False,
                tile_position=(0, HALF),
                tile_size=CELLS,
            )
        self.right = nl.ndarray(inner.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.activation(dst=self.right[HALF:PARTITIONS, :, :], op=nl.copy, data=inner[HALF:PARTITIONS, :, :])

    def join_halves(self, prompt):
        """Set `corner` to the block of X transposed with rows of the first half and columns of the second.

        X = (1 + A)^-1. It is a new SBUF tile [64, head, 64] in y's dtype, the second product that joins the
        halves: the transpose of X `right`.
        """
        y = self.select_heads(self.scores.blocks.y)
        joined = nl.ndarray((HALF, y.shape[1], HALF), dtype=nl.float32, buffer=nl.psum)
        for head in range(y.shape[1]):
            nisa.nc_matmul(
                dst=joined[:, head, :],
                stationary=self.right[HALF:PARTITIONS, head, :],
                moving=y[HALF:PARTITIONS, head, :],
                accumulate=False,
                tile_position=(HALF, 0),
                tile_size=CELLS,
            )
        self.corner = nl.ndarray(joined.shape, dtype=y.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=self.corner, src=joined)

    def list_blocks(self, head):
        """Return the three blocks [64, 64] of a head's X transposed that are not zeros: (row, column, view) each.

        row and column are those of the block's first element in X transposed [128, 128]: 0 or 64. The views
        are in SBUF.
        """
        y = self.select_heads(self.scores.blocks.y)
        return [
            (0, 0, y[0:HALF, head, :]),
            (0, HALF, self.corner[:, head, :]),
            (HALF, HALF, y[HALF:PARTITIONS, head, :]),
        ]

    def compute_reading(self, prompt):
        """Set `reading` to -(X `keys_before`) transposed, for all heads of the unit.

        It is a new SBUF tile [depth, head, token]. X = (1 + A)^-1, and `keys_before` are the chunk's keys
        times their decays from the start of the chunk. The product of `reading` with the state before the
        chunk is what the state predicts for the tokens, with a minus sign.
        """
        keys = self.scores.keys_before
        bank = nl.ndarray((keys.shape[2], keys.shape[1], PARTITIONS), dtype=nl.float32, buffer=nl.psum)
        for head in range(keys.shape[1]):
            for row, column, block in self.list_blocks(head):
                nisa.nc_matmul(
                    dst=bank[:, head, column : column + HALF],
                    stationary=keys[row : row + HALF, head, :],
                    moving=block,
                    accumulate=row > 0,
                    tile_position=(row, 0),
                    tile_size=(HALF, PARTITIONS),
                )
        self.reading = nl.ndarray(bank.shape, dtype=keys.dtype, buffer=nl.sbuf)
        nisa.activation(dst=self.reading, op=nl.copy, data=bank, scale=-1.0)


@dataclass
class JoinLevel(nl.NKIObject):
    """A level at which a unit's diagonal blocks of LEVELS[level] rows are joined in pairs to blocks of twice as many.

    right: -A X, the first product and the right operand of the second products, [row, head, column] in SBUF:
    numbers in rows of second blocks and columns of first ones, zeros elsewhere. joined_x, joined_y: what
    replaces the columns of x and y that change, [row, head, pair, column of block] float32 in PSUM.
    """

    inverse: ChunkInverse
    level: int
    right: nl.NkiTensor | None = None
    joined_x: nl.NkiTensor | None = None
    joined_y: nl.NkiTensor | None = None

    def select_changing(self):
        """Return (x, y): views of the columns of the wave's inverses that change as blocks are joined in pairs.

        Each is [row of both halves, head of the unit, pair, column of block] in SBUF. In x, the inverse,
        these are the columns of the first block of each pair; in y, the inverse transposed, the columns of
        the second block.
        """
        inverse, size = self.inverse, LEVELS[self.level]
        x = select_blocks(inverse.select_heads(inverse.scores.blocks.x), size, False)
        return x, select_blocks(inverse.select_heads(inverse.scores.blocks.y), size, True)

    def multiply_first(self, prompt):
        """Set `right` to -A X for each pair of blocks that is joined: rows of its second, columns of its first one.

        X has the inverses of the blocks before they are joined. `right` is a view of an SBUF tile of
        `prompt.right_operands`, [row of both halves, head, column]; all other elements are zeros.
        """
        inverse, size = self.inverse, LEVELS[self.level]
        inner = multiply_halves(
            inverse.select_heads(inverse.scores.blocks.negated), self.select_changing()[0]
        )
        right_operand = prompt.right_operands[self.level][inverse.scores.unit.index % IN_TURN]
        self.right = right_operand[:, 0 : inner.shape[1], :]
        mask = prompt.constants.second_blocks[self.level].reshape((PARTITIONS, 1, inner.shape[2], 1))
        across = mask.broadcast(1, inner.shape[1]).broadcast(3, size)
        # The products have rows of first blocks too: the mask clears them as the bank is evicted.
        nisa.tensor_tensor(
            dst=select_blocks(self.right, size, False), data1=inner, data2=across, op=nl.multiply
        )

    def join(self, prompt):
        """Set `joined_x` to x + X `right` and `joined_y` to y + (X `right`)^T, in the columns that change.

        x and y are the wave's inverses X and X transposed. Each is a new float32 PSUM tile [row of both
        halves, head, pair, column of block]. `copy_joined` copies them to x and y.
        """
        x, y = self.select_changing()
        left, identity = self.inverse.select_heads(self.inverse.scores.blocks.y), prompt.constants.identity
        self.joined_x = multiply_halves(left, select_blocks(self.right, LEVELS[self.level], False))
        # The identity adds the blocks before in PSUM, so the Scalar engine only copies the result.
        nisa.nc_matmul(dst=self.joined_x, stationary=identity, moving=x, accumulate=True)
        self.joined_y = multiply_halves(self.right, y)
        nisa.nc_matmul(dst=self.joined_y, stationary=identity, moving=y, accumulate=True)

    def copy_joined(self, prompt):
        """Copy `joined_x` and `joined_y` from PSUM to the wave's inverses in SBUF, x and (transposed) y.

        Only the columns that change are written: those of the first block of each pair in x, of the second in
        y.
        """
        x, y = self.select_changing()
        nisa.activation(dst=x, op=nl.copy, data=self.joined_x)
        nisa.activation(dst=y, op=nl.copy, data=self.joined_y)


def allocate_right_operands(heads, dtype):
    """Return SBUF tiles of zeros for `JoinLevel.right`: for each level a list of IN_TURN tiles [128, heads, 64].

    Unit i uses tile i % IN_TURN. Units write columns of first blocks only, so that columns of second ones
    stay 0.
    """
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
    """Return a view of half of the columns of a tile [row, head, column]: [row, head, pair, column of block].

    The columns are pairs of blocks of `size` columns; the view has the second block of each pair if `second`,
    else the first.
    """
    pairs = tile.reshape_dim(2, (HALF // (2 * size), 2 * size))
    return pairs[:, :, :, size : 2 * size] if second else pairs[:, :, :, 0:size]


def multiply_halves(stationary, moving):
    """Return stationary^T @ moving for each head and each half by itself: a new float32 PSUM tile of moving's shape.

    Args:
        stationary: [row of both halves, head, column]; of 128 columns each half takes the 64 of its tokens.
        moving: [row of both halves, head, pair, column].
    """
    bank = nl.ndarray(moving.shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(moving.shape[1]):
        for half in range(2):
            rows = slice(half * HALF, half * HALF + HALF)
            columns = rows if stationary.shape[2] > HALF else slice(0, HALF)
            # The halves take opposite quarters of the array, so their matmuls run side by side.
            nisa.nc_matmul(
                dst=bank[rows, head, :, :],
                stationary=stationary[rows, head, columns],
                moving=moving[rows, head, :, :],
                accumulate=False,
                tile_position=(half * HALF, half * HALF),
                tile_size=CELLS,
            )
    return bank
