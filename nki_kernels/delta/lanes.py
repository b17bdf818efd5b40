"""Where a step has the states of its sequences: each of four sequences in a quadrant of the partitions.

A matmul over the partitions of a quadrant reads one sequence, so no undefined number of another one reaches it. Two
heads with the same key share a quadrant, 16 lanes each. A lane has some neighbouring rows of a head's state, which lie
together in HBM: one indirect DMA moves several heads of four sequences, in pieces of 4 KiB for heads of 128.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC, transfer
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

QUADRANT = 32
"""Partitions of a sequence: instructions start at multiples of it."""

SEQUENCES = PARTITIONS // QUADRANT
"""Sequences that are moved together."""

ROUNDS = BANK // PARTITIONS
"""Heads, or pairs of heads, of a quadrant that are moved together: what they write fills a PSUM bank."""


class Lanes(nl.NKIObject):
    """How states [slots, heads, depth, width] of the sequences `own` lie: in a quadrant `share` heads of `lanes` lanes.

    The first `parts` lanes of a head have `rows` rows of its state each; parts divides the depth.
    """

    def __init__(self, states, own, key_heads):
        self.slots, self.heads, self.depth, self.width = states.shape
        self.start = own[0]
        self.sequences = own[1] - own[0]
        self.key_heads = key_heads
        self.share = 2 if self.heads // key_heads % 2 == 0 else 1
        self.lanes = QUADRANT // self.share
        self.parts = min(self.lanes, self.depth)
        while self.depth % self.parts != 0:
            self.parts = self.parts - 1
        self.rows = self.depth // self.parts
        self.columns = blocks(self.sequences, SEQUENCES)
        self.height = QUADRANT * blocks(self.sequences, self.columns)
        self.pieces = self.heads * self.parts
        most = 2**24 // (3 * self.pieces)
        assert self.slots <= most, (
            f"states of {self.heads} heads lie in at most {most} slots, not {self.slots}"
        )

    def quadrants(self):
        """The sequences of each quadrant, one after another: (first partition, first sequence, their number)."""
        found = []
        for first, end in ranges(0, self.sequences, self.columns):
            found.append((len(found) * QUADRANT, first, end - first))
        return found

    def own_key(self, head):
        """The key head of a head."""
        return head * self.key_heads // self.heads

    def tile(self, size, dtype):
        """A tile [lane, column, size]; zeros where a lane has no sequence in the last column, or no rows."""
        result = nl.ndarray((self.height, self.columns, size), dtype=dtype, buffer=nl.sbuf)
        if self.parts < self.lanes or self.sequences % self.columns != 0:
            nisa.memset(dst=result, value=0)
        return result

    def in_hbm(self, states, numbers, unit, first, count):
        """Rounds of a unit's states in HBM, [lane, round, element], by the numbers of their lanes' first pieces."""
        piece = self.rows * self.width
        flat = states.reshape((self.slots * self.pieces, piece))
        step = self.share * self.parts * piece
        return flat.ap(
            pattern=[[piece, unit["lanes"]], [step, count], [1, piece]],
            offset=unit["heads"][0] * self.parts * piece + first * step,
            vector_offset=numbers[0 : unit["lanes"], unit["column"] : unit["column"] + 1],
        )


def units_of(lanes):
    """What is moved by one DMA: four sequences, up to four rounds of heads."""
    found = []
    for first in range(0, lanes.heads, ROUNDS * lanes.share):
        for column in range(lanes.columns):
            members = blocks(lanes.sequences - column, lanes.columns)
            last = min(lanes.heads, first + ROUNDS * lanes.share)
            unit = {
                "column": column,
                "sequences": slice(column, lanes.sequences, lanes.columns),
                "members": members,
                "lanes": members * QUADRANT,
                "heads": (first, last),
                "keys": (lanes.own_key(first), lanes.own_key(last - 1) + 1),
                "state": None,
            }
            found.append(unit)
    return found


def places_of(lanes):
    """What each lane adds to the number of its sequence's first piece, [128, 1] float32; and which head it has.

    A lane without rows has a piece beyond all slots, which a DMA skips. Of two heads in a quadrant, [128, 1] float32
    each tells with a 1 which lanes have it.
    """
    within = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, 1]], channel_multiplier=1)
    nisa.tensor_scalar(dst=within, data=within, op0=nl.bitwise_and, operand0=QUADRANT - 1)
    place = column_like(within)
    nisa.tensor_copy(dst=place, src=within)
    masks = []
    if lanes.share == 2:
        for op in (nl.less, nl.greater_equal):
            mask = column_like(place)
            nisa.tensor_scalar(dst=mask, data=place, op0=op, operand0=float(lanes.lanes))
            masks.append(mask)
    if lanes.parts < lanes.lanes:
        part = place
        if lanes.share == 2:
            part = plus_second(masks, -lanes.lanes, place)
            place = plus_second(masks, lanes.parts - lanes.lanes, place)
        beyond = column_like(part)
        nisa.tensor_scalar(
            dst=beyond,
            data=part,
            op0=nl.greater_equal,
            operand0=float(lanes.parts),
            op1=nl.multiply,
            operand1=float(lanes.slots * lanes.pieces),
        )
        nisa.tensor_tensor(dst=place, data1=place, data2=beyond, op=nl.add)
    return place, masks


def column_like(tile):
    """A float32 tile of the same shape."""
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def plus_second(masks, number, place):
    """Numbers [128, 1], and `number` more for lanes of the second head."""
    result = column_like(place)
    nisa.scalar_tensor_tensor(
        dst=result, data=masks[1], op0=nl.multiply, operand0=float(number), op1=nl.add, operand1=place
    )
    return result


def piece_numbers(lanes, state_slots, starts, place):
    """Numbers of the first pieces of all lanes that are read, and that are written: [lane, column] int32 twice.

    A sequence that starts at 0 reads beyond the last slot, which the DMA skips.
    """
    slots = of_quadrants(lanes, state_slots)
    fresh = of_quadrants(lanes, starts)
    beyond = float(lanes.slots * lanes.pieces)
    nisa.tensor_scalar(dst=fresh, data=fresh, op0=nl.equal, operand0=0, op1=nl.multiply, operand1=beyond)
    written = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=written,
        data=slots,
        op0=nl.multiply,
        operand0=float(lanes.pieces),
        op1=nl.add,
        operand1=place[0 : lanes.height, :],
    )
    read = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=read, data1=written, data2=fresh, op=nl.add, engine=nisa.engine.vector)
    return read, written


def of_quadrants(lanes, numbers):
    """Numbers of sequences [B, 1] on all partitions of their quadrants: [lane, column, 1]."""
    tile = lanes.tile(1, numbers.dtype)
    for first, start, count in lanes.quadrants():
        transfer(
            tile[first : first + QUADRANT, 0:count, 0],
            numbers.ap(pattern=[[0, QUADRANT], [1, count]], offset=lanes.start + start),
            STATIC,
        )
    return tile.reshape((lanes.height, lanes.columns))


def keys_on_lanes(lanes, qkv):
    """Elements of queries and keys of the rows that lanes have: [lane, column, queries and keys, row]."""
    heads, rows = 2 * lanes.key_heads, lanes.rows
    tile = lanes.tile(heads * rows, qkv.dtype)
    shape = (lanes.height, lanes.columns, heads, rows)
    result = tile.reshape(shape)
    width = qkv.shape[1]
    for first, start, count in lanes.quadrants():
        pattern = [[rows, lanes.parts], [width, count], [lanes.depth, heads], [1, rows]]
        source = qkv.ap(pattern=pattern, offset=(lanes.start + start) * width)
        for head in range(first, first + QUADRANT, lanes.lanes):
            transfer(result[head : head + lanes.parts, 0:count, :, :], source, STATIC)
    return result


def decays_on_lanes(lanes, grown, masks):
    """Decays [128, sequence, head] of each lane's own heads: [lane, column, round]."""
    tile = lanes.tile(lanes.heads // lanes.share, nl.float32)
    for first, start, count in lanes.quadrants():
        end = first + QUADRANT
        target = tile[first:end, 0:count, :]
        each = grown[first:end, start : start + count, :]
        if lanes.share == 1:
            nisa.tensor_copy(dst=target, src=each)
            continue
        nisa.tensor_scalar(
            dst=target, data=each[:, :, 0 : lanes.heads : 2], op0=nl.multiply, operand0=masks[0][first:end, :]
        )
        nisa.scalar_tensor_tensor(
            dst=target,
            data=each[:, :, 1 : lanes.heads : 2],
            op0=nl.multiply,
            operand0=masks[1][first:end, :],
            op1=nl.add,
            operand1=target,
        )
    return tile
