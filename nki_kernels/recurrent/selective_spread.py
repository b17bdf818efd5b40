"""How sets of sequences of a selective scan's step lie on the partitions, and what is loaded for them."""

from __future__ import annotations

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


def sequences_together(count, own, states):
    """How many sequences share the partitions: the divisor of their number that takes most of the partitions.

    Of equals the least that has MOVED elements of states on a partition, or else the largest.
    """
    best = 1
    for each in range(2, min(count, PARTITIONS) + 1):
        if count % each == 0:
            q = lanes(best, own)
            more = each * lanes(each, own) - best * q
            if more > 0 or (more == 0 and (own[1] - own[0]) // q * states < MOVED):
                best = each
    return best


def lanes(sequences, own):
    """The partitions of each of so many sequences: the largest power of two that divides the channels."""
    q = 1
    while 2 * q * sequences <= PARTITIONS and (own[1] - own[0]) % (2 * q) == 0:
        q = 2 * q
    return q


class Spread(nl.NKIObject):
    """How sets of so many sequences, from `start` on, lie on the partitions: q of them each, `width` channels."""

    def __init__(self, start, sequences, sets, channels, q):
        self.start = start
        self.sequences = sequences
        self.sets = sets
        self.count = sets * sequences
        self.first = channels[0]
        self.channels = channels
        self.q = q
        self.width = (channels[1] - channels[0]) // q
        self.rows = sequences * q


def tile_like(tile):
    """A tile of float32 of the same shape."""
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def rows_of(array, box, first):
    """The channels of the sequences in rows [T, W] of HBM, whose channels begin at column `first`."""
    pitch = array.shape[1]
    pattern = [
        [pitch, box.sequences],
        [box.width, box.q],
        [box.sequences * pitch, box.sets],
        [1, box.width],
    ]
    return array.ap(pattern=pattern, offset=box.start * pitch + first + box.first)


def of_channels(array, box, first):
    """The channels of the sequences in rows [T, W], each on its partition: [partition, set, channel]."""
    tile = nl.ndarray((box.rows, box.sets, box.width), dtype=array.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=rows_of(array, box, first))
    return tile


def of_tokens(array, box, first, count):
    """Some columns of rows [T, W] of HBM on all partitions of their sequence: [partition, set, column]."""
    tile = nl.ndarray((box.rows, box.sets, count), dtype=array.dtype, buffer=nl.sbuf)
    pitch = array.shape[1]
    pattern = [[pitch, box.sequences], [0, box.q], [box.sequences * pitch, box.sets], [1, count]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=box.start * pitch + first))
    return tile


def of_all(array, box, each, piece):
    """What belongs to some channels of every partition, `each` elements to a channel: [partition, element]."""
    first, last = piece
    tile = nl.ndarray((box.rows, (last - first) * each), dtype=array.dtype, buffer=nl.sbuf)
    pattern = [[0, box.sequences], [box.width * each, box.q], [1, (last - first) * each]]
    nisa.dma_copy(dst=tile, src=array.ap(pattern=pattern, offset=(box.first + first) * each))
    return tile


def of_sets(columns, box):
    """What belongs to the channels of every partition, [partition, channel], seen by set: [partition, set, channel]."""
    return columns.expand_dim(1).broadcast(1, box.sets)


def panels_of(box, column_bytes):
    """Ranges of channels whose columns of w_dt lie in SBUF together."""
    first, last = box.channels
    return ranges(first, last, max(BANK, PANEL // column_bytes))


def row_numbers(state, places, box):
    """Where each partition reads and writes states, counted in channels of all slots: [partition, set] int32 twice.

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
    shape = (box.rows, box.sets)
    numbers = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=numbers,
        data=of_tokens(places[0], box, 0, 1).reshape_dim(1, shape[1:]),
        op0=nl.multiply,
        operand0=float(channels),
        op1=nl.add,
        operand1=place,
    )
    written = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=written, src=numbers)
    if box.sequences <= APART:
        return None, written
    starts = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=starts, src=of_tokens(places[1], box, 0, 1).reshape_dim(1, shape[1:]))
    return slots_or_none(numbers, starts, slots * channels), written
