"""One chunk of 128 tokens of some heads: what needs no state; `delta/chunk_outputs.py` takes the state through it.

    u = X (v - (exp(G) k) S),   o = exp(G) (q S) + P u,   S' = exp(G_end) S + (exp(G_end - G) beta k)^T u

S is the state before the chunk and S' the state after it. G is the sum of g, the logarithm of the decay, up
to a token, and G_end that of the whole chunk. P_ij = q_i . k_j beta_j exp(G_i - G_j) for j <= i, else 0. A
has k_i . k_j in the place of q_i . k_j, for j < i, and X is the inverse of 1 + A. beta is that of the token
that writes (j), in place of that of the token that reads (i), so that token j writes beta_j u_j.

The steps of `delta/wave_steps.py` call the methods here for a unit: a chunk of a sequence and up to four
heads. A wave is up to four units that are computed together.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.block_inverse import BlockInverses
from nki_kernels.delta.decay import count_shared_columns
from nki_kernels.delta.output import compute_gate_factors, sum_squares
from nki_kernels.delta.wave_plan import Unit
from nki_kernels.recurrent.ssd_between import HALF, DifferenceRows
from nki_kernels.tiles import PARTITIONS

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass
class ChunkScores(nl.NKIObject):
    """What a unit needs neither the inverse nor the state for: each tile is None until the method that computes it.

    All tiles are in SBUF, and i and j are tokens of the chunk. blocks: those of the wave, of which `negated`
    has -A transposed. sums: operands of the matmul that gives the logarithms of the decays between tokens;
    None where these are summed over the g between the two tokens (float32, or more than 128 heads). key_rows:
    keys over their lengths, [j, key head, depth]. norm_offset: what the norm adds to the mean of squares, [i,
    key head] float32. decays: exp(G_i - G_j) beta_j for j <= i, else 0, [j, head, i]. query_columns,
    key_columns: [depth, key head, i]. attended: P transposed, [j, head, i]. keys_before: keys times exp(G).
    keys_after: keys times beta exp(G_end - G). Both are [j, head, depth]. gate_factors: norm weight times
    silu(z), [i, head, width] float32.
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
        """Load the sums of the unit's logarithms of decays from HBM, and set `sums` to the operands with them.

        They are two SBUF tiles of `prompt.differences`, which must not be None.
        """
        (first, end), heads = self.unit.heads, prompt.decays.g.shape[2]
        together = count_shared_columns(heads)
        column = self.unit.column * heads
        start = column % together
        rows = prompt.decays.rows[column // together]
        self.sums = prompt.differences.load(rows, (start + first, start + end))

    def normalise_keys(self, prompt):
        """Set `key_rows` to keys over their lengths, and `norm_offset` to what the outputs' norm adds: new SBUF tiles.

        key_rows is [token, key head, depth], norm_offset [token, key head] float32. Queries are not divided:
        outputs o are then larger by the length of q times sqrt(dk). So `norm_offset` is eps times the square
        of that factor.
        """
        q, k, depth = self.unit.operands.q, self.unit.operands.k, prompt.arguments.states.shape[2]
        shape = (PARTITIONS, k.shape[1] // depth, depth)
        lengths = sum_squares(k.reshape(shape), k.dtype)
        nisa.tensor_scalar(
            dst=lengths, data=lengths, op0=nl.add, operand0=LENGTH_EPS, op1=nl.power, operand1=-0.5
        )
        self.key_rows = nl.ndarray(shape, dtype=k.dtype, buffer=nl.sbuf)
        scale_heads(self.key_rows, k.reshape(shape), lengths)
        self.norm_offset = sum_squares(q.reshape(shape), q.dtype)
        nisa.tensor_scalar(
            dst=self.norm_offset,
            data=self.norm_offset,
            op0=nl.add,
            operand0=LENGTH_EPS,
            op1=nl.multiply,
            operand1=prompt.arguments.eps * depth,
        )

    def compute_decays(self, prompt):
        """Set `decays` to beta_j times the decay from token j to token i, for j <= i, else 0: [j, head, i].

        It is a new SBUF tile in the dtype of qkv. beta_j is the strength with which token j writes.
        """
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

    def transpose_operands(self, prompt):
        """Set `query_columns` and `key_columns` to the chunk's queries, and keys over their lengths, transposed.

        Each is a new SBUF tile [depth, key head, token].
        """
        self.query_columns = transpose_heads(self.unit.operands.q.reshape(self.key_rows.shape))
        self.key_columns = transpose_heads(self.key_rows)

    def compute_scores(self, prompt):
        """Compute the scores of keys with keys (A) and of queries with keys (P), times the decays between the tokens.

        Writes -A transposed, [j, head, i], to the unit's heads of the wave's `negated` in SBUF. Sets
        `attended`, a new SBUF tile [j, head, i], to P transposed. What is written on the diagonal of -A is
        not 0; it is never read.
        """
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
        """Set `keys_before` and `keys_after` to keys times decays: new SBUF tiles [token, head, depth].

        Keys are divided by their lengths. `keys_before` have the decay from the chunk's start up to the
        token, `keys_after` the decay after it to the chunk's end, times its beta.
        """
        self.keys_before = self.multiply_keys(prompt.decays.until)
        self.keys_after = self.multiply_keys(prompt.decays.after)

    def multiply_keys(self, factors):
        """Return the keys of each value head times a factor of token and head: a new SBUF tile [j, head, depth].

        Args:
            factors: a tile of `ChunkDecays`, [128, sequence and chunk, head]; the unit's column and heads are
                used.
        """
        columns = self.unit.select_columns(factors)
        shape = (PARTITIONS, columns.shape[1], self.key_rows.shape[2])
        keys = nl.ndarray(shape, dtype=self.key_rows.dtype, buffer=nl.sbuf)
        scale_heads(keys, self.unit.repeat_for_heads(self.key_rows), columns)
        return keys

    def compute_gate_factors(self, prompt):
        """Set `gate_factors` to norm weight times silu(z): a new float32 SBUF tile [token, head, width]."""
        self.gate_factors = compute_gate_factors(self.unit.operands.z, prompt.norm_weight)


def scale_heads(dst, data, columns):
    """Write data [row, head, n] times columns [row, head] to dst [row, head, n], by GpSimd; dst may be data."""
    across = columns.reshape((columns.shape[0], columns.shape[1], 1)).broadcast(2, dst.shape[2])
    nisa.tensor_tensor(dst=dst, data1=data, data2=across, op=nl.multiply, engine=nisa.engine.gpsimd)


def transpose_heads(tile):
    """Return a tile [128, head, depth] with each head transposed: a new SBUF tile [depth, head, 128] of its dtype."""
    heads, depth = tile.shape[1], tile.shape[2]
    bank = nl.ndarray((depth, heads, PARTITIONS), dtype=tile.dtype, buffer=nl.psum)
    result = nl.ndarray(bank.shape, dtype=tile.dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.nc_transpose(dst=bank[:, head, :], data=tile[:, head, :])
    nisa.activation(dst=result, op=nl.copy, data=bank)
    return result


def multiply_heads(stationary, moving):
    """Return stationary^T @ moving of each head, [row, head, m] and [row, head, n]: [m, head, n] float32 in PSUM."""
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
