"""One token of each sequence through `ssd`: the state of a sequence with n on the partitions, in panels of columns.

The rows of all sequences lie on as many partitions. A matmul contracts over them with a tile that is zero but for one
sequence, and so picks its outer product; another one reads its state into its own row of the sums.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import on_every_row, transpose_rows
from nki_kernels.recurrent.diagonal import identity
from nki_kernels.recurrent.slots import column, row, slots_or_none
from nki_kernels.recurrent.ssd_prompt import by_head, decay_rates, exponential, in_heads, scaled, time_steps
from nki_kernels.tiles import PARTITIONS, load

PANEL_PACKS = 2
"""Packs of heads of one group whose states are under way together: up to 1024 columns, two banks of PSUM of sums."""

AHEAD = 4
"""States of sequences that are loaded before the first of them is stored."""


def ssd_step(y, given, state, places, group, sizes):
    """The token of each sequence of a group, for the own heads."""
    start, end = group
    vectors = step_vectors(given, places, group, sizes)
    read, written = state_rows(state, places, group, sizes)
    packs = sizes.packs()
    for number in range(0, len(packs), PANEL_PACKS):
        panel = Panel(given, vectors, group, packs[number : number + PANEL_PACKS], sizes)
        waiting = []
        for sequence in range(min(AHEAD, end - start)):
            waiting.append(panel.load(state, read[:, sequence : sequence + 1]))
        for sequence in range(end - start):
            held = waiting[sequence]
            waiting[sequence] = None
            if sequence + AHEAD < end - start:
                later = sequence + AHEAD
                waiting.append(panel.load(state, read[:, later : later + 1]))
            panel.move_on(held, sequence)
            nisa.dma_copy(dst=panel.rows_of(state, written[:, sequence : sequence + 1]), src=held)
            panel.read(held, sequence)
        panel.finish(y)


def step_vectors(given, places, group, sizes):
    """What the heads of all sequences need: time steps, decays, and both weights of states for each sequence alone."""
    u, steps, dt_bias, a_log, d, _ = given
    start, end = group
    heads = slice(sizes.first_head, sizes.first_head + sizes.own)
    count = column(places[2], start, end)
    live = nl.ndarray(count.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=live, data=count, op0=nl.greater_equal, operand0=1.0)
    bias = on_every_row(dt_bias[:, heads], PARTITIONS, nl.float32, 0.0)
    rows = load(steps[start:end, sizes.steps_first : sizes.steps_first + sizes.own], u.dtype)
    times = time_steps(rows, bias[0 : end - start, :], sizes.dt_limits)
    nisa.tensor_scalar(dst=times, data=times, op0=nl.multiply, operand0=live)
    logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
    rates = decay_rates(a_log[:, heads])
    nisa.tensor_tensor(dst=logs, data1=times, data2=rates[0 : end - start, :], op=nl.multiply)
    into, out = sides(load(u[start:end, sizes.inner :], u.dtype), sizes)
    return {
        "times": times,
        "decays": exponential(logs),
        "skip": on_every_row(d[:, heads], PARTITIONS, nl.float32, 0.0),
        "one": identity(end - start, nl.float32),
        "into": into,
        "out": out,
    }


def sides(rows, sizes):
    """Weights of states for each sequence alone: into [token, group, n], and out [n, group, token], in float32."""
    tokens, width = rows.shape[0], sizes.groups * sizes.states
    into = nl.ndarray((tokens, sizes.groups, sizes.states), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=into, src=in_heads(rows[:, 0:width], sizes.states))
    out = nl.ndarray((sizes.states, sizes.groups, tokens), dtype=nl.float32, buffer=nl.sbuf)
    transpose_rows(out, 0, rows[:, width : 2 * width], 2)
    return into, out


def state_rows(state, places, group, sizes):
    """The rows of the states of each sequence to read and to write, counted over all slots: [n, sequence] int32 twice.

    A state that counts as zeros is read beyond all slots.
    """
    start, end = group
    slots, height, _ = state.shape
    within = nl.ndarray((height, end - start), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, end - start]], channel_multiplier=1)
    numbers = nl.ndarray(within.shape, dtype=nl.float32, buffer=nl.sbuf)
    own = row(places[0], height)[:, start:end]
    nisa.scalar_tensor_tensor(
        dst=numbers, data=own, op0=nl.multiply, operand0=float(height), op1=nl.add, operand1=within
    )
    written = nl.ndarray(within.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=written, src=numbers)
    return slots_or_none(numbers, row(places[1], height)[:, start:end], slots * height), written


class Panel(nl.NKIObject):
    """Some own heads of all sequences of a group."""

    def __init__(self, given, vectors, group, packs, sizes):
        heads = (packs[0][0], packs[len(packs) - 1][1])
        self.vectors = vectors
        self.group = group
        self.heads = heads
        self.packs = packs
        self.sizes = sizes
        self.left = heads[0] * sizes.depth
        self.width = (heads[1] - heads[0]) * sizes.depth
        start, end = group
        column = sizes.left + self.left
        self.x = load(given[0][start:end, column : column + self.width], sizes.dtype)
        column = sizes.gate_first + self.left
        self.gates = load(given[5][start:end, column : column + self.width], sizes.dtype)
        times = vectors["times"][:, heads[0] : heads[1]]
        self.fed = scaled(self.x, times, sizes.depth, nl.float32)
        self.sums = []
        for first, last in packs:
            shape = (end - start, (last - first) * sizes.depth)
            self.sums.append(nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum))

    def columns(self, pack):
        """The range of columns of the panel that a pack has."""
        return pack[0] * self.sizes.depth - self.left, pack[1] * self.sizes.depth - self.left

    def rows_of(self, state, numbers):
        """The panel of the states whose rows are given, in HBM: [n, column]."""
        slots, height, inner = state.shape
        flat = state.reshape((slots * height, inner))
        pattern = [[inner, height], [1, self.width]]
        return flat.ap(pattern=pattern, offset=self.sizes.left + self.left, vector_offset=numbers)

    def load(self, state, numbers):
        """The panel of a state, [n, column]; zeros for rows beyond all slots."""
        held = nl.ndarray((state.shape[1], self.width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=held, value=0.0, engine=nisa.engine.gpsimd)
        nisa.dma_copy(dst=held, src=self.rows_of(state, numbers), oob_mode=nisa.oob_mode.skip)
        return held

    def alone(self, sequence):
        """The identity's column of a sequence."""
        return self.vectors["one"][:, sequence : sequence + 1]

    def move_on(self, held, sequence):
        """A panel of a state one token on: decayed, plus the outer product of a token's weights and inputs."""
        height, count = held.shape[0], self.fed.shape[0]
        first, last = self.heads
        factors = nl.ndarray((height, last - first), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=factors,
            stationary=self.alone(sequence).broadcast(1, height),
            moving=self.vectors["decays"][:, first:last],
            accumulate=False,
        )
        depth = self.sizes.depth
        nisa.tensor_tensor(
            dst=in_heads(held, depth),
            data1=in_heads(held, depth),
            data2=by_head(factors, depth),
            op=nl.multiply,
        )
        for pack in self.packs:
            left, right = self.columns(pack)
            own = nl.ndarray((count, height), dtype=nl.float32, buffer=nl.sbuf)
            into = self.vectors["into"][:, self.sizes.group_of(pack[0]), :]
            nisa.tensor_scalar(dst=own, data=into, op0=nl.multiply, operand0=self.alone(sequence))
            bank = nl.ndarray((height, right - left), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=bank, stationary=own, moving=self.fed[:, left:right], accumulate=False)
            part = held[:, left:right]
            nisa.tensor_tensor(dst=part, data1=part, data2=bank, op=nl.add)

    def read(self, held, sequence):
        """Add what a sequence reads of its state to its row of the sums."""
        count = self.fed.shape[0]
        for number in range(len(self.packs)):
            left, right = self.columns(self.packs[number])
            group = self.sizes.group_of(self.packs[number][0])
            own = nl.ndarray((held.shape[0], count), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=own, value=0.0)
            place = slice(sequence, sequence + 1)
            nisa.tensor_copy(dst=own[:, place], src=self.vectors["out"][:, group, place])
            nisa.nc_matmul(
                dst=self.sums[number],
                stationary=own,
                moving=held[:, left:right],
                accumulate=sequence > 0,
            )

    def finish(self, y):
        """Add the skip, gate, and store the rows of y."""
        start, end = self.group
        depth, count = self.sizes.depth, end - start
        first, last = self.heads
        skip = scaled(self.x, self.vectors["skip"][0:count, first:last], depth, nl.float32)
        for number in range(len(self.packs)):
            left, right = self.columns(self.packs[number])
            part = skip[:, left:right]
            nisa.tensor_tensor(dst=part, data1=part, data2=self.sums[number], op=nl.add)
        active = nl.ndarray(skip.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=active, op=nl.silu, data=self.gates)
        result = nl.ndarray(skip.shape, dtype=self.sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=skip, data2=active, op=nl.multiply)
        left = self.sizes.left + self.left
        nisa.dma_copy(dst=y[start:end, left : left + self.width], src=result)
