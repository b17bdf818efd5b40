"""One token of each sequence through the selective scan; states are loaded and stored in HBM's layout.

Some sequences share the partitions, q of them each: partition b * q + g has the `width` channels from g * width on,
whose states lie side by side. So one DMA stores the states of several sequences, and they share the rates of decay.
Sets of so many sequences follow one another; what belongs to their channels alone lies side by side, [partition, set,
channel].

A store to slots known at run time waits for every load and store of states before it, and a load for every store. So
the states of a batch are loaded together while those of the batch before are moved on, and then stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, SYNC, transfer
from nki_kernels.projection.products import add_products
from nki_kernels.projection.row_groups import blocks_tile
from nki_kernels.recurrent.selective_layout import (
    APART,
    Layout,
    lanes,
    load_channels,
    load_for_sequences,
    load_tokens,
    repeat_for_sets,
    row_numbers,
    sequences_together,
    split_panels,
    tile_like,
    view_channels,
)
from nki_kernels.recurrent.slots import product_dtype, row, slots_or_none
from nki_kernels.tiles import BANK, PARTITIONS, blocks, filled, load, ranges
from nki_kernels.weights import WeightMatrix, load_blocks

STATES = 5120
"""Elements of the states on a partition that one DMA stores: 20 KiB."""

PIECE = 2560
"""Of these the elements that an instruction takes."""

STATE_BYTES = 61440
"""Of a partition, for the states of two batches: one is loaded while the other one is moved on and stored."""

CHANNELS = 2560
"""Channels on a partition of all sets together, or weights of states."""

SQUARE = 32
"""Rows and columns that the Vector engine transposes at once."""


def scan_step(y, arguments, channels):
    """Compute y of the token of each sequence for channels (first, end), and the states."""
    table, state = arguments.table, arguments.state
    count, states = table.counts.shape[0], state.shape[2]
    slots = slots_or_none(row(table.state_slots, 1), row(table.starts, 1), state.shape[0])
    sequences = sequences_together(count, channels, states)
    q = lanes(sequences, channels)
    for first, last in ranges(channels[0], channels[1], q * CHANNELS):
        width = (last - first) // q
        sets = max(1, min(CHANNELS // max(width, 2 * states), PARTITIONS // sequences))
        for start, end in ranges(0, count, sets * sequences):
            sets_here = (end - start) // sequences
            layout = Layout(start, sequences, sets_here, (first, last), q, width, sequences * q)
            scan_sets(y, arguments, slots, layout)


def scan_sets(y, arguments, slots, layout):
    """Compute y of the token of the sequences of a layout, and the states, for its channels.

    The states of the first two batches are on their way while the time steps are computed. Then of piece i:

    GpSimd, Scalar and Vector engines    Vector engine, and DMAs                      Vector engine
    factors of piece i                   advance piece i - 1; load the next batch     sums of piece i - 2
    """
    projected, w_dt, a_log = arguments.projected, arguments.w_dt, arguments.a_log
    states, rank = a_log.shape[1], w_dt.shape[0]
    dtype, width = product_dtype(arguments.u, w_dt), layout.width
    panels = split_panels(layout, blocks(rank) * (4 if dtype == nl.float32 else 2))
    matrix = load_blocks(WeightMatrix(w_dt[:, panels[0][0] : panels[0][1]]), dtype, SCALAR)
    end = layout.start + layout.sets * layout.sequences
    low = load(projected[layout.start : end, 0:rank], dtype)
    counts = load_tokens(arguments.table.counts, layout, 0, 1)
    bias = load_for_sequences(arguments.dt_bias, layout, 1, (0, width))
    weights = load_tokens(projected, layout, rank, 2 * states)
    rows = Rows(layout, weights, load_channels(arguments.u, layout, 0), filled((layout.rows, 1), 0.0))
    channel_ranges = ranges(0, width, max(1, STATES // states))
    read, written = row_numbers(arguments.state, arguments.table, layout)
    units, pieces = [], []
    for channels in channel_ranges:
        for index in range(layout.sets):
            unit = Unit(arguments.state, slots, read, written, rows, channels, index)
            for first, last in ranges(channels[0], channels[1], max(1, PIECE // states)):
                pieces.append(Piece(unit, len(units), (first, last)))
            units.append(unit)
    together = max(1, STATE_BYTES // (8 * (channel_ranges[0][1] - channel_ranges[0][0]) * states))
    rates = decay_rates(a_log, layout, channel_ranges[0])
    load_batch(units, 0, together)
    rows.take_steps(time_steps(low, w_dt, matrix, panels, bias, counts, layout))
    load_batch(units, together, together)
    for i in range(len(pieces) + 2):  # i: piece
        if i < len(pieces):
            unit = pieces[i].unit
            if pieces[i].unit_index > 0 and unit.index == 0 and pieces[i].channels[0] == unit.channels[0]:
                rates = decay_rates(a_log, layout, unit.channels)
            pieces[i].compute_factors(rates, nisa.engine.gpsimd if i % 2 == 0 else nisa.engine.vector)
        if 0 <= i - 1 < len(pieces):
            following = pieces[i - 1].unit_index + 1
            pieces[i - 1].advance()
            if pieces[i - 1].is_last() and following % together == 0:
                load_batch(units, following + together, together)
        if i >= 2:
            pieces[i - 2].sum_states()
    gates = load_channels(arguments.gate, layout, arguments.gate_first)
    y_rows = rows.gate(gates, load_for_sequences(arguments.d, layout, 1, (0, width)), y.dtype)
    nisa.dma_copy(dst=view_channels(y, layout, 0), src=y_rows)


def decay_rates(a_log, layout, channels):
    """Return exp(a_log) of channels (first, end) of every partition, [partition, channel, state] float32."""
    states = a_log.shape[1]
    rates = nl.ndarray((layout.rows, channels[1] - channels[0], states), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=rates, op=nl.exp, data=load_for_sequences(a_log, layout, states, channels))
    return rates


def load_batch(units, first, together):
    """Load the states of a batch of units."""
    for unit in units[first : first + together]:
        unit.load(first <= together)


def time_steps(low, w_dt, matrix, panels, bias, counts, layout):
    """Return softplus of projected time steps, 0 for padding: [partition, set, channel] in float32.

    matrix: the first of the panels of w_dt, as blocks.
    """
    sequences, rank = low.shape
    across = blocks_tile(rank, sequences, low.dtype)
    transpose_exactly(across, low)
    start, end = layout.channels
    rows = nl.ndarray((sequences, end - start), dtype=nl.float32, buffer=nl.sbuf)
    for left, right in panels:
        if left > start:
            matrix = load_blocks(WeightMatrix(w_dt[:, left:right]), low.dtype, SCALAR)
        for first, last in ranges(left, right, BANK):
            bank = nl.ndarray((sequences, last - first), dtype=nl.float32, buffer=nl.psum)
            add_products([[bank]], across, [(0, sequences)], matrix, [(first - left, last - left)], 0, rank)
            nisa.tensor_copy(dst=rows[:, first - start : last - start], src=bank)
    steps = nl.ndarray((layout.rows, layout.sets, layout.width), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(layout.sets):  # i: set
        set_rows = rows[i * layout.sequences : (i + 1) * layout.sequences, :]
        # An engine keeps numbers on their partition: a DMA spreads the channels of a sequence over its own.
        transfer(steps[:, i, :], set_rows, SCALAR)
    nisa.tensor_tensor(dst=steps, data1=steps, data2=repeat_for_sets(bias, layout), op=nl.add)
    nisa.activation(dst=steps, op=nl.softplus, data=steps)
    live = tile_like(counts)
    nisa.tensor_scalar(dst=live, data=counts, op0=nl.greater_equal, operand0=1.0)
    nisa.tensor_tensor(dst=steps, data1=steps, data2=live.broadcast(2, layout.width), op=nl.multiply)
    return steps


def transpose_exactly(across, low):
    """Transpose rows [sequence, rank] to blocks [rank in block, block, sequence], bit by bit on every chip."""
    sequences, rank = low.shape
    for left, right in ranges(0, rank, SQUARE):
        block, top = left // PARTITIONS, left % PARTITIONS
        for start, end in ranges(0, sequences, SQUARE):
            nisa.nc_transpose(
                dst=across[top : top + right - left, block, start:end],
                data=low[start:end, left:right],
                engine=nisa.engine.vector,
            )


@dataclass
class Rows(nl.NKIObject):
    """Numbers of the channels of all sets, [partition, set, channel] float32; weights are [partition, set, 2 * state].

    inputs: u. zero: [partition, 1]. steps: None until `take_steps`. scaled: inputs times steps. sums: over the states;
    the pieces write them.
    """

    layout: Layout
    weights: nl.NkiTensor
    inputs: nl.NkiTensor
    zero: nl.NkiTensor
    steps: nl.NkiTensor | None = None
    scaled: nl.NkiTensor | None = None
    sums: nl.NkiTensor | None = None

    def take_steps(self, steps):
        """Store time steps, multiply the inputs by them, and allocate the sums."""
        self.steps = steps
        self.scaled = tile_like(steps)
        nisa.tensor_tensor(dst=self.scaled, data1=steps, data2=self.inputs, op=nl.multiply)
        self.sums = tile_like(steps)

    def gate(self, gates, skip, dtype):
        """Return (sums + skip * inputs) * silu(gates)."""
        skipped = tile_like(self.sums)
        skips = repeat_for_sets(skip, self.layout)
        nisa.tensor_tensor(dst=skipped, data1=self.inputs, data2=skips, op=nl.multiply)
        nisa.tensor_tensor(dst=skipped, data1=skipped, data2=self.sums, op=nl.add)
        active = tile_like(self.sums)
        nisa.activation(dst=active, op=nl.silu, data=gates)
        result = nl.ndarray(self.sums.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=skipped, data2=active, op=nl.multiply)
        return result


@dataclass
class Unit(nl.NKIObject):
    """Channels (first, end) of each partition, of one set of sequences.

    slots: those that sequences read, [1, B]. read, written: rows of states, see `row_numbers`. index: of the set.
    states: [partition, channel, state] float32, None until they are loaded.
    """

    state: nl.NkiTensor
    slots: nl.NkiTensor
    read: nl.NkiTensor | None
    written: nl.NkiTensor
    rows: Rows
    channels: tuple
    index: int
    states: nl.NkiTensor | None = None

    def load(self, at_once):
        """Load the states of each sequence; zeros for slots beyond all.

        GpSimd, which has nothing to do at once, makes zeros then, and the Scalar engine later.
        """
        layout, size = self.rows.layout, self.state.shape[2]
        (first, last), elements = self.channels, (self.channels[1] - self.channels[0]) * size
        self.states = nl.ndarray((layout.rows, last - first, size), dtype=nl.float32, buffer=nl.sbuf)
        if at_once:
            nisa.memset(dst=self.states, value=0.0, engine=nisa.engine.gpsimd)
        else:
            nisa.activation(dst=self.states, op=nl.copy, data=self.rows.zero.broadcast(1, elements))
        if layout.sequences > APART:
            nisa.dma_copy(dst=self.states, src=self.view_rows(self.read), oob_mode=nisa.oob_mode.skip)
            return
        for i in range(layout.sequences):  # i: sequence of the set
            sequence = layout.start + self.index * layout.sequences + i
            source = self.state.ap(
                pattern=[[layout.width * size, layout.q], [1, elements]],
                offset=(layout.channels[0] + first) * size,
                scalar_offset=self.slots[:, sequence : sequence + 1],
                indirect_dim=0,
            )
            target = self.states[i * layout.q : (i + 1) * layout.q, :, :]
            transfer(target, source, SYNC, nisa.oob_mode.skip)

    def view_rows(self, numbers):
        """Return a view of the states of all sequences in HBM, from the rows on that numbers [partition, set] give."""
        (slots, channels, size), (first, last) = self.state.shape, self.channels
        return self.state.reshape((slots * channels, size)).ap(
            pattern=[[size, self.rows.layout.rows], [1, (last - first) * size]],
            offset=first * size,
            vector_offset=numbers[:, self.index : self.index + 1],
        )


@dataclass
class Piece(nl.NKIObject):
    """Channels (first, end) of a unit, and their tiles, [partition, channel, state] float32.

    unit_index: of the unit. decay: what multiplies the states. inputs: what is added to them. weighed: the new states
    times their output weights.
    """

    unit: Unit
    unit_index: int
    channels: tuple
    decay: nl.NkiTensor | None = None
    inputs: nl.NkiTensor | None = None
    weighed: nl.NkiTensor | None = None

    def is_last(self):
        """Return whether it is the last piece of its unit."""
        return self.channels[1] == self.unit.channels[1]

    def select(self, tile):
        """Return its channels of a tile of the unit, [partition, channel, state]."""
        first = self.unit.channels[0]
        return tile[:, self.channels[0] - first : self.channels[1] - first, :]

    def by_channel(self, columns):
        """Return a view of its numbers of [partition, set, channel] as [partition, channel, state]."""
        numbers = columns[:, self.unit.index, self.channels[0] : self.channels[1]]
        return numbers.expand_dim(2).broadcast(2, self.unit.state.shape[2])

    def by_state(self, side):
        """Return the weights that write the states (side 0) or read them (side 1), as [partition, channel, state]."""
        size = self.unit.state.shape[2]
        weights = self.unit.rows.weights[:, self.unit.index, side * size : (side + 1) * size]
        return weights.expand_dim(1).broadcast(1, self.channels[1] - self.channels[0])

    def compute_factors(self, unit_rates, engine):
        """Compute `decay` and `inputs`.

        GpSimd and the Vector engine take the decays of pieces in turn, so that both are busy as long.
        """
        rates, rows = self.select(unit_rates), self.unit.rows
        self.decay = tile_like(rates)
        steps = self.by_channel(rows.steps)
        nisa.tensor_tensor(dst=self.decay, data1=rates, data2=steps, op=nl.multiply, engine=engine)
        nisa.activation(dst=self.decay, op=nl.exp, data=self.decay, scale=-1.0)
        self.inputs = tile_like(rates)
        nisa.tensor_tensor(
            dst=self.inputs,
            data1=self.by_channel(rows.scaled),
            data2=self.by_state(0),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )

    def advance(self):
        """Advance the states by a token, and compute `weighed`; after the last piece store the states."""
        unit, states = self.unit, self.select(self.unit.states)
        nisa.tensor_tensor(dst=states, data1=states, data2=self.decay, op=nl.multiply)
        nisa.tensor_tensor(dst=states, data1=states, data2=self.inputs, op=nl.add)
        if self.is_last():
            nisa.dma_copy(dst=unit.view_rows(unit.written), src=unit.states)
        self.weighed = tile_like(states)
        nisa.tensor_tensor(
            dst=self.weighed, data1=states, data2=self.by_state(1), op=nl.multiply, engine=nisa.engine.gpsimd
        )

    def sum_states(self):
        """Add up the weighed states."""
        sums = self.unit.rows.sums[:, self.unit.index, self.channels[0] : self.channels[1]]
        nisa.tensor_reduce(dst=sums, op=nl.add, data=self.weighed, axis=2)
