"""Stages of a pack of heads in a chunk of a prompt of `ssd`.

A chunk is up to 128 tokens of a sequence, and a pack up to eight heads of one group, whose columns fit in a
PSUM bank. The methods of `Pack` are the stages; `recurrent/ssd_prompt.py` issues them, each some packs ahead
of the next stage. Narrow launches are those in bfloat16. A key is a token that writes to the state, and a
query one that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.recurrent.ssd_between import compute_differences, sum_between
from nki_kernels.recurrent.ssd_chunk import ChunkTiles
from nki_kernels.recurrent.ssd_heads import repeat_for_elements, scale_rows, view_heads
from nki_kernels.tiles import BANK, PARTITIONS, ranges


@dataclass
class Pack(nl.NKIObject):
    """Heads (first, end) of a chunk, and their tiles in SBUF; None until the stage that computes them.

    tiles: those of the chunk. difference_rows: DifferenceRows for up to 4 heads each; empty but in narrow
    launches. decays: between key and query, in narrow launches times the time step of the key, [key, head,
    query]. scores: decays times the chunk's scores, [key, head, query] in u's dtype. inputs: x, in float32
    launches times time steps, [token, column]. state_inputs: x times the decays after the token and its time
    step, [token, column] float32. skipped: x times the skip, in float32 launches. decayed_states: states
    before the chunk times the chunk's decays, [n, column] float32. state_outputs: what tokens read of the
    states before the chunk, [token, column].
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
        """Return the slice of the pack's columns (elements of its heads) among the columns of this core's heads."""
        depth = self.tiles.chunk.sizes.depth
        return slice(self.heads[0] * depth, self.heads[1] * depth)

    def load_sums(self):
        """Load the sums of decays' logarithms of the pack's heads from HBM to operand tiles.

        Does nothing in float32 launches. Appends DifferenceRows of up to 4 heads each to `difference_rows`.
        The phases of the chunk that store the sums must be issued.
        """
        chunk = self.tiles.chunk
        if chunk.sizes.narrow:
            for heads in ranges(self.heads[0], self.heads[1], BANK // PARTITIONS):
                self.difference_rows.append(chunk.constants.differences.load(self.tiles.sums.rows, heads))

    def compute_decays(self):
        """Set `decays` to the decays between any two tokens, [key, head, query], a new SBUF tile.

        In bfloat16 launches they are in bfloat16, times the time steps of the keys; else in float32.
        """
        (first, last), chunk = self.heads, self.tiles.chunk
        if chunk.sizes.narrow:
            self.decays = compute_differences(self.difference_rows, chunk.tokens, last - first)
        else:
            logs = chunk.view_logs()[:, first:last]
            self.decays = sum_between(
                logs, chunk.select_square(chunk.constants.after), chunk.select_square(chunk.constants.before)
            )

    def scale_inputs(self):
        """Set `state_inputs`, x times what the states get of it, and `inputs`; in float32 launches `skipped`, too.

        `state_inputs`: x times time steps and the decays after the tokens, float32. `inputs`: x times time
        steps; in bfloat16 launches a view of x itself. `skipped`: x times the skip. Each is [token, column]
        in SBUF, new but for the view.
        """
        (first, last), chunk = self.heads, self.tiles.chunk
        sizes, depth = chunk.sizes, chunk.sizes.depth
        columns = self.tiles.x[:, self.select_columns()]
        self.state_inputs = scale_rows(columns, self.tiles.after[:, first:last], depth, nl.float32)
        self.inputs = columns
        if not sizes.narrow:
            self.inputs = scale_rows(columns, chunk.view_times()[:, first:last], depth, sizes.dtype)
            skip = chunk.constants.skip[0 : chunk.tokens, first:last]
            self.skipped = scale_rows(columns, skip, depth, sizes.dtype)

    def mask_scores(self, engine):
        """Set `scores` to decays times the chunk's scores, which are 0 where the key is after the query.

        It is a new SBUF tile [key, head, query] in u's dtype.

        Args:
            engine: multiplies.
        """
        (first, last), sizes = self.heads, self.tiles.chunk.sizes
        scores = self.tiles.scores[:, sizes.find_group(first), :, :]
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

    def read_states(self):
        """Compute what the states before the chunk give: set `decayed_states` and `state_outputs`, new SBUF tiles.

        `decayed_states`: the states times the decay over the chunk, [n, column] float32. `state_outputs`:
        what the tokens read of the states, [token, column] in u's dtype. In the first chunk of a sequence
        also round the loaded states for the product, since no earlier pack has.
        """
        (first, last), chunk, columns = self.heads, self.tiles.chunk, self.select_columns()
        sizes, state, depth = chunk.sizes, chunk.state, chunk.sizes.depth
        # Before the first chunk of a sequence no pack has rounded its states.
        if chunk.first == 0:
            state.round_columns(columns, False)
        total = self.tiles.total[0 : sizes.states, first:last]
        # The state is decayed here, so that one addition remains for `advance_states`.
        self.decayed_states = scale_rows(state.wide[:, columns], total, depth, nl.float32)
        shape = (chunk.tokens, (last - first) * depth)
        earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        out = self.tiles.across[:, sizes.groups + sizes.find_group(first), :]
        nisa.nc_matmul(dst=earlier, stationary=out, moving=state.rounded[:, columns], accumulate=False)
        self.state_outputs = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=view_heads(self.state_outputs, depth),
            data1=view_heads(earlier, depth),
            data2=repeat_for_elements(self.tiles.until[:, first:last], depth),
            op=nl.multiply,
        )

    def sum_outputs(self):
        """Compute y of the chunk's tokens for the pack's heads, and store it to HBM.

        y = (scores^T @ inputs + state_outputs + skip * x) * silu(gate): what the tokens read of each other
        and of the states before the chunk, and the skip.
        """
        (first, last), chunk, constants = self.heads, self.tiles.chunk, self.tiles.chunk.constants
        sizes, tokens, depth = chunk.sizes, chunk.tokens, chunk.sizes.depth
        one = chunk.select_square(constants.identity)
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
        """Write the states after the chunk, `decayed_states` plus what its tokens add, to the pack's columns in SBUF.

        They are float32, in `SequenceState.wide`.
        """
        chunk, columns = self.tiles.chunk, self.select_columns()
        sizes = chunk.sizes
        group = sizes.find_group(self.heads[0])
        shape = (sizes.states, columns.stop - columns.start)
        added = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        into = self.tiles.into[:, group * sizes.states : (group + 1) * sizes.states]
        nisa.nc_matmul(dst=added, stationary=into, moving=self.state_inputs, accumulate=False)
        wide = chunk.state.wide[:, columns]
        nisa.tensor_tensor(dst=wide, data1=self.decayed_states, data2=added, op=nl.add)

    def keep_states(self, by_scalar):
        """Round the pack's columns of the state for the next chunk; in the last chunk store the state to HBM instead.

        The store comes with the last pack of the heads; earlier packs of the last chunk do nothing.

        Args:
            by_scalar: whether the Scalar engine rounds; else GpSimd does.
        """
        chunk = self.tiles.chunk
        if not chunk.is_last:
            chunk.state.round_columns(self.select_columns(), by_scalar)
        elif self.heads[1] == chunk.sizes.local_heads:
            chunk.state.store()
