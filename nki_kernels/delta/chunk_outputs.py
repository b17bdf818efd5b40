"""The state of some heads through a chunk of 128 tokens, and the outputs of the chunk; see `delta/chunk_scores.py`.

    u = X v - X (exp(G) k) S                            what the tokens write, without the factor beta
    o = exp(G) (q S) + P u                              outputs before norm and gate
    S' = exp(G_end) S + (exp(G_end - G) beta k)^T u     the state after the chunk; S is the state before it

X is the inverse of the chunk's triangle, G the sum of the logarithms of the decays up to a token, and G_end
that of the whole chunk. P has the scores of queries with keys, times beta and the decays between the two
tokens.

The steps of `delta/wave_steps.py` call the methods here for a unit: a chunk of a sequence and up to four
heads. Products with the state take two heads at a time: while one engine works on a pair, another one works
on the next pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.block_inverse import HALF
from nki_kernels.delta.chunk_inverse import ChunkInverse
from nki_kernels.delta.chunk_scores import ChunkScores, multiply_heads
from nki_kernels.delta.output import apply_gated_norm, sum_squares
from nki_kernels.delta.state_slots import PAIR, build_state_pair
from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import PARTITIONS


@dataclass
class HeadPair(nl.NKIObject):
    """Up to two heads of a unit, and what their tokens write; a tile is None until the method that computes it.

    first, end: the range of the heads among the unit's heads. index: of the pair among the pairs of the
    unit's state. values: X v, and after `compute_writes` u, [i, head, width] float32 in PSUM. writes: a copy
    of u in SBUF, in the dtype of products.
    """

    inverse: ChunkInverse
    index: int
    first: int
    end: int
    values: nl.NkiTensor | None = None
    writes: nl.NkiTensor | None = None

    def multiply_values(self, prompt):
        """Set `values` to X v for the two heads of the pair, or one: a new PSUM tile [token, head, width] float32.

        X is the inverse of the triangle of a chunk of 128 tokens, v the values of the tokens.
        """
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

    def compute_writes(self, prompt):
        """Subtract what the state predicts for the tokens from `values` in PSUM, and copy the result to `writes`.

        `values` are X v before. `writes` is a new SBUF tile [token, head, width]: what the tokens write to
        the state (u), without the factor beta.
        """
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

    def advance_state(self, prompt):
        """Replace the pair's `StatePair` in the unit's state by a new one, in SBUF, with the state after the chunk.

        It is the float32 state times the decay over the chunk, plus `ChunkScores.keys_after` transposed times
        `writes`.
        """
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
        pairs[self.index] = build_state_pair(wide, self.writes.dtype)


@dataclass
class ChunkOutputs(nl.NKIObject):
    """Outputs of a unit, tiles [i, head, width]: each is None until the method that computes it.

    pairs: a HeadPair for every two heads. queried: q S, float32 in PSUM. decayed: exp(G) (q S), in SBUF in
    y's dtype. o: the outputs before norm and gate, float32 in PSUM. roots: [i, head] float32 in SBUF, first
    the means of the squares of o plus the norm's epsilon, after `normalise` their inverse roots. y: the
    results, in SBUF.
    """

    scores: ChunkScores
    pairs: list
    queried: nl.NkiTensor | None = None
    decayed: nl.NkiTensor | None = None
    o: nl.NkiTensor | None = None
    roots: nl.NkiTensor | None = None
    y: nl.NkiTensor | None = None

    def query_state(self, prompt):
        """Set `queried` to q S, the queries times the state before the chunk.

        It is a new PSUM tile [token, head, width] float32. Must be called before `HeadPair.advance_state`
        replaces the state.
        """
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

    def decay_queried(self, prompt):
        """Set `decayed` to `queried` times the decay from the chunk's start up to each token.

        It is a new SBUF tile [token, head, width] in the dtype of the result y.
        """
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
        """Set `o` to P u + `decayed`: a new PSUM tile [token, head, width] float32, the outputs before norm and gate.

        P are the scores of queries with keys, times beta and decays (`ChunkScores.attended`). u is what the
        tokens write (`HeadPair.writes`).
        """
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
        """Set `roots` to the means over the width of the squares of `o`, plus the norm's epsilon.

        It is a new float32 SBUF tile [token, head]; the epsilon is `ChunkScores.norm_offset`. `normalise`
        takes the roots.
        """
        self.roots = sum_squares(self.o, nl.float32)
        nisa.scalar_tensor_tensor(
            dst=self.roots,
            data=self.roots,
            op0=nl.multiply,
            operand0=1.0 / self.o.shape[2],
            op1=nl.add,
            operand1=self.scores.unit.repeat_for_heads(self.scores.norm_offset.expand_dim(2)),
        )

    def normalise(self, prompt):
        """Set `y` to the final outputs, `o` * roots * gate factors: a new SBUF tile [token, head, width].

        First replaces `roots`, which are mean squares before, by their inverse square roots.
        """
        nisa.activation(dst=self.roots, op=nl.rsqrt, data=self.roots)
        self.y = apply_gated_norm(self.o, self.roots, self.scores.gate_factors, prompt.y.dtype)

    def store(self, prompt):
        """Store `y` to the unit's rows and columns of the kernel's result in HBM.

        If the unit is the last chunk of its sequence, also store the state of its heads to the sequence's
        slot.
        """
        unit, width = self.scores.unit, self.y.shape[2]
        (start, stop), (first, end) = unit.rows, unit.heads
        y = self.y.reshape((PARTITIONS, (end - first) * width))
        transfer(prompt.y[start:stop, first * width : end * width], y[0 : stop - start, :], COMPILER)
        if unit.is_last:
            unit.state.store(prompt.arguments.states, prompt.slots)
