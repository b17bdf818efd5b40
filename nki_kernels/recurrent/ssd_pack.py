"""Stages of a pack of heads in a chunk of a prompt of `ssd`."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.recurrent.ssd_between import differences, sums_between
from nki_kernels.recurrent.ssd_chunk import ChunkTiles
from nki_kernels.recurrent.ssd_heads import by_head, in_heads, scaled
from nki_kernels.tiles import BANK, PARTITIONS, ranges


@dataclass
class Pack(nl.NKIObject):
    """Heads (first, end) of a chunk, and their tiles; None until the stage that computes them.

    difference_rows: operands of `differences`, for up to 4 heads each. decays: [key, head, query]; in narrow steps the
    time steps of the keys are in them. scores: times decays, [key, head, query] in u's dtype. inputs: rows of x, in
    float32 steps times time steps. state_inputs: times the decays after them and time steps, float32. skipped: times
    the skip, in float32 steps. decayed_states: states before the chunk times its decays. state_outputs: what tokens
    read of the states before the chunk.
    """

    tiles: ChunkTiles
    heads: tuple
    difference_rows: list
    decays: nl.NkiTensor | None = None
    scores: nl.NkiTensor | None = None
    inputs: nl.NkiTensor | None = None
    state_inputs: nl.NkiTensor | None = None
    skipped: nl.NkiTensor | None = None
    decayed_states: nl.NkiTensor | None = None
    state_outputs: nl.NkiTensor | None = None

    def select_columns(self):
        """Return the slice of its columns among those of the local heads."""
        depth = self.tiles.chunk.sizes.depth
        return slice(self.heads[0] * depth, self.heads[1] * depth)

    def load_sums(self):
        """Load `difference_rows`, for narrow steps."""
        chunk = self.tiles.chunk
        if chunk.sizes.narrow:
            for heads in ranges(self.heads[0], self.heads[1], BANK // PARTITIONS):
                self.difference_rows.append(chunk.constants.differences.load(self.tiles.sums.rows, heads))

    def decay(self):
        """Compute `decays`."""
        (first, last), chunk = self.heads, self.tiles.chunk
        if chunk.sizes.narrow:
            self.decays = differences(self.difference_rows, chunk.tokens, last - first)
        else:
            logs = chunk.logs()[:, first:last]
            self.decays = sums_between(
                logs, chunk.select(chunk.constants.after), chunk.select(chunk.constants.before)
            )

    def scale(self):
        """Compute `state_inputs` and `inputs`; in float32 steps `skipped`, too."""
        (first, last), chunk = self.heads, self.tiles.chunk
        sizes, depth = chunk.sizes, chunk.sizes.depth
        columns = self.tiles.x[:, self.select_columns()]
        self.state_inputs = scaled(columns, self.tiles.after[:, first:last], depth, nl.float32)
        self.inputs = columns
        if not sizes.narrow:
            self.inputs = scaled(columns, chunk.times()[:, first:last], depth, sizes.dtype)
            skip = chunk.constants.skip[0 : chunk.tokens, first:last]
            self.skipped = scaled(columns, skip, depth, sizes.dtype)

    def mask(self, engine):
        """Compute `scores`."""
        (first, last), sizes = self.heads, self.tiles.chunk.sizes
        scores = self.tiles.scores[:, sizes.group_of(first), :, :]
        if scores.shape[1] == 1:
            scores = scores.broadcast(1, last - first)
        self.scores = nl.ndarray(self.decays.shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=self.scores,
            data1=self.decays,
            data2=scores[:, 0 : last - first, :],
            op=nl.multiply,
            engine=engine,
        )

    def look_back(self):
        """Compute `decayed_states` and `state_outputs`."""
        (first, last), chunk, columns = self.heads, self.tiles.chunk, self.select_columns()
        sizes, state, depth = chunk.sizes, chunk.state, chunk.sizes.depth
        # Before the first chunk of a sequence no pack has rounded its states.
        if chunk.first == 0:
            state.round(columns, False)
        total = self.tiles.total[0 : sizes.states, first:last]
        # The state is decayed here, so that one addition remains for `advance_states`.
        self.decayed_states = scaled(state.wide[:, columns], total, depth, nl.float32)
        shape = (chunk.tokens, (last - first) * depth)
        earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        out = self.tiles.across[:, sizes.groups + sizes.group_of(first), :]
        nisa.nc_matmul(dst=earlier, stationary=out, moving=state.rounded[:, columns], accumulate=False)
        self.state_outputs = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=in_heads(self.state_outputs, depth),
            data1=in_heads(earlier, depth),
            data2=by_head(self.tiles.until[:, first:last], depth),
            op=nl.multiply,
        )

    def sum_outputs(self):
        """Store rows of y: the sums over the tokens of the chunk and those before, times the gates."""
        (first, last), chunk, constants = self.heads, self.tiles.chunk, self.tiles.chunk.constants
        sizes, tokens, depth = chunk.sizes, chunk.tokens, chunk.sizes.depth
        one = chunk.select(constants.identity)
        sums = nl.ndarray((tokens, (last - first) * depth), dtype=nl.float32, buffer=nl.psum)
        if not sizes.narrow:
            nisa.nc_matmul(dst=sums, stationary=one, moving=self.skipped, accumulate=False)
        for head in range(last - first):
            columns = slice(head * depth, (head + 1) * depth)
            inputs = self.inputs[:, columns]
            if sizes.narrow:
                skip = constants.skips[0:tokens, first + head, 0:tokens]
                nisa.nc_matmul(dst=sums[:, columns], stationary=skip, moving=inputs, accumulate=False)
            nisa.nc_matmul(
                dst=sums[:, columns], stationary=self.scores[:, head, :], moving=inputs, accumulate=True
            )
        # The identity adds what was read of states in PSUM; Vector passes over the sum once, with the gates.
        nisa.nc_matmul(dst=sums, stationary=one, moving=self.state_outputs, accumulate=True)
        y = nl.ndarray(sums.shape, dtype=sizes.dtype, buffer=nl.sbuf)
        gates = self.tiles.gates[:, self.select_columns()]
        nisa.tensor_tensor(dst=y, data1=sums, data2=gates, op=nl.multiply)
        left = sizes.left + first * depth
        start, end = chunk.rows
        transfer(chunk.y[start:end, left : left + y.shape[1]], y, COMPILER)

    def advance_states(self):
        """Compute the states after the chunk: decayed, plus what its tokens add."""
        chunk, columns = self.tiles.chunk, self.select_columns()
        sizes = chunk.sizes
        group = sizes.group_of(self.heads[0])
        shape = (sizes.states, columns.stop - columns.start)
        added = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        into = self.tiles.into[:, group * sizes.states : (group + 1) * sizes.states]
        nisa.nc_matmul(dst=added, stationary=into, moving=self.state_inputs, accumulate=False)
        wide = chunk.state.wide[:, columns]
        nisa.tensor_tensor(dst=wide, data1=self.decayed_states, data2=added, op=nl.add)

    def keep_states(self, by_scalar):
        """Round the states for the next chunk; store all after the last pack of the last one."""
        chunk = self.tiles.chunk
        if not chunk.is_last:
            chunk.state.round(self.select_columns(), by_scalar)
        elif self.heads[1] == chunk.sizes.local_heads:
            chunk.state.store()
