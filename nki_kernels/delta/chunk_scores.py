"""One chunk of 128 tokens of some heads: what needs no state; `delta/chunk_outputs.py` takes the state through it.

    u = X (v - (exp(G) k) S),   o = exp(G) (q S) + P u,   S' = exp(G_end) S + (exp(G_end - G) beta k)^T u

where X is the inverse of the triangle, G the sum of g up to a token and P_ij = q_i . k_j beta_j exp(G_i - G_j) for
j <= i. A has the same decays, times k_i . k_j: beta is that of the token that writes, in place of that of the token
that reads, so what a token writes is beta u.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.block_inverse import BlockInverses
from nki_kernels.delta.decay import columns_together
from nki_kernels.delta.output import gate_factors, sums_of_squares
from nki_kernels.delta.wave_plan import Unit
from nki_kernels.recurrent.ssd_between import HALF, DifferenceRows
from nki_kernels.tiles import PARTITIONS

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass
class ChunkScores(nl.NKIObject):
    """What a unit needs neither the inverse nor the state for: each tile is None until the method that computes it.

    blocks: has -A transposed of the wave. sums: operands whose product has the logarithms of the decays between tokens;
    None if sums between them are taken directly. key_rows: keys over their lengths, [j, key head, depth]. norm_offset:
    what the norm adds to the mean of squares, [i, key head]. decays: beta_j exp(G_i - G_j) for j <= i, else 0, [j,
    head, i]. query_columns, key_columns: [depth, key head, i]. attended: P transposed, [j, head, i]. keys_before,
    keys_after: keys times the decay before and after them, the latter with beta, [j, head, depth]. gate_factors:
    [i, head, width].
    """

    unit: Unit
    blocks: BlockInverses
    sums: DifferenceRows | None = None
    key_rows: nl.NkiTensor | None = None
    norm_offset: nl.NkiTensor | None = None
    decays: nl.NkiTensor | None = None
    query_columns: nl.NkiTensor | None = None
    key_columns: nl.NkiTensor | None = None
    attended: nl.NkiTensor | None = None
    keys_before: nl.NkiTensor | None = None
    keys_after: nl.NkiTensor | None = None
    gate_factors: nl.NkiTensor | None = None

    def load_sums(self, prompt):
        """Load `sums`."""
        (first, end), heads = self.unit.heads, prompt.decays.g.shape[2]
        together = columns_together(heads)
        column = self.unit.column * heads
        start = column % together
        rows = prompt.decays.rows[column // together]
        self.sums = prompt.differences.load(rows, (start + first, start + end))

    def normalise(self, prompt):
        """Compute `key_rows` and `norm_offset`.

        Queries are taken as they are: o is then larger by sqrt(dk) times their lengths, and so is what the norm adds.
        """
        q, k, depth = self.unit.operands.q, self.unit.operands.k, prompt.arguments.states.shape[2]
        shape = (PARTITIONS, k.shape[1] // depth, depth)
        lengths = sums_of_squares(k.reshape(shape), k.dtype)
        nisa.tensor_scalar(
            dst=lengths, data=lengths, op0=nl.add, operand0=LENGTH_EPS, op1=nl.power, operand1=-0.5
        )
        self.key_rows = nl.ndarray(shape, dtype=k.dtype, buffer=nl.sbuf)
        scale_heads(self.key_rows, k.reshape(shape), lengths)
        self.norm_offset = sums_of_squares(q.reshape(shape), q.dtype)
        nisa.tensor_scalar(
            dst=self.norm_offset,
            data=self.norm_offset,
            op0=nl.add,
            operand0=LENGTH_EPS,
            op1=nl.multiply,
            operand1=prompt.arguments.eps * depth,
        )

    def decay(self, prompt):
        """Compute `decays`, in float32 where sums between tokens are taken directly."""
        unit, constants, heads = self.unit, prompt.constants, self.unit.count_heads()
        shape = (PARTITIONS, heads, PARTITIONS)
        bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        if self.sums is None:
            terms = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            after = constants.after.reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
            scale_heads(terms, after, unit.select_columns(prompt.decays.g))
            for head in range(heads):
                nisa.nc_matmul(
                    dst=bank[:, head, :],
                    stationary=terms[:, head, :],
                    moving=constants.until,
                    accumulate=False,
                )
        else:
            nisa.nc_matmul(
                dst=bank,
                stationary=self.sums.keys,
                moving=self.sums.queries,
                accumulate=False,
                tile_position=(self.sums.row, 0),
                tile_size=(HALF, PARTITIONS),
            )
        across = constants.visible.reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
        # Keys behind a query are masked before exp, so that it is 0 there, where it might be infinite.
        nisa.nc_matmul(dst=bank, stationary=constants.identity, moving=across, accumulate=True)
        self.decays = nl.ndarray(shape, dtype=constants.identity.dtype, buffer=nl.sbuf)
        nisa.activation(dst=self.decays, op=nl.exp, data=bank)
        if self.sums is None:
            scale_heads(self.decays, self.decays, unit.select_columns(prompt.decays.beta))

    def transpose(self, prompt):
        """Compute `query_columns` and `key_columns`."""
        self.query_columns = transpose_heads(self.unit.operands.q.reshape(self.key_rows.shape))
        self.key_columns = transpose_heads(self.key_rows)

    def score(self, prompt):
        """Write -A transposed to the unit's heads of the wave, and compute `attended`."""
        unit, keys = self.unit, self.key_columns
        self.attended = nl.ndarray(self.decays.shape, dtype=keys.dtype, buffer=nl.sbuf)
        key_scores, query_scores = multiply_heads(keys, keys), multiply_heads(keys, self.query_columns)
        # Value heads share the scores of their key head by a view, and each has its own decays.
        nisa.scalar_tensor_tensor(
            dst=unit.select_heads(self.blocks.negated),
            data=unit.repeat_for_heads(key_scores),
            op0=nl.multiply,
            operand0=-1.0,
            op1=nl.multiply,
            operand1=self.decays,
        )
        nisa.tensor_tensor(
            dst=self.attended, data1=unit.repeat_for_heads(query_scores), data2=self.decays, op=nl.multiply
        )

    def scale_keys(self, prompt):
        """Compute `keys_before` and `keys_after`."""
        self.keys_before = self.scaled_keys(prompt.decays.until)
        self.keys_after = self.scaled_keys(prompt.decays.after)

    def scaled_keys(self, factors):
        """Return the keys of value heads times one of the tiles of `ChunkDecays`."""
        columns = self.unit.select_columns(factors)
        shape = (PARTITIONS, columns.shape[1], self.key_rows.shape[2])
        keys = nl.ndarray(shape, dtype=self.key_rows.dtype, buffer=nl.sbuf)
        scale_heads(keys, self.unit.repeat_for_heads(self.key_rows), columns)
        return keys

    def gate(self, prompt):
        """Compute `gate_factors`."""
        self.gate_factors = gate_factors(self.unit.operands.z, prompt.norm_weight)


def scale_heads(dst, data, columns):
    """Multiply elements [rows, heads, n] by a number of their row and head, [rows, heads], on GpSimd."""
    across = columns.reshape((columns.shape[0], columns.shape[1], 1)).broadcast(2, dst.shape[2])
    nisa.tensor_tensor(dst=dst, data1=data, data2=across, op=nl.multiply, engine=nisa.engine.gpsimd)


def transpose_heads(tile):
    """Return rows [128, heads, depth] as [depth, heads, 128]."""
    heads, depth = tile.shape[1], tile.shape[2]
    bank = nl.ndarray((depth, heads, PARTITIONS), dtype=tile.dtype, buffer=nl.psum)
    result = nl.ndarray(bank.shape, dtype=tile.dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.nc_transpose(dst=bank[:, head, :], data=tile[:, head, :])
    nisa.activation(dst=result, op=nl.copy, data=bank)
    return result


def multiply_heads(stationary, moving):
    """Return the product over the rows of each head of [row, head, m] and [row, head, n]: [m, head, n] in PSUM."""
    _, heads, size = stationary.shape
    bank = nl.ndarray((size, heads, moving.shape[2]), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=stationary[:, head, :],
            moving=moving[:, head, :],
            accumulate=False,
        )
    return bank
