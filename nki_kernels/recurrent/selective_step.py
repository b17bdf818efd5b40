"""One token of each sequence through the selective scan; states are loaded and stored in HBM's layout.

`selective_scan` calls `scan_step` if there is one token of each sequence. Some sequences, a set, share the
partitions, q of them each: partition b * q + g has the `width` channels from g * width on of sequence b,
whose states lie side by side. So one DMA stores the states of several sequences, and they share the rates of
decay. Sets follow one another; numbers of channels are tiles [partition, set, channel].

A unit is the states of some channels of each partition, of one set. Units are loaded in batches. A store to
slots known at run time waits for every load and store of states before it, and a load for every store. So the
states of a batch are loaded together while those of the batch before are advanced by a token, and then
stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, SYNC, transfer
from nki_kernels.projection.products import add_products
from nki_kernels.projection.row_groups import allocate_transposed
from nki_kernels.recurrent.selective_layout import (
    APART,
    Layout,
    allocate_like,
    choose_set_size,
    compute_row_numbers,
    count_lanes,
    load_channels,
    load_for_sequences,
    load_tokens,
    repeat_for_sets,
    split_panels,
    view_channels,
)
from nki_kernels.recurrent.slots import choose_product_dtype, load_repeated_row, mask_slots
from nki_kernels.tiles import BANK, PARTITIONS, blocks, filled, load, ranges
from nki_kernels.weights import WeightMatrix, load_blocks

STATES = 5120
"""Elements of the states on a partition that one DMA stores: 20 KiB. They are a unit."""

PIECE = 2560
"""Elements of the states of a unit, on a partition, that an instruction takes."""

STATE_BYTES = 61440
"""Bytes of a partition for the states of two batches: one is loaded while the other one is advanced and stored."""

CHANNELS = 2560
"""Channels on a partition of all sets together, or weights of states, at most."""

SQUARE = 32
"""Rows and columns that the Vector engine transposes at once."""


def scan_step(y, arguments, channels):
    """Run the selective scan for one token of each sequence and a range of channels: store y and the states to HBM.

    Args:
        y: the kernel's result, [B, C] in HBM.
        channels: (first, end) of this core.
    """
    table, state = arguments.table, arguments.state
    count, states = table.counts.shape[0], state.shape[2]
    slots = mask_slots(
        load_repeated_row(table.state_slots, 1), load_repeated_row(table.starts, 1), state.shape[0]
    )
    sequences = choose_set_size(count, channels, states)
    q = count_lanes(sequences, channels)
    for first, last in ranges(channels[0], channels[1], q * CHANNELS):
        width = (last - first) // q
        sets = max(1, min(CHANNELS // max(width, 2 * states), PARTITIONS // sequences))
        for start, end in ranges(0, count, sets * sequences):
            sets_here = (end - start) // sequences
            layout = Layout(start, sequences, sets_here, (first, last), q, width, sequences * q)
            scan_sets(y, arguments, slots, layout)


def scan_sets(y, arguments, slots, layout):
    """Run the scan for the sequences and channels of a layout: store y and the states to HBM.

    The states of the first two batches are on their way while the time steps are computed. A piece is some
    channels of a set of sequences. Then of piece i:

        GpSimd, Scalar and Vector engines    Vector engine, and DMAs                      Vector engine
        factors of piece i                   advance piece i - 1; load the next batch     sums of piece i - 2

    Args:
        slots: [1, B] int32 in SBUF, the slots that sequences read, beyond all for those that start at
            position 0.
    """
    projected, w_dt, a_log = arguments.projected, arguments.w_dt, arguments.a_log
    states, rank = a_log.shape[1], w_dt.shape[0]
    dtype, width = choose_product_dtype(arguments.u, w_dt), layout.width
    panels = split_panels(layout, blocks(rank) * (4 if dtype == nl.float32 else 2))
    matrix = load_blocks(WeightMatrix(w_dt[:, panels[0][0] : panels[0][1]]), dtype, SCALAR)
    end = layout.start + layout.sets * layout.sequences
    low = load(projected[layout.start : end, 0:rank], dtype)
    counts = load_tokens(arguments.table.counts, layout, 0, 1)
    bias = load_for_sequences(arguments.dt_bias, layout, 1, (0, width))
    weights = load_tokens(projected, layout, rank, 2 * states)
    rows = Rows(layout, weights, load_channels(arguments.u, layout, 0), filled((layout.rows, 1), 0.0))
    channel_ranges = ranges(0, width, max(1, STATES // states))
    read, written = compute_row_numbers(arguments.state, arguments.table, layout)
    units, pieces = [], []
    for channels in channel_ranges:
        for index in range(layout.sets):
            unit = Unit(arguments.state, slots, read, written, rows, channels, index)
            for first, last in ranges(channels[0], channels[1], max(1, PIECE // states)):
                pieces.append(Piece(unit, len(units), (first, last)))
            units.append(unit)
    together = max(1, STATE_BYTES // (8 * (channel_ranges[0][1] - channel_ranges[0][0]) * states))
    rates = load_decay_rates(a_log, layout, channel_ranges[0])
    load_batch(units, 0, together)
    rows.take_steps(compute_time_steps(low, w_dt, matrix, panels, bias, counts, layout))
    load_batch(units, together, together)
    for i in range(len(pieces) + 2):  # i: piece
        if i < len(pieces):
            unit = pieces[i].unit
            if pieces[i].unit_index > 0 and unit.index == 0 and pieces[i].channels[0] == unit.channels[0]:
                rates = load_decay_rates(a_log, layout, unit.channels)
            pieces[i].compute_factors(rates, nisa.engine.gpsimd if i % 2 == 0 else nisa.engine.vector)
        if 0 <= i - 1 < len(pieces):
            following = pieces[i - 1].unit_index + 1
            pieces[i - 1].advance()
            if pieces[i - 1].is_last() and following % together == 0:
                load_batch(units, following + together, together)
        if i >= 2:
            pieces[i - 2].sum_states()
    gates = load_channels(arguments.gate, layout, arguments.gate_first)
    y_rows = rows.gate_sums(gates, load_for_sequences(arguments.d, layout, 1, (0, width)), y.dtype)
    nisa.dma_copy(dst=view_channels(y, layout, 0), src=y_rows)


def load_decay_rates(a_log, layout, channels):
    """Load a_log of channels (first, end) of every partition, and return exp of it.

    The tile is new, [partition, channel, state] float32 in SBUF. Channels count from the first one of the
    partition.
    """
    states = a_log.shape[1]
    rates = nl.ndarray((layout.rows, channels[1] - channels[0], states), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=rates, op=nl.exp, data=load_for_sequences(a_log, layout, states, channels))
    return rates


def load_batch(units, first, together):
    """Load the states of the units first … first + together - 1, or as many of them as there are, to SBUF."""
    for unit in units[first : first + together]:
        unit.load(first <= together)


def compute_time_steps(low, w_dt, matrix, panels, bias, counts, layout):
    """Return time steps softplus(low @ w_dt + bias), 0 for padding: [partition, set, channel] float32 in SBUF.

    Args:
        low: rows [sequence, R] in SBUF, the columns of `projected` that w_dt multiplies.
        matrix: the first panel of w_dt, loaded as blocks; the others are loaded here.
        panels: ranges (first, end) of channels.
        bias: [partition, channel].
        counts: [partition, set, 1], below 1 for padding.
    """
    sequences, rank = low.shape
    across = allocate_transposed(rank, sequences, low.dtype)
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
    live = allocate_like(counts)
    nisa.tensor_scalar(dst=live, data=counts, op0=nl.greater_equal, operand0=1.0)
    nisa.tensor_tensor(dst=steps, data1=steps, data2=live.broadcast(2, layout.width), op=nl.multiply)
    return steps


def transpose_exactly(across, low):
    """Write rows low [sequence, R], transposed, to `across` [r in block, block, sequence], bit by bit on every chip.

    The Vector engine transposes, since the Tensor engine of gen2 would multiply by an identity.
    """
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
    """Numbers of the channels of all sets, SBUF tiles [partition, set, channel]; float32 but for u and the weights.

    weights: those that write and those that read the states, [partition, set, 2 * state]. inputs: u. zero:
    [partition, 1] zeros. steps: time steps, scaled: inputs times time steps; both None until `take_steps`.
    sums: over the states; allocated by `take_steps` and written by the pieces.
    """

    layout: Layout
    weights: nl.NkiTensor
    inputs: nl.NkiTensor
    zero: nl.NkiTensor
    steps: nl.NkiTensor | None = None
    scaled: nl.NkiTensor | None = None
    sums: nl.NkiTensor | None = None

    def take_steps(self, steps):
        """Set `steps` to a tile of time steps and `scaled` to steps times inputs (u), and allocate `sums`.

        All are float32 SBUF tiles [partition, set, channel].
        """
        self.steps = steps
        self.scaled = allocate_like(steps)
        nisa.tensor_tensor(dst=self.scaled, data1=steps, data2=self.inputs, op=nl.multiply)
        self.sums = allocate_like(steps)

    def gate_sums(self, gates, skip, dtype):
        """Return (sums + skip * inputs) * silu(gates), the rows of y.

        They are a new SBUF tile [partition, set, channel] of a dtype.

        Args:
            gates: [partition, set, channel].
            skip: d of each channel, [partition, channel].
        """
        skipped = allocate_like(self.sums)
        skips = repeat_for_sets(skip, self.layout)
        nisa.tensor_tensor(dst=skipped, data1=self.inputs, data2=skips, op=nl.multiply)
        nisa.tensor_tensor(dst=skipped, data1=skipped, data2=self.sums, op=nl.add)
        active = allocate_like(self.sums)
        nisa.activation(dst=active, op=nl.silu, data=gates)
        result = nl.ndarray(self.sums.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=skipped, data2=active, op=nl.multiply)
        return result


@dataclass
class Unit(nl.NKIObject):
    """States of channels (first, end) of each partition, for one set of sequences.

    state: all states, [slot, channel, state] in HBM. slots: those that sequences read, [1, B]. read, written:
    rows of states, see `compute_row_numbers`. channels: counted from the first one of the partition. index:
    of the set. states: [partition, channel, state] float32 in SBUF, None until they are loaded.
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
        """Load the states of the unit's channels and sequences from their slots to a new float32 SBUF tile, `states`.

        It is [partition, channel, state]. Sequences that start at position 0 get zeros.

        Args:
            at_once: whether GpSimd, which is idle for the first batches, writes the zeros; else the Scalar
                engine does.
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
        """Return a view of the unit's states in HBM, [partition, channel * state].

        `numbers` [partition, set] int32 has the first row of states of each partition, see
        `compute_row_numbers`.
        """
        (slots, channels, size), (first, last) = self.state.shape, self.channels
        return self.state.reshape((slots * channels, size)).ap(
            pattern=[[size, self.rows.layout.rows], [1, (last - first) * size]],
            offset=first * size,
            vector_offset=numbers[:, self.index : self.index + 1],
        )


@dataclass
class Piece(nl.NKIObject):
    """Channels (first, end) of a unit that one instruction takes.

    Its tiles are [partition, channel, state] float32 in SBUF, None until the method that computes them.

    unit_index: of the unit among all. channels: counted from the first one of the partition. decay: what
    multiplies the states. inputs: what is added to them. weighed: the new states times their output weights.
    """

    unit: Unit
    unit_index: int
    channels: tuple
    decay: nl.NkiTensor | None = None
    inputs: nl.NkiTensor | None = None
    weighed: nl.NkiTensor | None = None

    def is_last(self):
        """Return whether the piece is the last one of its unit."""
        return self.channels[1] == self.unit.channels[1]

    def select(self, tile):
        """Return a view of the piece's channels of its unit's tile [partition, channel, state]."""
        first = self.unit.channels[0]
        return tile[:, self.channels[0] - first : self.channels[1] - first, :]

    def view_by_channel(self, columns):
        """Return a view of the piece's channels in a tile [partition, set, channel], repeated for each state.

        The view is [partition, channel, state].
        """
        numbers = columns[:, self.unit.index, self.channels[0] : self.channels[1]]
        return numbers.expand_dim(2).broadcast(2, self.unit.state.shape[2])

    def view_by_state(self, side):
        """Return a view of the weights of the piece's set, repeated for each channel: [partition, channel, state].

        Args:
            side: 0 for the weights that write the states, 1 for those that read them.
        """
        size = self.unit.state.shape[2]
        weights = self.unit.rows.weights[:, self.unit.index, side * size : (side + 1) * size]
        return weights.expand_dim(1).broadcast(1, self.channels[1] - self.channels[0])

    def compute_factors(self, unit_rates, engine):
        """Set `decay`, what multiplies the states, and `inputs`, what is added to them: new float32 SBUF tiles.

        Each is [partition, channel, state].

        Args:
            unit_rates: exp(a_log) of the unit's channels, [partition, channel, state].
            engine: multiplies rates by steps. GpSimd and the Vector engine take pieces in turn, so that both
                are busy as long.
        """
        rates, rows = self.select(unit_rates), self.unit.rows
        self.decay = allocate_like(rates)
        steps = self.view_by_channel(rows.steps)
        nisa.tensor_tensor(dst=self.decay, data1=rates, data2=steps, op=nl.multiply, engine=engine)
        nisa.activation(dst=self.decay, op=nl.exp, data=self.decay, scale=-1.0)
        self.inputs = allocate_like(rates)
        nisa.tensor_tensor(
            dst=self.inputs,
            data1=self.view_by_channel(rows.scaled),
            data2=self.view_by_state(0),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )

    def advance(self):
        """Replace the piece's states in SBUF by those after the token: states * decay + inputs.

        Also set `weighed` to the new states times their output weights, a new SBUF tile. After the last piece
        of a unit, store the unit's states to HBM.
        """
        unit, states = self.unit, self.select(self.unit.states)
        nisa.tensor_tensor(dst=states, data1=states, data2=self.decay, op=nl.multiply)
        nisa.tensor_tensor(dst=states, data1=states, data2=self.inputs, op=nl.add)
        if self.is_last():
            nisa.dma_copy(dst=unit.view_rows(unit.written), src=unit.states)
        self.weighed = allocate_like(states)
        nisa.tensor_tensor(
            dst=self.weighed,
            data1=states,
            data2=self.view_by_state(1),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )

    def sum_states(self):
        """Sum `weighed` over the states, and write the sums to the piece's channels of `Rows.sums`."""
        sums = self.unit.rows.sums[:, self.unit.index, self.channels[0] : self.channels[1]]
        nisa.tensor_reduce(dst=sums, op=nl.add, data=self.weighed, axis=2)
