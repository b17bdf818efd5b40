"""The state of some heads through a chunk of 128 tokens, and the outputs of the chunk; see `delta/chunk_scores.py`.

Two heads at a time: while one engine works on a pair, another one does on the next pair. What tokens write, u, lacks
the factor beta, which the decays have.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.block_inverse import HALF
from nki_kernels.delta.chunk_inverse import ChunkInverse
from nki_kernels.delta.chunk_scores import ChunkScores, multiply_heads
from nki_kernels.delta.output import gated_norm, sums_of_squares
from nki_kernels.delta.state_slots import PAIR, pair_states
from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import PARTITIONS


@dataclass
class HeadPair(nl.NKIObject):
    """Up to two heads of a unit, first … end of the unit's heads, and what their tokens write.

    index: of the pair in the unit's state. values: X v, later less what the state predicts for the tokens' keys,
    [i, head, width] in PSUM. writes: u, the same in the dtype of products.
    """

    inverse: ChunkInverse
    index: int
    first: int
    end: int
    values: nl.NkiTensor | None = None
    writes: nl.NkiTensor | None = None

    def multiply_values(self, prompt):
        """Begin `values` with X v."""
        v, width = self.inverse.scores.unit.operands.v, prompt.arguments.states.shape[3]
        shape = (PARTITIONS, self.end - self.first, width)
        self.values = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        for head in range(self.first, self.end):
            for row, column, block in self.inverse.list_blocks(head):
                nisa.nc_matmul(
                    dst=self.values[column : column + HALF, head - self.first, :],
                    stationary=block,
                    moving=v[row : row + HALF, head * width : (head + 1) * width],
                    accumulate=row > 0,
                    tile_position=(row, column),
                    tile_size=(HALF, HALF),
                )

    def write(self, prompt):
        """Subtract from `values` what the state predicts, and copy them to `writes`."""
        state = self.inverse.scores.unit.state.pairs[self.index].narrow
        for head in range(self.end - self.first):
            # `reading` has a minus sign, so that accumulation in PSUM subtracts from X v.
            nisa.nc_matmul(
                dst=self.values[:, head, :],
                stationary=self.inverse.reading[:, self.first + head, :],
                moving=state[:, head, :],
                accumulate=True,
            )
        self.writes = nl.ndarray(self.values.shape, dtype=state.dtype, buffer=nl.sbuf)
        nisa.activation(dst=self.writes, op=nl.copy, data=self.values)

    def advance(self, prompt):
        """Replace the pair's state by that after the chunk."""
        scores, pairs = self.inverse.scores, self.inverse.scores.unit.state.pairs
        total = scores.unit.select_columns(prompt.decays.total)
        bank = multiply_heads(scores.keys_after[:, self.first : self.end, :], self.writes)
        # The state stays in float32 from chunk to chunk; products take a rounded copy.
        wide = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        for head in range(self.end - self.first):
            nisa.scalar_tensor_tensor(
                dst=wide[:, head, :],
                data=pairs[self.index].wide[:, head, :],
                op0=nl.multiply,
                operand0=total[0 : bank.shape[0], self.first + head : self.first + head + 1],
                op1=nl.add,
                operand1=bank[:, head, :],
            )
        pairs[self.index] = pair_states(wide, self.writes.dtype)


@dataclass
class ChunkOutputs(nl.NKIObject):
    """Outputs of a unit, [i, head, width]: each tile is None until the method that computes it.

    pairs: a HeadPair for every two heads. queried: q S before the state changes, in PSUM. decayed: exp(G) (q S). o: in
    PSUM. roots: first the means of squares, then their inverse roots, [i, head].
    """

    scores: ChunkScores
    pairs: list
    queried: nl.NkiTensor | None = None
    decayed: nl.NkiTensor | None = None
    o: nl.NkiTensor | None = None
    roots: nl.NkiTensor | None = None
    y: nl.NkiTensor | None = None

    def query(self, prompt):
        """Compute `queried`."""
        queries, heads = self.scores.query_columns, self.scores.unit.count_heads()
        group, width = heads // queries.shape[1], prompt.arguments.states.shape[3]
        self.queried = nl.ndarray((PARTITIONS, heads, width), dtype=nl.float32, buffer=nl.psum)
        for head in range(heads):
            nisa.nc_matmul(
                dst=self.queried[:, head, :],
                stationary=queries[:, head // group, :],
                moving=self.scores.unit.state.pairs[head // PAIR].narrow[:, head % PAIR, :],
                accumulate=False,
            )

    def decay(self, prompt):
        """Compute `decayed`."""
        until = self.scores.unit.select_columns(prompt.decays.until)
        self.decayed = nl.ndarray(self.queried.shape, dtype=prompt.y.dtype, buffer=nl.sbuf)
        # The scale of an activation is one number of a partition, so each head takes an instruction.
        for head in range(self.queried.shape[1]):
            nisa.activation(
                dst=self.decayed[:, head, :],
                op=nl.copy,
                data=self.queried[:, head, :],
                scale=until[:, head : head + 1],
            )

    def attend(self, prompt):
        """Compute `o`."""
        self.o = nl.ndarray(self.decayed.shape, dtype=nl.float32, buffer=nl.psum)
        for head in range(self.decayed.shape[1]):
            nisa.nc_matmul(
                dst=self.o[:, head, :],
                stationary=self.scores.attended[:, head, :],
                moving=self.pairs[head // PAIR].writes[:, head % PAIR, :],
                accumulate=False,
            )
        # The identity adds the decayed part of all heads in PSUM; the Vector engine makes no sum.
        nisa.nc_matmul(dst=self.o, stationary=prompt.constants.identity, moving=self.decayed, accumulate=True)

    def average_squares(self, prompt):
        """Begin `roots` with the means of the squares of `o`, plus what the norm adds."""
        self.roots = sums_of_squares(self.o, nl.float32)
        nisa.scalar_tensor_tensor(
            dst=self.roots,
            data=self.roots,
            op0=nl.multiply,
            operand0=1.0 / self.o.shape[2],
            op1=nl.add,
            operand1=self.scores.unit.repeat_for_heads(self.scores.norm_offset.expand_dim(2)),
        )

    def normalise(self, prompt):
        """Compute `y`, normalised and gated."""
        nisa.activation(dst=self.roots, op=nl.rsqrt, data=self.roots)
        self.y = gated_norm(self.o, self.roots, self.scores.gate_factors, prompt.y.dtype)

    def store(self, prompt):
        """Store `y`; after the last chunk the state as well."""
        unit, width = self.scores.unit, self.y.shape[2]
        (start, stop), (first, end) = unit.rows, unit.heads
        y = self.y.reshape((PARTITIONS, (end - first) * width))
        transfer(prompt.y[start:stop, first * width : end * width], y[0 : stop - start, :], COMPILER)
        if unit.is_last:
            unit.state.store(prompt.arguments.states, prompt.slots)
