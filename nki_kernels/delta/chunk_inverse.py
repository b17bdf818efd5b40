"""The inverse of the unit triangle of a chunk, (1 + A)^-1 with A strictly lower triangular, by joining blocks.

With X the inverses of the diagonal blocks of size w, those of size 2w are X - X A X in the blocks of A that join two
neighbours. So no power of A is ever taken: the inverse is as exact as forward substitution, also where keys repeat
and powers of A grow beyond all bounds. The inverses of blocks of 16 are given (`delta/block_inverse.py`). The two
halves of a chunk are inverted side by side, each by 64 x 64 cells of the array; the last step joins them. Everything is
kept transposed as well (y), since a product contracts over partitions.

`negated` is -A transposed, [j, head, i]; what it has on its diagonal is never used. Of two blocks that are joined, x
changes in the columns of the first one, and y in those of the second one: only these are computed.
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
"""Units whose blocks are joined at a time."""


@dataclass
class ChunkInverse(nl.NKIObject):
    """The inverse of a unit's triangle, whose halves are in the wave's blocks, and what follows from it.

    right: the first product of the last level, [row, head, column]; it has the rows of the second half only. corner:
    the block of the transposed inverse that joins the halves, [column, head, row]. reading: -(X exp(G) k) transposed,
    [depth, head, i], which multiplies the state.
    """

    scores: ChunkScores
    right: nl.NkiTensor | None = None
    corner: nl.NkiTensor | None = None
    reading: nl.NkiTensor | None = None

    def select_heads(self, tile):
        """Return the unit's heads of a tile of the wave."""
        return self.scores.unit.select_heads(tile)

    def link_halves(self, prompt):
        """Compute `right`, -A X for the rows of the second half: the first of two products that join the halves."""
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
        """Compute `corner`."""
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
        """Return the three blocks of a head's transposed inverse that are not zeros: (row, column, block)."""
        y = self.select_heads(self.scores.blocks.y)
        return [
            (0, 0, y[0:HALF, head, :]),
            (0, HALF, self.corner[:, head, :]),
            (HALF, HALF, y[HALF:PARTITIONS, head, :]),
        ]

    def read_keys(self, prompt):
        """Compute `reading`."""
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
    """A level, an index of `LEVELS`, at which a unit's blocks are joined two by two.

    right: the first product, the right operand of the second products; it has rows of second blocks and columns of
    first ones. joined_x, joined_y: the blocks that change, in PSUM: x in the columns of first blocks, y in those of
    second ones.
    """

    inverse: ChunkInverse
    level: int
    right: nl.NkiTensor | None = None
    joined_x: nl.NkiTensor | None = None
    joined_y: nl.NkiTensor | None = None

    def select_changing(self):
        """Return the blocks of x and y that change."""
        inverse, size = self.inverse, LEVELS[self.level]
        x = select_blocks(inverse.select_heads(inverse.scores.blocks.x), size, False)
        return x, select_blocks(inverse.select_heads(inverse.scores.blocks.y), size, True)

    def link(self, prompt):
        """Compute `right`."""
        inverse, size = self.inverse, LEVELS[self.level]
        inner = products(inverse.select_heads(inverse.scores.blocks.negated), self.select_changing()[0])
        right_operand = prompt.right_operands[self.level][inverse.scores.unit.index % IN_TURN]
        self.right = right_operand[:, 0 : inner.shape[1], :]
        mask = prompt.constants.second_blocks[self.level].reshape((PARTITIONS, 1, inner.shape[2], 1))
        across = mask.broadcast(1, inner.shape[1]).broadcast(3, size)
        # The products have rows of first blocks too: the mask clears them as the bank is evicted.
        nisa.tensor_tensor(
            dst=select_blocks(self.right, size, False), data1=inner, data2=across, op=nl.multiply
        )

    def join(self, prompt):
        """Compute `joined_x` and `joined_y`: the second products, plus the blocks before."""
        x, y = self.select_changing()
        left, identity = self.inverse.select_heads(self.inverse.scores.blocks.y), prompt.constants.identity
        self.joined_x = products(left, select_blocks(self.right, LEVELS[self.level], False))
        # The identity adds the blocks before in PSUM, so the Scalar engine only copies the result.
        nisa.nc_matmul(dst=self.joined_x, stationary=identity, moving=x, accumulate=True)
        self.joined_y = products(self.right, y)
        nisa.nc_matmul(dst=self.joined_y, stationary=identity, moving=y, accumulate=True)

    def copy_joined(self, prompt):
        """Copy the blocks that change to the inverses."""
        x, y = self.select_changing()
        nisa.activation(dst=x, op=nl.copy, data=self.joined_x)
        nisa.activation(dst=y, op=nl.copy, data=self.joined_y)


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
