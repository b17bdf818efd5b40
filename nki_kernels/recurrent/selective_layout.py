"""Layout of sets of sequences of a selective scan's step on the partitions, and what is loaded for them.

In a step `selective_scan` has one token of each sequence. A set is sequences that share the 128 partitions, q
partitions each: partition b * q + g has `width` neighbouring channels of sequence b, from g * width on. Sets
of equally many sequences follow one another along the free dim. The states of a channel are its elements in
HBM, [slot, channel, state].
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.slots import mask_slots
from nki_kernels.tiles import BANK, PARTITIONS, ranges

MOVED = 2560
"""Elements of the states that a partition is to have at least, if sets of more sequences allow it: 10 KiB."""

APART = 8
"""Sequences of a set whose states are loaded by a DMA each, with hardware descriptors; more share one DMA."""

PANEL = 20480
"""Bytes on a partition of the columns of w_dt that are in SBUF together."""


def choose_set_size(count, channels, states):
    """Return how many sequences share the partitions (a set): a divisor of `count`.

    It is the divisor that takes most of the 128 partitions. Ties go to the least number that has MOVED
    elements of states on a partition, or else to the largest one.

    Args:
        count: the number of sequences.
        channels: (first, end) of the channels.
        states: elements of the state of a channel.
    """
    best = 1
    for sequences in range(2, min(count, PARTITIONS) + 1):
        if count % sequences == 0:
            q = count_lanes(best, channels)
            more = sequences * count_lanes(sequences, channels) - best * q
            if more > 0 or (more == 0 and (channels[1] - channels[0]) // q * states < MOVED):
                best = sequences
    return best


def count_lanes(sequences, channels):
    """Return the partitions of each of the sequences that share 128 partitions: a power of two.

    It is the largest one that divides the number of channels (first, end), and of which `sequences` times
    fit.
    """
    q = 1
    while 2 * q * sequences <= PARTITIONS and (channels[1] - channels[0]) % (2 * q) == 0:
        q = 2 * q
    return q


@dataclass
class Layout(nl.NKIObject):
    """Layout of sets of sequences on the partitions, q partitions of each sequence of a set.

    start: the first sequence. sequences: of a set. sets: their number. channels: (first, end). width:
    channels of a partition. rows: partitions of a set, sequences * q.
    """

    start: int
    sequences: int
    sets: int
    channels: tuple
    q: int
    width: int
    rows: int


def allocate_like(tile):
    """Allocate a float32 SBUF tile of a tile's shape, without contents."""
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def view_channels(array, layout, first):
    """Return a view of the layout's channels of each sequence's row in HBM: [partition, set, channel].

    A sequence's channels are divided over its q partitions.

    Args:
        array: rows [T, W] in HBM, one of each sequence.
        first: the column of channel 0.
    """
    pitch = array.shape[1]
    pattern = [
        [pitch, layout.sequences],
        [layout.width, layout.q],
        [layout.sequences * pitch, layout.sets],
        [1, layout.width],
    ]
    return array.ap(pattern=pattern, offset=layout.start * pitch + first + layout.channels[0])


def load_channels(array, layout, first):
    """Load the layout's channels of each sequence's row to its q partitions.

    Returns a new SBUF tile [partition, set, channel] of the array's dtype.

    Args:
        array: rows [T, W] in HBM, one of each sequence.
        first: the column of channel 0.
    """
    tile = nl.ndarray((layout.rows, layout.sets, layout.width), dtype=array.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=view_channels(array, layout, first))
    return tile


def load_tokens(array, layout, first, count):
    """Load `count` columns, from `first` on, of each sequence's row: a new SBUF tile [partition, set, column].

    All q partitions of a sequence have the same numbers. `array` is [T, W] in HBM with one row for each
    sequence.
    """
    tile = nl.ndarray((layout.rows, layout.sets, count), dtype=array.dtype, buffer=nl.sbuf)
    pitch = array.shape[1]
    pattern = [[pitch, layout.sequences], [0, layout.q], [layout.sequences * pitch, layout.sets], [1, count]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=layout.start * pitch + first))
    return tile


def load_for_sequences(array, layout, elements, piece):
    """Load numbers of channels that all sequences share: a new SBUF tile [partition, channel * element].

    Args:
        array: [C, elements] or, for one element, [1, C] in HBM.
        elements: numbers of each channel.
        piece: (first, end) of the channels of each partition, counted from its first one.
    """
    first, last = piece
    tile = nl.ndarray((layout.rows, (last - first) * elements), dtype=array.dtype, buffer=nl.sbuf)
    pattern = [[0, layout.sequences], [layout.width * elements, layout.q], [1, (last - first) * elements]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=(layout.channels[0] + first) * elements))
    return tile


def repeat_for_sets(columns, layout):
    """Return a view of a tile [partition, channel], repeated for each set of sequences: [partition, set, channel]."""
    return columns.expand_dim(1).broadcast(1, layout.sets)


def split_panels(layout, column_bytes):
    """Return ranges (first, end) of the layout's channels; the columns of w_dt of one range are in SBUF at a time.

    Args:
        column_bytes: bytes of a column on a partition.
    """
    return ranges(layout.channels[0], layout.channels[1], max(BANK, PANEL // column_bytes))


def compute_row_numbers(state, table, layout):
    """Return (read, written): the index of the first channel's state that each partition reads and writes.

    Both are new SBUF tiles [partition, set] int32; states count over all slots and channels. A sequence that
    starts at position 0 reads beyond all of them, which a DMA skips. read is None if a set has at most APART
    sequences: `Unit.load` then loads states by slot.
    """
    slots, channels, _ = state.shape
    within = nl.ndarray((layout.rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, 1]], channel_multiplier=1)
    nisa.tensor_scalar(dst=within, data=within, op0=nl.bitwise_and, operand0=layout.q - 1)
    channel = allocate_like(within)
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
    return mask_slots(numbers, starts, slots * channels), written
