"""Layout of sets of sequences of a selective scan's step on the partitions, and what is loaded for them."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.slots import slots_or_none
from nki_kernels.tiles import BANK, PARTITIONS, ranges

MOVED = 2560
"""Elements of the states on a partition for which sequences share the partitions: 10 KiB."""

APART = 8
"""Sequences of a set whose states are loaded apart, with descriptors that hardware writes; of more all together."""

PANEL = 20480
"""Bytes on a partition of the columns of w_dt that lie in SBUF together."""


def sequences_together(count, channels, states):
    """Return how many sequences share the partitions: the divisor of their number that takes most of the partitions.

    Of equals the least that has MOVED elements of states on a partition, or else the largest.
    """
    best = 1
    for sequences in range(2, min(count, PARTITIONS) + 1):
        if count % sequences == 0:
            q = lanes(best, channels)
            more = sequences * lanes(sequences, channels) - best * q
            if more > 0 or (more == 0 and (channels[1] - channels[0]) // q * states < MOVED):
                best = sequences
    return best


def lanes(sequences, channels):
    """Return the partitions of each of so many sequences: the largest power of two that divides the channels."""
    q = 1
    while 2 * q * sequences <= PARTITIONS and (channels[1] - channels[0]) % (2 * q) == 0:
        q = 2 * q
    return q


@dataclass
class Layout(nl.NKIObject):
    """Layout of `sets` sets of sequences, from `start` on, and of channels (first, end): q partitions of each sequence.

    sequences: of a set. width: channels of a partition. rows: partitions of a set.
    """

    start: int
    sequences: int
    sets: int
    channels: tuple
    q: int
    width: int
    rows: int


def tile_like(tile):
    """Allocate a tile of float32 of the same shape."""
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def view_channels(array, layout, first):
    """Return a view of the channels of the sequences in rows [T, W], which begin at column `first`, in HBM."""
    pitch = array.shape[1]
    pattern = [
        [pitch, layout.sequences],
        [layout.width, layout.q],
        [layout.sequences * pitch, layout.sets],
        [1, layout.width],
    ]
    return array.ap(pattern=pattern, offset=layout.start * pitch + first + layout.channels[0])


def load_channels(array, layout, first):
    """Load the channels of the sequences in rows [T, W], each to its partition: [partition, set, channel]."""
    tile = nl.ndarray((layout.rows, layout.sets, layout.width), dtype=array.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=view_channels(array, layout, first))
    return tile


def load_tokens(array, layout, first, count):
    """Load columns of rows [T, W] to all partitions of their sequence: [partition, set, column]."""
    tile = nl.ndarray((layout.rows, layout.sets, count), dtype=array.dtype, buffer=nl.sbuf)
    pitch = array.shape[1]
    pattern = [[pitch, layout.sequences], [0, layout.q], [layout.sequences * pitch, layout.sets], [1, count]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=layout.start * pitch + first))
    return tile


def load_for_sequences(array, layout, elements, piece):
    """Load some channels of every partition for all sequences, with so many elements: [partition, element]."""
    first, last = piece
    tile = nl.ndarray((layout.rows, (last - first) * elements), dtype=array.dtype, buffer=nl.sbuf)
    pattern = [[0, layout.sequences], [layout.width * elements, layout.q], [1, (last - first) * elements]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=(layout.channels[0] + first) * elements))
    return tile


def repeat_for_sets(columns, layout):
    """Return a view of numbers of channels, [partition, channel], for all sets: [partition, set, channel]."""
    return columns.expand_dim(1).broadcast(1, layout.sets)


def split_panels(layout, column_bytes):
    """Return ranges of channels whose columns of w_dt lie in SBUF together."""
    return ranges(layout.channels[0], layout.channels[1], max(BANK, PANEL // column_bytes))


def row_numbers(state, table, layout):
    """Return the rows of all slots' states that each partition reads and writes: [partition, set] int32 twice.

    A state that counts as zeros is read beyond all slots.
    """
    slots, channels, _ = state.shape
    within = nl.ndarray((layout.rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, 1]], channel_multiplier=1)
    nisa.tensor_scalar(dst=within, data=within, op0=nl.bitwise_and, operand0=layout.q - 1)
    channel = tile_like(within)
    nisa.tensor_copy(dst=channel, src=within)
    nisa.tensor_scalar(
        dst=channel,
        data=channel,
        op0=nl.multiply,
        operand0=float(layout.width),
        op1=nl.add,
        operand1=float(layout.channels[0]),
    )
    shape = (layout.rows, layout.sets)
    numbers = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=numbers,
        data=load_tokens(table.state_slots, layout, 0, 1).reshape_dim(1, shape[1:]),
        op0=nl.multiply,
        operand0=float(channels),
        op1=nl.add,
        operand1=channel,
    )
    written = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=written, src=numbers)
    if layout.sequences <= APART:
        return None, written
    starts = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=starts, src=load_tokens(table.starts, layout, 0, 1).reshape_dim(1, shape[1:]))
    return slots_or_none(numbers, starts, slots * channels), written
