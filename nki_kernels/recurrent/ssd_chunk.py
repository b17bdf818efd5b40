"""A chunk of a prompt of `ssd`, up to 128 tokens of a sequence: what all packs of heads share, in phases.

A pack is up to eight local heads of one group, see `Sizes.packs`. In narrow (bfloat16) launches the decay between two
tokens is the exponential of a difference of sums of logarithms up to them; each float32 sum is stored as three bfloat16
parts, which `Differences` loads as rows of matmuls, see `ssd_between`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.recurrent.ssd_between import Differences, SumsInParts, sum_in_parts
from nki_kernels.recurrent.ssd_heads import by_head, exponential
from nki_kernels.recurrent.ssd_sizes import Inputs, Sizes
from nki_kernels.recurrent.ssd_states import SequenceState
from nki_kernels.recurrent.ssd_times import TimeSteps
from nki_kernels.tiles import PARTITIONS, filled, identity, on_every_row, ranges, transpose_rows

REPEATED = 3
"""Packs of a group from which on its scores are repeated for each head, which the Vector engine reads faster."""


@dataclass
class Constants(nl.NKIObject):
    """What all chunks share of the local heads; None until `fill`, and what one dtype alone needs stays None.

    before, after: ones where the row's token is not
    after the column's, and where it is, [128, 128]. ones, identity: [128, 128]. skip: [128, head]. Narrow steps have
    wide_identity: [128, 128] float32, skips: the identity times the skip of each head, [token, head, token], and
    differences.
    """

    before: nl.NkiTensor | None = None
    after: nl.NkiTensor | None = None
    ones: nl.NkiTensor | None = None
    identity: nl.NkiTensor | None = None
    skip: nl.NkiTensor | None = None
    wide_identity: nl.NkiTensor | None = None
    skips: nl.NkiTensor | None = None
    differences: Differences | None = None

    def fill(self, d, sizes):
        """Allocate the constants, except those of time steps and `differences`."""
        self.before = triangle(-1, 0)
        self.after = triangle(1, 1)
        self.ones = filled((PARTITIONS, PARTITIONS), 1.0)
        self.identity = identity(PARTITIONS, sizes.dtype)
        self.skip = on_every_row(d, PARTITIONS, nl.float32, 0.0)
        if sizes.narrow:
            self.wide_identity = identity(PARTITIONS, nl.float32)
            shape = (PARTITIONS, sizes.local_heads, PARTITIONS)
            self.skips = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)

    def fill_narrow(self, sizes):
        """Allocate `differences`, and compute `skips`."""
        self.differences = Differences()
        packs = ranges(0, sizes.local_heads, sizes.most)
        for i in range(len(packs)):  # i: pack
            first, last = packs[i]
            # With the skips on a diagonal a matmul adds skip * x in PSUM, and no engine scales x for it.
            nisa.tensor_tensor(
                dst=self.skips[:, first:last, :],
                data1=self.identity.expand_dim(1).broadcast(1, last - first),
                data2=by_head(self.skip[:, first:last], PARTITIONS),
                op=nl.multiply,
                engine=nisa.engine.vector if i % 2 == 0 else nisa.engine.gpsimd,
            )


@dataclass
class Chunk(nl.NKIObject):
    """Up to 128 tokens of a sequence.

    rows: (first, end) of its tokens. state: of the sequence. first: the position of its first token among the new ones.
    count: the number of new tokens of the sequence, [128, 1]. is_last: whether it is the last chunk of the sequence.
    time_steps: those of this chunk and others, where it has the index `index`.
    """

    y: nl.NkiTensor
    inputs: Inputs
    constants: Constants
    sizes: Sizes
    rows: tuple
    tokens: int
    state: SequenceState
    first: int
    count: nl.NkiTensor
    is_last: bool
    time_steps: TimeSteps
    index: int

    def select_tokens(self, tile):
        """Return its part [token, head] of a tile of `TimeSteps`."""
        return tile[0 : self.tokens, self.index, :]

    def times(self):
        """Return its time steps, [token, head]."""
        return self.select_tokens(self.time_steps.times)

    def logs(self):
        """Return the logarithms of its decays, [token, head]."""
        return self.select_tokens(self.time_steps.logs)

    def select(self, constant):
        """Return the rows and columns of its tokens of a constant [128, 128]."""
        return constant[0 : self.tokens, 0 : self.tokens]

    def exp_sums(self, selected):
        """Return exp of the sums of `logs` over the ones of each column of [token, column]: [column, head]."""
        logs = self.logs()
        bank = nl.ndarray((selected.shape[1], logs.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=selected, moving=logs, accumulate=False)
        return exponential(bank)


@dataclass
class ChunkTiles(nl.NKIObject):
    """Tiles of a chunk that all packs of heads share; None until the phase that computes them.

    phases: how many are done. into_out: rows of the weights that write and read states. x: rows. gates: rows, later
    their silu in float32. sums: those of decays, for narrow steps. until, total, after: decays up to a token, [token,
    head], over the chunk, [128, head], and after a token times its time step, [token, head]. across: into and out of
    every group, [n, side and group, token]. into: rows in float32. scores: out into^T of every group, transposed, 0
    where the key is after the query, [key, group, head, query]; a group of many packs has them for each head of a pack.
    """

    chunk: Chunk
    phases: int = 0
    into_out: nl.NkiTensor | None = None
    x: nl.NkiTensor | None = None
    gates: nl.NkiTensor | None = None
    sums: SumsInParts | None = None
    until: nl.NkiTensor | None = None
    total: nl.NkiTensor | None = None
    after: nl.NkiTensor | None = None
    across: nl.NkiTensor | None = None
    into: nl.NkiTensor | None = None
    scores: nl.NkiTensor | None = None

    def work(self):
        """Issue the next phase, and return it."""
        phase = PHASES[self.phases]
        phase(self)
        self.phases += 1
        return phase

    def load_rows(self):
        """Load `into_out`, `x` and `gates`."""
        sizes, inputs = self.chunk.sizes, self.chunk.inputs
        start, end = self.chunk.rows
        self.into_out = load_aside(inputs.u[start:end, sizes.inner :])
        self.x = load_aside(inputs.u[start:end, sizes.left : sizes.left + sizes.width])
        self.gates = load_aside(inputs.gate[start:end, sizes.gate_first : sizes.gate_first + sizes.width])

    def load_states(self):
        """Load the states of the sequence with its first chunk."""
        if self.chunk.first == 0:
            self.chunk.state.load()

    def begin_sums(self):
        """Compute `sums`, with the heads on the partitions, and keep their first part."""
        chunk = self.chunk
        if chunk.sizes.narrow:
            steps = chunk.time_steps
            least, minus = chunk.select_tokens(steps.least), chunk.select_tokens(steps.minus)
            before, one = chunk.select(chunk.constants.before), chunk.select(chunk.constants.wide_identity)
            self.sums = sum_in_parts(least, minus, chunk.select_tokens(steps.step_logs), before, one)

    def split_sums(self):
        """Keep the next part of `sums`; the last one goes to HBM with the others."""
        if self.chunk.sizes.narrow:
            self.sums.next()

    def decay_until(self):
        """Compute `until`."""
        self.until = self.chunk.exp_sums(self.chunk.select(self.chunk.constants.before))

    def decay_total(self):
        """Compute `total`."""
        self.total = self.chunk.exp_sums(self.chunk.constants.ones[0 : self.chunk.tokens, :])

    def decay_after(self):
        """Compute `after`."""
        self.after = self.chunk.exp_sums(self.chunk.select(self.chunk.constants.after))
        nisa.tensor_tensor(dst=self.after, data1=self.after, data2=self.chunk.times(), op=nl.multiply)

    def transpose_weights(self):
        """Compute `across` and `into`."""
        tokens, groups, sizes = self.chunk.tokens, self.chunk.sizes.groups, self.chunk.sizes
        self.across = nl.ndarray((sizes.states, 2 * groups, tokens), dtype=sizes.dtype, buffer=nl.sbuf)
        transpose_rows(self.across, 0, self.into_out, 2)
        self.into = self.into_out
        if sizes.dtype != nl.float32:
            # The inputs of states are float32, which nc_matmul pairs with float32 alone.
            self.into = nl.ndarray((tokens, groups * sizes.states), dtype=nl.float32, buffer=nl.sbuf)
            rows = self.into_out[:, 0 : groups * sizes.states]
            nisa.tensor_copy(dst=self.into, src=rows, engine=nisa.engine.gpsimd)

    def score(self):
        """Compute `scores`."""
        chunk, tokens, groups, sizes = (
            self.chunk,
            self.chunk.tokens,
            self.chunk.sizes.groups,
            self.chunk.sizes,
        )
        copies = sizes.most if sizes.narrow and sizes.heads >= REPEATED * groups * sizes.most else 1
        dtype = sizes.dtype if sizes.narrow else nl.float32
        self.scores = nl.ndarray((tokens, groups, copies, tokens), dtype=dtype, buffer=nl.sbuf)
        for group in range(groups):
            bank = nl.ndarray((tokens, tokens), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=bank,
                stationary=self.across[:, group, :],
                moving=self.across[:, groups + group, :],
                accumulate=False,
            )
            scores = self.scores[:, group, :, :]
            before = chunk.select(chunk.constants.before)
            # Keys behind a query are hidden here, once for a group, and not for the decays of every head.
            nisa.tensor_tensor(dst=scores[:, 0, :], data1=bank, data2=before, op=nl.multiply)
            if copies > 1:
                first = scores[:, 0:1, :].broadcast(1, copies - 1)
                nisa.tensor_copy(dst=scores[:, 1:copies, :], src=first, engine=nisa.engine.gpsimd)

    def open_gates(self):
        """Compute silu of the gates in float32."""
        rows = self.gates
        self.gates = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=self.gates, op=nl.silu, data=rows)


PHASES = (
    ChunkTiles.load_rows,
    ChunkTiles.load_states,
    ChunkTiles.begin_sums,
    ChunkTiles.split_sums,
    ChunkTiles.split_sums,
    ChunkTiles.decay_until,
    ChunkTiles.decay_total,
    ChunkTiles.decay_after,
    ChunkTiles.open_gates,
    ChunkTiles.transpose_weights,
    ChunkTiles.score,
)
"""What all packs of a chunk share, a phase with each pack of the chunk before."""

SUMMED = 5
"""Phases until the sums of decays are on their way to HBM."""


def load_aside(source):
    """Load rows of HBM in another queue than what is needed at once."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    transfer(tile, source, SCALAR)
    return tile


def triangle(multiplier, offset):
    """Return ones where multiplier * (partition - column) is offset or more, else 0: [128, 128] float32."""
    result = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=[[-multiplier, PARTITIONS]],
        offset=-offset,
        channel_multiplier=multiplier,
        on_true_tile=filled((PARTITIONS, PARTITIONS), 1.0),
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    return result
