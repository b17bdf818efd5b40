"""A chunk of a prompt of `ssd`, up to 128 tokens of a sequence: what all packs of heads share, in phases.

A pack is up to eight local heads of one group, those whose scores are masked together. The local heads are
those of a core. A group of heads shares the weights that write a state (into) and that read it (out).
`recurrent/ssd_prompt.py` issues the phases of a chunk, the methods in `PHASES`, among the packs of the chunk
before.

Narrow launches are those in bfloat16. There the decay between two tokens is the exponential of a difference
of sums of logarithms up to them. Each float32 sum is stored as three bfloat16 parts, which `Differences`
loads as rows of matmuls, see `recurrent/ssd_between.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.recurrent.ssd_between import Differences, SumsInParts, sum_in_parts
from nki_kernels.recurrent.ssd_heads import compute_exponential, repeat_for_elements
from nki_kernels.recurrent.ssd_sizes import Inputs, Sizes
from nki_kernels.recurrent.ssd_states import SequenceState
from nki_kernels.recurrent.ssd_times import TimeSteps
from nki_kernels.tiles import PARTITIONS, broadcast_row, filled, identity, ranges, transpose_rows

REPEATED = 3
"""Packs of a group from which on its scores are repeated for each head, which the Vector engine reads faster."""


@dataclass
class Constants(nl.NKIObject):
    """What all chunks share, SBUF tiles; None until `fill`, and what one dtype alone needs stays None.

    before, after: [128, 128] float32, ones where the row's token is not after the column's, and where it is.
    ones: [128, 128] float32. identity: [128, 128] in u's dtype. skip: d, [128, head] float32. Narrow launches
    have wide_identity: [128, 128] float32, skips: the identity times the skip of each head, [token, head,
    token], and differences.
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
        """Allocate and compute the constants, in SBUF, but not `differences` nor the contents of `skips`.

        Args:
            d: the local heads' skips, [1, head] in HBM.
        """
        self.before = build_triangle(-1, 0)
        self.after = build_triangle(1, 1)
        self.ones = filled((PARTITIONS, PARTITIONS), 1.0)
        self.identity = identity(PARTITIONS, sizes.dtype)
        self.skip = broadcast_row(d, PARTITIONS, nl.float32, 0.0)
        if sizes.narrow:
            self.wide_identity = identity(PARTITIONS, nl.float32)
            shape = (PARTITIONS, sizes.local_heads, PARTITIONS)
            self.skips = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)

    def fill_narrow(self, sizes):
        """Set `differences` to new operand tiles, and write each head's skip times the identity to `skips`.

        For bfloat16 launches only.
        """
        self.differences = Differences()
        packs = ranges(0, sizes.local_heads, sizes.most)
        for i in range(len(packs)):  # i: pack
            first, last = packs[i]
            # With the skips on a diagonal a matmul adds skip * x in PSUM, and no engine scales x for it.
            nisa.tensor_tensor(
                dst=self.skips[:, first:last, :],
                data1=self.identity.expand_dim(1).broadcast(1, last - first),
                data2=repeat_for_elements(self.skip[:, first:last], PARTITIONS),
                op=nl.multiply,
                engine=nisa.engine.vector if i % 2 == 0 else nisa.engine.gpsimd,
            )


@dataclass
class Chunk(nl.NKIObject):
    """Up to 128 tokens of a sequence.

    y: the kernel's result in HBM. rows: (first, end) of its tokens in u. tokens: their number. state: of the
    sequence. first: the index of the chunk's first token among the new ones of the sequence. count: the
    number of real new tokens of the sequence, [128, 1] float32. is_last: whether it is the last chunk of the
    sequence. time_steps: those of this chunk and others, where it has the index `index`.
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
        """Return a view [token, head] of the chunk's tokens, of a tile [token, chunk, head] of `TimeSteps`."""
        return tile[0 : self.tokens, self.index, :]

    def view_times(self):
        """Return a view of the chunk's time steps, [token, head] float32; 0 for padding."""
        return self.select_tokens(self.time_steps.times)

    def view_logs(self):
        """Return a view of the logarithms of the chunk's decays, [token, head] float32; 0 for padding."""
        return self.select_tokens(self.time_steps.logs)

    def select_square(self, constant):
        """Return a view of the first rows and columns of a constant [128, 128], as many as the chunk has tokens."""
        return constant[0 : self.tokens, 0 : self.tokens]

    def exponentiate_sums(self, selected):
        """Return exp of sums over tokens of the logarithms of the chunk's decays.

        It is a new float32 SBUF tile [column, head].

        Args:
            selected: [token, column], ones where a column's sum includes the token, else zeros.
        """
        logs = self.view_logs()
        bank = nl.ndarray((selected.shape[1], logs.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=selected, moving=logs, accumulate=False)
        return compute_exponential(bank)


@dataclass
class ChunkTiles(nl.NKIObject):
    """Tiles of a chunk that all packs of heads share, in SBUF; None until the phase that computes them.

    phases: how many of PHASES are issued. into_out: the weights that write and read states, [token, side and
    group and n]. x: [token, column of the local heads]. gates: in the shape of x, after `activate_gates` their
    silu in float32. sums: SumsInParts of the decays, in narrow launches. until: decays from the chunk's start
    up to a token, [token, head]. total: decays over the chunk, [128, head] with equal rows. after: decays
    after a token to the chunk's end, times its time step, [token, head]. across: weights that write and read
    states, transposed, [n, side and group, token]. into: weights that write states, [token, group and n]
    float32. scores: out . into of a query and a key, 0 where the key is after the query, [key, group, copy,
    query]. copy has length 1, or in groups of many packs that of a pack, for a copy for each head.
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
        """Issue the instructions of the next phase of the chunk, and return that phase, a function of PHASES."""
        phase = PHASES[self.phases]
        phase(self)
        self.phases += 1
        return phase

    def load_rows(self):
        """Load the weights of the chunk's tokens (`into_out`), `x` and `gates` from HBM.

        They are new SBUF tiles with a token on each partition.
        """
        sizes, inputs = self.chunk.sizes, self.chunk.inputs
        start, end = self.chunk.rows
        self.into_out = load_aside(inputs.u[start:end, sizes.inner :])
        self.x = load_aside(inputs.u[start:end, sizes.left : sizes.left + sizes.width])
        self.gates = load_aside(inputs.gate[start:end, sizes.gate_first : sizes.gate_first + sizes.width])

    def load_states(self):
        """Load the sequence's state from its slot to SBUF, if this is the sequence's first chunk; else do nothing."""
        if self.chunk.first == 0:
            self.chunk.state.load()

    def begin_sums(self):
        """Set `sums` to the sums of decays' logarithms up to each token, as SumsInParts with its first bfloat16 part.

        Does nothing in float32 launches.
        """
        chunk = self.chunk
        if chunk.sizes.narrow:
            steps = chunk.time_steps
            least, minus = chunk.select_tokens(steps.least), chunk.select_tokens(steps.minus)
            before, one = (
                chunk.select_square(chunk.constants.before),
                chunk.select_square(chunk.constants.wide_identity),
            )
            self.sums = sum_in_parts(least, minus, chunk.select_tokens(steps.step_logs), before, one)

    def split_sums(self):
        """Compute the next bfloat16 part of `sums`, the sums of decays' logarithms; does nothing in float32 launches.

        After the last part, all parts are stored to HBM.
        """
        if self.chunk.sizes.narrow:
            self.sums.write_next_part()

    def decay_until(self):
        """Set `until` to the decay from the chunk's start up to each token, a new float32 SBUF tile [token, head]."""
        self.until = self.chunk.exponentiate_sums(self.chunk.select_square(self.chunk.constants.before))

    def decay_total(self):
        """Set `total` to the decay over the whole chunk, a new float32 SBUF tile [128, head] with equal rows."""
        self.total = self.chunk.exponentiate_sums(self.chunk.constants.ones[0 : self.chunk.tokens, :])

    def decay_after(self):
        """Set `after` to the decay after each token to the chunk's end, times the token's time step.

        It is a new float32 SBUF tile [token, head].
        """
        self.after = self.chunk.exponentiate_sums(self.chunk.select_square(self.chunk.constants.after))
        nisa.tensor_tensor(dst=self.after, data1=self.after, data2=self.chunk.view_times(), op=nl.multiply)

    def transpose_weights(self):
        """Set `across` to the tokens' weights transposed: a new SBUF tile [n, side and group, token].

        Side 0 writes states, and side 1 reads them. Also set `into`, the weights that write states, [token,
        group and n] float32: a copy, or in float32 launches `into_out` itself.
        """
        tokens, groups, sizes = self.chunk.tokens, self.chunk.sizes.groups, self.chunk.sizes
        self.across = nl.ndarray((sizes.states, 2 * groups, tokens), dtype=sizes.dtype, buffer=nl.sbuf)
        transpose_rows(self.across, 0, self.into_out, 2)
        self.into = self.into_out
        if sizes.dtype != nl.float32:
            # The inputs of states are float32, which nc_matmul pairs with float32 alone.
            self.into = nl.ndarray((tokens, groups * sizes.states), dtype=nl.float32, buffer=nl.sbuf)
            rows = self.into_out[:, 0 : groups * sizes.states]
            nisa.tensor_copy(dst=self.into, src=rows, engine=nisa.engine.gpsimd)

    def compute_scores(self):
        """Set `scores` to the products of a query's reading weights with a key's writing weights, summed over n.

        It is a new SBUF tile [key, group, copy, query], in u's dtype, 0 where the key is after the query.
        Groups of many packs have as many copies as a pack has heads, in bfloat16 launches; else one.
        """
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
            before = chunk.select_square(chunk.constants.before)
            # Keys behind a query are hidden here, once for a group, and not for the decays of every head.
            nisa.tensor_tensor(dst=scores[:, 0, :], data1=bank, data2=before, op=nl.multiply)
            if copies > 1:
                first = scores[:, 0:1, :].broadcast(1, copies - 1)
                nisa.tensor_copy(dst=scores[:, 1:copies, :], src=first, engine=nisa.engine.gpsimd)

    def activate_gates(self):
        """Replace `gates` by their silu, a new float32 SBUF tile."""
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
    ChunkTiles.activate_gates,
    ChunkTiles.transpose_weights,
    ChunkTiles.compute_scores,
)
"""What all packs of a chunk share: phases that are issued among the packs of the chunk before."""

SUMMED = 5
"""Number of phases after which the sums of decays are on their way to HBM."""


def load_aside(source):
    """Load an HBM tensor to a new SBUF tile of its shape and dtype, in a queue without bulk loads."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    transfer(tile, source, SCALAR)
    return tile


def build_triangle(multiplier, offset):
    """Return ones where multiplier * (partition - column) >= offset, else zeros: a new float32 SBUF tile [128, 128]."""
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
