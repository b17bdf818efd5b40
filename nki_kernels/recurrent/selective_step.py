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
from nki_kernels.recurrent.selective_spread import (
    APART,
    Spread,
    lanes,
    of_all,
    of_channels,
    of_sets,
    of_tokens,
    panels_of,
    row_numbers,
    rows_of,
    sequences_together,
    tile_like,
)
from nki_kernels.recurrent.slots import product_dtype, row, slots_or_none
from nki_kernels.tiles import BANK, PARTITIONS, blocks, load, ranges
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


@dataclass
class Piece(nl.NKIObject):
    """Channels (first, end) of a unit, and their tiles, [partition, channel, state] float32.

    unit: its index. decay: what multiplies the states. inputs: what is added to them. weighed: the new states times
    their output weights.
    """

    unit: int
    channels: tuple
    decay: nl.NkiTensor | None = None
    inputs: nl.NkiTensor | None = None
    weighed: nl.NkiTensor | None = None


def scan_step(y, given, state, places, own):
    """The token of each sequence, for the channels `own`."""
    count = places[0].shape[0]
    slots = slots_or_none(row(places[0], 1), row(places[1], 1), state.shape[0])
    sequences = sequences_together(count, own, state.shape[2])
    q = lanes(sequences, own)
    for channels in ranges(own[0], own[1], q * CHANNELS):
        width = (channels[1] - channels[0]) // q
        sets = max(1, min(CHANNELS // max(width, 2 * state.shape[2]), PARTITIONS // sequences))
        for start, end in ranges(0, count, sets * sequences):
            spread = Spread(start, sequences, (end - start) // sequences, channels, q)
            step_of(y, given, state, places, slots, spread)


def step_of(y, given, state, places, slots, box):
    """The token of some sequences, for some channels."""
    u, projected, w_dt, dt_bias, a_log, d, gate, gate_first = given
    states, rank = a_log.shape[1], w_dt.shape[0]
    dtype = product_dtype(u, w_dt)
    panels = panels_of(box, blocks(rank) * (4 if dtype == nl.float32 else 2))
    matrix = load_blocks(WeightMatrix(w_dt[:, panels[0][0] : panels[0][1]]), dtype, SCALAR)
    low = load(projected[box.start : box.start + box.count, 0:rank], dtype)
    counts = of_tokens(places[2], box, 0, 1)
    bias = of_all(dt_bias, box, 1, (0, box.width))
    weights = of_tokens(projected, box, rank, 2 * states)
    rows = Rows(box, weights, of_channels(u, box, 0))
    parts = ranges(0, box.width, max(1, STATES // states))
    numbers = row_numbers(state, places, box)
    units = []
    for part in parts:
        for number in range(box.sets):
            units.append(Unit(state, slots, numbers, rows, part, number))
    together = max(1, STATE_BYTES // (8 * (parts[0][1] - parts[0][0]) * states))
    rates = rates_of(a_log, box, parts[0])
    load_batch(units, 0, together)
    rows.take_steps(time_steps(low, w_dt, matrix, panels, bias, counts, box))
    load_batch(units, together, together)
    pass_pieces(units, together, a_log, rates)
    result = rows.gated(of_channels(gate, box, gate_first), of_all(d, box, 1, (0, box.width)), y.dtype)
    nisa.dma_copy(dst=rows_of(y, box, 0), src=result)


def rates_of(a_log, box, part):
    """The rates at which the states of some channels decay, [partition, channel, state]."""
    states = a_log.shape[1]
    rates = nl.ndarray((box.rows, part[1] - part[0], states), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=rates, op=nl.exp, data=of_all(a_log, box, states, part))
    return rates


def pass_pieces(units, together, a_log, rates):
    """Pieces of all units one after the other; the states of so many units are loaded and stored together."""
    states = a_log.shape[1]
    pieces = []
    for number in range(len(units)):
        first, last = units[number].part
        for channels in ranges(first, last, max(1, PIECE // states)):
            pieces.append(Piece(number, channels))
    for number in range(len(pieces) + 2):
        if number < len(pieces):
            piece = pieces[number]
            unit = units[piece.unit]
            if piece.unit > 0 and unit.number == 0 and piece.channels[0] == unit.part[0]:
                rates = rates_of(a_log, unit.rows.box, unit.part)
            unit.factors(piece, rates, number)
        if 0 <= number - 1 < len(pieces):
            piece = pieces[number - 1]
            unit = units[piece.unit]
            unit.move_on(piece)
            if piece.channels[1] == unit.part[1] and (piece.unit + 1) % together == 0:
                load_batch(units, piece.unit + 1 + together, together)
        if number >= 2:
            piece = pieces[number - 2]
            units[piece.unit].add_up(piece)


def load_batch(units, first, together):
    """Load the states of a batch of units."""
    for unit in units[first : first + together]:
        unit.load(first <= together)


def time_steps(low, w_dt, matrix, panels, bias, counts, box):
    """softplus of projected time steps, 0 for padding: [partition, set, channel] in float32.

    matrix: the first of the panels of w_dt, as blocks.
    """
    sequences, rank = low.shape
    across = blocks_tile(rank, sequences, low.dtype)
    transpose_exactly(across, low)
    start, end = box.channels
    rows = nl.ndarray((sequences, end - start), dtype=nl.float32, buffer=nl.sbuf)
    for left, right in panels:
        if left > start:
            matrix = load_blocks(WeightMatrix(w_dt[:, left:right]), low.dtype, SCALAR)
        for first, last in ranges(left, right, BANK):
            bank = nl.ndarray((sequences, last - first), dtype=nl.float32, buffer=nl.psum)
            add_products([[bank]], across, [(0, sequences)], matrix, [(first - left, last - left)], 0, rank)
            nisa.tensor_copy(dst=rows[:, first - start : last - start], src=bank)
    steps = nl.ndarray((box.rows, box.sets, box.width), dtype=nl.float32, buffer=nl.sbuf)
    for number in range(box.sets):
        own = rows[number * box.sequences : (number + 1) * box.sequences, :]
        transfer(steps[:, number, :], own, SCALAR)
    nisa.tensor_tensor(dst=steps, data1=steps, data2=of_sets(bias, box), op=nl.add)
    nisa.activation(dst=steps, op=nl.softplus, data=steps)
    live = tile_like(counts)
    nisa.tensor_scalar(dst=live, data=counts, op0=nl.greater_equal, operand0=1.0)
    nisa.tensor_tensor(dst=steps, data1=steps, data2=live.broadcast(2, box.width), op=nl.multiply)
    return steps


def transpose_exactly(across, low):
    """Rows [sequence, rank] to blocks [rank in block, block, sequence], 32 x 32 at once, bit by bit on every chip."""
    sequences, rank = low.shape
    for left, right in ranges(0, rank, SQUARE):
        block, top = left // PARTITIONS, left % PARTITIONS
        for start, end in ranges(0, sequences, SQUARE):
            nisa.nc_transpose(
                dst=across[top : top + right - left, block, start:end],
                data=low[start:end, left:right],
                engine=nisa.engine.vector,
            )


class Rows(nl.NKIObject):
    """What belongs to the channels of all sets, [partition, set, channel]; weights are [partition, set, 2 * state]."""

    def __init__(self, box, weights, inputs):
        self.box = box
        self.weights = weights
        self.inputs = inputs
        self.zero = nl.ndarray((box.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.zero, value=0.0)

    def take_steps(self, steps):
        """Note time steps, and multiply inputs by them."""
        self.steps = steps
        self.grown = tile_like(steps)
        nisa.tensor_tensor(dst=self.grown, data1=steps, data2=self.inputs, op=nl.multiply)
        self.sums = tile_like(steps)

    def gated(self, gates, skip, dtype):
        """(sums + skip * inputs) * silu(gates)."""
        skipped = tile_like(self.sums)
        nisa.tensor_tensor(dst=skipped, data1=self.inputs, data2=of_sets(skip, self.box), op=nl.multiply)
        nisa.tensor_tensor(dst=skipped, data1=skipped, data2=self.sums, op=nl.add)
        active = tile_like(self.sums)
        nisa.activation(dst=active, op=nl.silu, data=gates)
        result = nl.ndarray(self.sums.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=skipped, data2=active, op=nl.multiply)
        return result


class Unit(nl.NKIObject):
    """The channels `part` of each partition, of one set of sequences: their states [partition, channel, state]."""

    def __init__(self, state, slots, numbers, rows, part, number):
        self.state = state
        self.slots = slots
        self.numbers = numbers
        self.rows = rows
        self.part = part
        self.width = part[1] - part[0]
        self.number = number

    def load(self, at_once):
        """Load the states of each sequence; zeros for slots beyond all.

        GpSimd, which has nothing to do at once, makes zeros then, and the Scalar engine later.
        """
        box, states = self.rows.box, self.state.shape[2]
        self.held = nl.ndarray((box.rows, self.width, states), dtype=nl.float32, buffer=nl.sbuf)
        if at_once:
            nisa.memset(dst=self.held, value=0.0, engine=nisa.engine.gpsimd)
        else:
            zeros = self.rows.zero.broadcast(1, self.width * states)
            nisa.activation(dst=self.held, op=nl.copy, data=zeros)
        if box.sequences > APART:
            nisa.dma_copy(dst=self.held, src=self.in_rows(self.numbers[0]), oob_mode=nisa.oob_mode.skip)
            return
        for number in range(box.sequences):
            at = box.start + self.number * box.sequences + number
            source = self.state.ap(
                pattern=[[box.width * states, box.q], [1, self.width * states]],
                offset=(box.first + self.part[0]) * states,
                scalar_offset=self.slots[:, at : at + 1],
                indirect_dim=0,
            )
            own = self.held[number * box.q : (number + 1) * box.q, :, :]
            transfer(own, source, SYNC, nisa.oob_mode.skip)

    def in_rows(self, numbers):
        """The states of all sequences in HBM, from the rows on that numbers [partition, set] give."""
        slots, channels, states = self.state.shape
        return self.state.reshape((slots * channels, states)).ap(
            pattern=[[states, self.rows.box.rows], [1, self.width * states]],
            offset=self.part[0] * states,
            vector_offset=numbers[:, self.number : self.number + 1],
        )

    def store(self):
        """Store the states of all sequences together."""
        nisa.dma_copy(dst=self.in_rows(self.numbers[1]), src=self.held)

    def own(self, piece):
        """The channels of a piece within the part."""
        return slice(piece[0] - self.part[0], piece[1] - self.part[0])

    def by_channel(self, columns, piece):
        """Numbers [partition, set, channel] of a piece's channels, seen as [partition, channel, state]."""
        return columns[:, self.number, piece[0] : piece[1]].expand_dim(2).broadcast(2, self.state.shape[2])

    def by_state(self, side, piece):
        """The weights that write the states (side 0) or read them (side 1), seen as [partition, channel, state]."""
        states = self.state.shape[2]
        weights = self.rows.weights[:, self.number, side * states : (side + 1) * states]
        return weights.expand_dim(1).broadcast(1, piece[1] - piece[0])

    def factors(self, piece, rates, number):
        """What a piece of the states is multiplied by, and what is added to it: [partition, channel, state].

        GpSimd and the Vector engine take the decays of pieces in turn, so that both are busy as long.
        """
        channels = piece.channels
        unit_rates = rates[:, self.own(channels), :]
        decay = tile_like(unit_rates)
        steps = self.by_channel(self.rows.steps, channels)
        engine = nisa.engine.gpsimd if number % 2 == 0 else nisa.engine.vector
        nisa.tensor_tensor(dst=decay, data1=unit_rates, data2=steps, op=nl.multiply, engine=engine)
        nisa.activation(dst=decay, op=nl.exp, data=decay, scale=-1.0)
        inputs = tile_like(unit_rates)
        nisa.tensor_tensor(
            dst=inputs,
            data1=self.by_channel(self.rows.grown, channels),
            data2=self.by_state(0, channels),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )
        piece.decay = decay
        piece.inputs = inputs

    def move_on(self, piece):
        """A piece of the states one token on, and weighed; after the last piece they are stored."""
        channels = piece.channels
        state = self.held[:, self.own(channels), :]
        nisa.tensor_tensor(dst=state, data1=state, data2=piece.decay, op=nl.multiply)
        nisa.tensor_tensor(dst=state, data1=state, data2=piece.inputs, op=nl.add)
        if channels[1] == self.part[1]:
            self.store()
        weighed = tile_like(state)
        nisa.tensor_tensor(
            dst=weighed,
            data1=state,
            data2=self.by_state(1, channels),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )
        piece.weighed = weighed

    def add_up(self, piece):
        """The sums over the states of a piece."""
        first, last = piece.channels
        nisa.tensor_reduce(
            dst=self.rows.sums[:, self.number, first:last], op=nl.add, data=piece.weighed, axis=2
        )
