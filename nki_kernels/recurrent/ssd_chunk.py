"""A chunk of a prompt of `ssd`: up to 128 tokens of a sequence, and the stages of a pack of its heads."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.recurrent.ssd_between import Differences, differences, sums_between
from nki_kernels.recurrent.ssd_heads import by_head, in_heads, scaled
from nki_kernels.tiles import BANK, PARTITIONS, ranges


@dataclass
class Constants(nl.NKIObject):
    """What all chunks of the own heads share; None until `fill`, and what one dtype alone needs stays None.

    bias: [128, head], of time steps. rates: -exp(a_log), [128, head]. before, after: ones where the row's token is not
    after the column's, and where it is, [128, 128]. ones, identity: [128, 128]. skip: [128, head]. Narrow steps have
    wide_identity: [128, 128] float32, skips: the identity times the skip of each head, [token, head, token], and
    differences.
    """

    bias: nl.NkiTensor
    rates: nl.NkiTensor
    before: nl.NkiTensor | None = None
    after: nl.NkiTensor | None = None
    ones: nl.NkiTensor | None = None
    identity: nl.NkiTensor | None = None
    skip: nl.NkiTensor | None = None
    wide_identity: nl.NkiTensor | None = None
    skips: nl.NkiTensor | None = None
    differences: Differences | None = None


@dataclass
class Pack(nl.NKIObject):
    """Heads (first, end) of a chunk, and their tiles; None until the stage that computes them.

    halves: operands of `differences`, for up to 4 heads each. decays: [key, head, query]. scores: times decays, in u's
    dtype. inputs: rows of x, in float32 steps times time steps. state_inputs: times the decays after them and time
    steps, float32. skipped: times the skip, in float32 steps. decayed_states: states before the chunk times its decays.
    state_outputs: what tokens read of the states before the chunk.
    """

    chunk: Chunk
    heads: tuple
    halves: list | None = None
    decays: nl.NkiTensor | None = None
    scores: nl.NkiTensor | None = None
    inputs: nl.NkiTensor | None = None
    state_inputs: nl.NkiTensor | None = None
    skipped: nl.NkiTensor | None = None
    decayed_states: nl.NkiTensor | None = None
    state_outputs: nl.NkiTensor | None = None


class Chunk(nl.NKIObject):
    """Up to 128 tokens of a sequence: what all packs of heads share, and the stages of a pack."""

    def __init__(self, y, inputs, constants, sizes, rows, state, first, count, last):
        self.y = y
        self.u = inputs.u
        self.steps = inputs.steps
        self.gate = inputs.gate
        self.constants = constants
        self.sizes = sizes
        self.rows = rows
        self.tokens = rows[1] - rows[0]
        self.state = state
        self.first = first
        self.count = count
        self.last = last
        self.phases = 0

    def summed(self, chosen):
        """For each column of `chosen` [token, column] the sum of a over its ones: [column, head] @ PSUM."""
        shape = (chosen.shape[1], self.logs.shape[1])
        bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=chosen, moving=self.logs, accumulate=False)
        return bank

    def fetch(self, pack):
        """Bring the sums of decays of a pack, for narrow steps."""
        if self.sizes.narrow:
            halves = []
            for heads in ranges(pack.heads[0], pack.heads[1], BANK // PARTITIONS):
                halves.append(self.constants.differences.load(self.sides.rows, heads))
            pack.halves = halves

    def decay(self, pack):
        """Decays between the tokens of the chunk, for the heads of a pack: [key, head, query].

        In narrow steps the time steps of the keys are in them.
        """
        first, last = pack.heads
        if self.sizes.narrow:
            pack.decays = differences(pack.halves, self.tokens, last - first)
        else:
            pack.decays = sums_between(self.logs[:, first:last], self.after, self.before)

    def scale(self, pack):
        """x times what products need: for states the decays behind each token; in float32 time steps and the skip."""
        first, last = pack.heads
        sizes, depth = self.sizes, self.sizes.depth
        columns = self.x[:, first * depth : last * depth]
        pack.state_inputs = scaled(columns, self.left_over[:, first:last], depth, nl.float32)
        pack.inputs = columns
        if not sizes.narrow:
            pack.inputs = scaled(columns, self.times[:, first:last], depth, sizes.dtype)
            skip = self.constants.skip[0 : self.tokens, first:last]
            pack.skipped = scaled(columns, skip, depth, sizes.dtype)

    def mask(self, pack, engine):
        """Scores times decays, [key, head, query] in u's dtype."""
        first, last = pack.heads
        scores = self.scores[:, self.sizes.group_of(first), :, :]
        if scores.shape[1] == 1:
            scores = scores.broadcast(1, last - first)
        masked = nl.ndarray(pack.decays.shape, dtype=self.sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=masked,
            data1=pack.decays,
            data2=scores[:, 0 : last - first, :],
            op=nl.multiply,
            engine=engine,
        )
        pack.scores = masked
        pack.decays = None  # nothing reads them any more

    def look_back(self, pack):
        """What the tokens of a pack read of the states before the chunk, and these states after its decays."""
        first, last = pack.heads
        sizes, state, depth = self.sizes, self.state, self.sizes.depth
        columns = slice(first * depth, last * depth)
        if self.first == 0:
            state.round(columns, False)
        passed = self.passed[0 : sizes.states, first:last]
        pack.decayed_states = scaled(state.wide[:, columns], passed, depth, nl.float32)
        shape = (self.tokens, (last - first) * depth)
        earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        out = self.across[:, sizes.groups + sizes.group_of(first), :]
        nisa.nc_matmul(dst=earlier, stationary=out, moving=state.rounded[:, columns], accumulate=False)
        decayed = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=in_heads(decayed, depth),
            data1=in_heads(earlier, depth),
            data2=by_head(self.reached[:, first:last], depth),
            op=nl.multiply,
        )
        pack.state_outputs = decayed

    def sum_up(self, pack):
        """Rows of y of a pack: the sums over the tokens of the chunk and those before, times the gates."""
        first, last = pack.heads
        sizes, tokens, depth = self.sizes, self.tokens, self.sizes.depth
        sums = nl.ndarray((tokens, (last - first) * depth), dtype=nl.float32, buffer=nl.psum)
        if not sizes.narrow:
            nisa.nc_matmul(dst=sums, stationary=self.one, moving=pack.skipped, accumulate=False)
        for head in range(last - first):
            columns = slice(head * depth, (head + 1) * depth)
            fed = pack.inputs[:, columns]
            if sizes.narrow:
                skip = self.constants.skips[0:tokens, first + head, 0:tokens]
                nisa.nc_matmul(dst=sums[:, columns], stationary=skip, moving=fed, accumulate=False)
            nisa.nc_matmul(
                dst=sums[:, columns], stationary=pack.scores[:, head, :], moving=fed, accumulate=True
            )
        nisa.nc_matmul(dst=sums, stationary=self.one, moving=pack.state_outputs, accumulate=True)
        gates = self.gates[:, first * depth : last * depth]
        result = nl.ndarray(sums.shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=sums, data2=gates, op=nl.multiply)
        left = sizes.left + first * depth
        start, end = self.rows
        rows = self.y[start:end, left : left + result.shape[1]]
        transfer(rows, result, COMPILER)

    def move_on(self, pack):
        """The states of a pack after the chunk: decayed, plus what its tokens leave."""
        first, last = pack.heads
        sizes, state, depth = self.sizes, self.state, self.sizes.depth
        columns = slice(first * depth, last * depth)
        group = sizes.group_of(first)
        left = nl.ndarray((sizes.states, (last - first) * depth), dtype=nl.float32, buffer=nl.psum)
        into = self.into[:, group * sizes.states : (group + 1) * sizes.states]
        nisa.nc_matmul(dst=left, stationary=into, moving=pack.state_inputs, accumulate=False)
        nisa.tensor_tensor(dst=state.wide[:, columns], data1=pack.decayed_states, data2=left, op=nl.add)

    def keep(self, pack, by_scalar):
        """Round the states of a pack for the next chunk; all are stored behind the last pack of the last one."""
        first, last = pack.heads
        depth = self.sizes.depth
        if not self.last:
            self.state.round(slice(first * depth, last * depth), by_scalar)
        elif last == self.sizes.local_heads:
            self.state.store()
