"""One token of each sequence through the selective scan; states are loaded and stored in HBM's layout.

A sequence has q partitions, as many as there are for it and as divide its channels: partition b * q + g has the `width`
channels from g * width on, whose states lie side by side. So one DMA brings a piece of the states of all sequences.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.block_loads import load_cast
from nki_kernels.projection.normalised_rows import transpose_rows
from nki_kernels.projection.products import add_products
from nki_kernels.projection.row_groups import blocks_tile
from nki_kernels.recurrent.slots import below, product_dtype, total
from nki_kernels.tiles import BANK, PARTITIONS, load, ranges

PIECE = 1024
"""Elements of the states on a partition that one DMA brings."""

PIECES = 12
"""Pieces that are loaded before the first of them is stored: 48 KiB of a partition."""

PANEL = 2048
"""Columns of w_dt that lie in SBUF together."""


class Spread(nl.NKIObject):
    """How a group of sequences lies on the partitions: from `start` on so many, q partitions each, `width` channels."""

    def __init__(self, group, own):
        self.start = group[0]
        self.sequences = group[1] - group[0]
        self.first = own[0]
        self.q = 1
        while 2 * self.q * self.sequences <= PARTITIONS and (own[1] - own[0]) % (2 * self.q) == 0:
            self.q = 2 * self.q
        self.width = (own[1] - own[0]) // self.q
        self.rows = self.sequences * self.q


def scan_step(y, given, state, places, group, own):
    """The token of each sequence of a group, for the channels `own`."""
    u, projected, w_dt, dt_bias, a_log, d, gate, gate_first = given
    box = Spread(group, own)
    states, rank = a_log.shape[1], w_dt.shape[0]
    inputs = of_channels(u, box, 0)
    gates = of_channels(gate, box, gate_first)
    into = of_tokens(projected, box, rank, states)
    out = of_tokens(projected, box, rank + states, states)
    low = load(projected[group[0] : group[1], 0:rank], u.dtype)
    steps = time_steps(
        low, w_dt, of_all(dt_bias, box, 1, (0, box.width)), of_tokens(places[2], box, 0, 1), own
    )
    grown = tile_like(steps)
    nisa.tensor_tensor(dst=grown, data1=steps, data2=inputs, op=nl.multiply)
    read, written = row_numbers(state, places, box)
    sums = tile_like(steps)
    each = max(1, PIECE // states)
    for block in ranges(0, box.width, PIECES * each):
        pieces = ranges(block[0], block[1], each)
        loaded = []
        for piece in pieces:
            source = piece_of(state, read, piece)
            held = load_piece(source, (box.rows, piece[1] - piece[0], states))
            loaded.append((held, of_all(a_log, box, states, piece)))
        ahead = factors(loaded[0], steps, grown, into, pieces[0])
        for number in range(len(pieces)):
            first, last = pieces[number]
            decay, fed = ahead
            if number + 1 < len(pieces):
                ahead = factors(loaded[number + 1], steps, grown, into, pieces[number + 1])
            held = loaded[number][0]
            nisa.tensor_tensor(dst=held, data1=held, data2=decay, op=nl.multiply)
            nisa.tensor_tensor(dst=held, data1=held, data2=fed, op=nl.add)
            nisa.dma_copy(dst=piece_of(state, written, pieces[number]), src=held)
            add_up(sums[:, first:last], held, out)
    result = gated(sums, inputs, of_all(d, box, 1, (0, box.width)), gates, y.dtype)
    nisa.dma_copy(dst=rows_of(y, box, 0), src=result)


def tile_like(tile):
    """A tile of float32 of the same shape."""
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def rows_of(array, box, first):
    """The channels of the sequences in rows [T, W] of HBM, whose channels begin at column `first`."""
    pitch = array.shape[1]
    pattern = [[pitch, box.sequences], [box.width, box.q], [1, box.width]]
    return array.ap(pattern=pattern, offset=box.start * pitch + first + box.first)


def of_channels(array, box, first):
    """The channels of the sequences in rows [T, W], each on its partition: [partition, channel]."""
    tile = nl.ndarray((box.rows, box.width), dtype=array.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows_of(array, box, first))
    return tile


def of_tokens(array, box, first, count):
    """Some columns of rows [T, W] of HBM on all partitions of their sequence: [partition, column]."""
    tile = nl.ndarray((box.rows, count), dtype=array.dtype, buffer=nl.sbuf)
    pitch = array.shape[1]
    pattern = [[pitch, box.sequences], [0, box.q], [1, count]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=box.start * pitch + first))
    return tile


def of_all(array, box, each, piece):
    """What belongs to some channels of every partition, `each` elements to a channel: [partition, element]."""
    first, last = piece
    tile = nl.ndarray((box.rows, (last - first) * each), dtype=array.dtype, buffer=nl.sbuf)
    pattern = [[0, box.sequences], [box.width * each, box.q], [1, (last - first) * each]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=(box.first + first) * each))
    return tile


def time_steps(low, w_dt, bias, counts, own):
    """softplus of projected time steps, 0 for padding: [partition, channel] in float32."""
    sequences, rank = low.shape
    across = blocks_tile(rank, sequences, product_dtype(low, w_dt))
    transpose_rows(across, 0, low, 2)
    rows = nl.ndarray((sequences, own[1] - own[0]), dtype=nl.float32, buffer=nl.sbuf)
    for left, right in ranges(0, own[1] - own[0], PANEL):
        weight = load_cast(w_dt[:, own[0] + left : own[0] + right], across.dtype, nisa.engine.sync)
        for first, last in ranges(left, right, BANK):
            bank = nl.ndarray((sequences, last - first), dtype=nl.float32, buffer=nl.psum)
            panels = [(first - left, last - left)]
            add_products([[bank]], across, [(0, sequences)], weight, panels, 0, rank)
            nisa.tensor_copy(dst=rows[:, first:last], src=bank)
    steps = tile_like(bias)
    nisa.dma_copy(dst=steps, src=rows)
    nisa.tensor_tensor(dst=steps, data1=steps, data2=bias, op=nl.add)
    nisa.activation(dst=steps, op=nl.softplus, data=steps)
    live = tile_like(counts)
    nisa.tensor_scalar(dst=live, data=counts, op0=nl.greater_equal, operand0=1.0)
    nisa.tensor_scalar(dst=steps, data=steps, op0=nl.multiply, operand0=live)
    return steps


def row_numbers(state, places, box):
    """Where each partition reads and writes states, counted in channels of all slots: [partition, 1] int32 twice.

    A state that counts as zeros is read beyond all slots.
    """
    slots, channels, _ = state.shape
    within = nl.ndarray((box.rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, 1]], channel_multiplier=1)
    nisa.tensor_scalar(dst=within, data=within, op0=nl.bitwise_and, operand0=box.q - 1)
    place = tile_like(within)
    nisa.tensor_copy(dst=place, src=within)
    nisa.tensor_scalar(
        dst=place,
        data=place,
        op0=nl.multiply,
        operand0=float(box.width),
        op1=nl.add,
        operand1=float(box.first),
    )
    own = tile_like(within)
    nisa.tensor_copy(dst=own, src=of_tokens(places[0], box, 0, 1))
    numbers = tile_like(within)
    nisa.scalar_tensor_tensor(
        dst=numbers, data=own, op0=nl.multiply, operand0=float(channels), op1=nl.add, operand1=place
    )
    starts = tile_like(within)
    nisa.tensor_copy(dst=starts, src=of_tokens(places[1], box, 0, 1))
    written = nl.ndarray(within.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=written, src=numbers)
    return total(numbers, below(starts, 1.0, slots * channels), nl.int32), written


def piece_of(state, numbers, piece):
    """A piece of the states of all partitions in HBM: [partition, element]."""
    slots, channels, states = state.shape
    first, last = piece
    pattern = [[states, numbers.shape[0]], [1, (last - first) * states]]
    flat = state.reshape((slots * channels, states))
    return flat.ap(pattern=pattern, offset=first * states, vector_offset=numbers)


def load_piece(source, shape):
    """A piece of the states [partition, channel, state]; zeros for slots beyond all."""
    held = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=held, value=0.0)
    nisa.dma_copy(dst=held, src=source, oob_mode=nisa.oob_mode.skip)
    return held


def factors(loaded, steps, grown, into, piece):
    """What a piece of the states is multiplied by, and what is added to it: [partition, channel, state] in float32."""
    held, logs = loaded
    first, last = piece
    states = held.shape[2]
    rates = nl.ndarray(held.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=rates, op=nl.exp, data=logs)
    decay = tile_like(held)
    by_state = steps[:, first:last].expand_dim(2).broadcast(2, states)
    nisa.tensor_tensor(dst=decay, data1=rates, data2=by_state, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.activation(dst=decay, op=nl.exp, data=decay, scale=-1.0)
    fed = tile_like(held)
    nisa.tensor_tensor(
        dst=fed,
        data1=grown[:, first:last].expand_dim(2).broadcast(2, states),
        data2=into.expand_dim(1).broadcast(1, last - first),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )
    return decay, fed


def add_up(sums, held, out):
    """The sum of the states of each channel, weighed by `out` [partition, state]."""
    weighed = tile_like(held)
    weights = out.expand_dim(1).broadcast(1, held.shape[1])
    nisa.tensor_tensor(dst=weighed, data1=held, data2=weights, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=weighed, axis=2)


def gated(sums, inputs, skip, gates, dtype):
    """(sums + skip * inputs) * silu(gates)."""
    skipped = tile_like(sums)
    nisa.tensor_tensor(dst=skipped, data1=inputs, data2=skip, op=nl.multiply)
    nisa.tensor_tensor(dst=skipped, data1=skipped, data2=sums, op=nl.add)
    active = tile_like(sums)
    nisa.activation(dst=active, op=nl.silu, data=gates)
    result = nl.ndarray(sums.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=skipped, data2=active, op=nl.multiply)
    return result
