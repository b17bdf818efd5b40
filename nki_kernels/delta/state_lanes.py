"""Layout of the states of a decode step: four sequences at a time, each in a quadrant of the partitions.

A matmul over the partitions of a quadrant reads one sequence, so no undefined number of another one reaches it. Two
heads with the same key share a quadrant, 16 lanes each. A lane has some neighbouring rows of a head's state, which are
contiguous in HBM: one indirect DMA moves several heads of four sequences, in pieces of 4 KiB for heads of 128.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass
class Lanes(nl.NKIObject):
    """Sizes of states [slots, heads, depth, width], and the lanes that hold those of some sequences.

    A quadrant has `heads_per_quadrant` heads of `lanes_per_head` lanes. The first `filled_lanes` lanes of a head have
    `rows` rows of its state each; filled_lanes divides the depth. Quadrant i has the sequences i * columns … of these
    `sequences`, of which the first is `first_sequence`.
    """

    slots: int
    heads: int
    depth: int
    width: int
    key_heads: int
    first_sequence: int
    sequences: int
    heads_per_quadrant: int
    lanes_per_head: int
    filled_lanes: int
    rows: int
    columns: int

    def height(self):
        """Return the partitions of a tile of all quadrants."""
        return QUADRANT * blocks(self.sequences, self.columns)

    def pieces(self):
        """Return the pieces of a slot: one for each filled lane of all heads."""
        return self.heads * self.filled_lanes

    def quadrants(self):
        """Return the sequences of all quadrants: (first partition, first sequence, number of sequences)."""
        result = []
        for first, end in ranges(0, self.sequences, self.columns):
            result.append((len(result) * QUADRANT, first, end - first))
        return result

    def key_head(self, head):
        """Return the key head of a head."""
        return head * self.key_heads // self.heads

    def tile(self, size, dtype):
        """Return a tile [lane, column, size]; zeros where a lane has no sequence in the last column, or no rows."""
        result = nl.ndarray((self.height(), self.columns, size), dtype=dtype, buffer=nl.sbuf)
        if self.filled_lanes < self.lanes_per_head or self.sequences % self.columns != 0:
            nisa.memset(dst=result, value=0)
        return result

    def view_rounds(self, states, first_pieces, group, first, count):
        """Return `count` rounds of a group's states in HBM, [lane, round, element].

        first_pieces: [lane, column] int32, the first piece of a lane's sequence in slots, with the lane's offset.
        """
        piece = self.rows * self.width
        flat = states.reshape((self.slots * self.pieces(), piece))
        # A round has the filled lanes of the heads of a quadrant, whose pieces follow one another in HBM.
        step = self.heads_per_quadrant * self.filled_lanes * piece
        lanes, column = group.lanes(), group.column
        return flat.ap(
            pattern=[[piece, lanes], [step, count], [1, piece]],
            offset=group.heads[0] * self.filled_lanes * piece + first * step,
            vector_offset=first_pieces[0:lanes, column : column + 1],
        )


@dataclass
class StateGroup(nl.NKIObject):
    """The states that one DMA moves: those of up to four sequences, of heads (first, end).

    column: of the lanes. sequences: a slice of the sequences of `Lanes`; members: their number. key_heads: (first,
    end).
    """

    column: int
    sequences: slice
    members: int
    heads: tuple
    key_heads: tuple

    def lanes(self):
        """Return the number of its lanes."""
        return self.members * QUADRANT


def plan_lanes(states, first_sequence, end_sequence, key_heads):
    """Return the lanes of states [slots, heads, depth, width] of sequences first … end."""
    slots, heads, depth, width = states.shape
    sequences = end_sequence - first_sequence
    # Lanes of both heads of a quadrant hold one key: only an even number of heads per key makes such pairs.
    heads_per_quadrant = 2 if heads // key_heads % 2 == 0 else 1
    lanes_per_head = QUADRANT // heads_per_quadrant
    filled_lanes = min(lanes_per_head, depth)
    # One pattern of a DMA describes all filled lanes, so each has as many rows.
    while depth % filled_lanes != 0:
        filled_lanes = filled_lanes - 1
    lanes = Lanes(
        slots,
        heads,
        depth,
        width,
        key_heads,
        first_sequence,
        sequences,
        heads_per_quadrant,
        lanes_per_head,
        filled_lanes,
        rows=depth // filled_lanes,
        columns=blocks(sequences, SEQUENCES),
    )
    # A skipped number may be three times as large as all pieces; float32, which computes it, is exact to 2^24.
    most = 2**24 // (3 * lanes.pieces())
    assert slots <= most, f"states of {heads} heads lie in at most {most} slots, not {slots}"
    return lanes


def state_groups(lanes):
    """Return the groups of all states: four sequences, up to four rounds of heads."""
    groups = []
    heads = ROUNDS * lanes.heads_per_quadrant
    for first, end in ranges(0, lanes.heads, heads):
        for column in range(lanes.columns):
            members = blocks(lanes.sequences - column, lanes.columns)
            sequences = slice(column, lanes.sequences, lanes.columns)
            key_heads = (lanes.key_head(first), lanes.key_head(end - 1) + 1)
            groups.append(StateGroup(column, sequences, members, (first, end), key_heads))
    return groups


def lane_offsets(lanes):
    """Return what each lane adds to its sequence's first piece, [128, 1] float32; and masks of two heads.

    A lane without rows gets a piece beyond all slots, which a DMA skips. The masks of two heads in a quadrant, each
    [128, 1] float32, have ones in the head's lanes; there are none for one head.
    """
    within = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, 1]], channel_multiplier=1)
    # The low five bits of a partition are the lane in its quadrant.
    nisa.tensor_scalar(dst=within, data=within, op0=nl.bitwise_and, operand0=QUADRANT - 1)
    # A column operand of tensor_scalar is float32, so the integers are copied to it.
    offsets = column_like(within)
    nisa.tensor_copy(dst=offsets, src=within)
    masks = []
    if lanes.heads_per_quadrant == 2:
        for op in (nl.less, nl.greater_equal):
            mask = column_like(offsets)
            nisa.tensor_scalar(dst=mask, data=offsets, op0=op, operand0=float(lanes.lanes_per_head))
            masks.append(mask)
    if lanes.filled_lanes < lanes.lanes_per_head:
        lane_of_head = offsets
        if lanes.heads_per_quadrant == 2:
            lane_of_head = plus_second(masks, -lanes.lanes_per_head, offsets)
            # Pieces of two heads follow one another in HBM, without the first head's empty lanes between them.
            offsets = plus_second(masks, lanes.filled_lanes - lanes.lanes_per_head, offsets)
        beyond = column_like(lane_of_head)
        nisa.tensor_scalar(
            dst=beyond,
            data=lane_of_head,
            op0=nl.greater_equal,
            operand0=float(lanes.filled_lanes),
            op1=nl.multiply,
            operand1=float(lanes.slots * lanes.pieces()),
        )
        nisa.tensor_tensor(dst=offsets, data1=offsets, data2=beyond, op=nl.add)
    return offsets, masks


def column_like(tile):
    """Allocate a float32 tile of the same shape."""
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def plus_second(masks, number, column):
    """Return numbers [128, 1], with `number` added for lanes of the second head."""
    result = column_like(column)
    nisa.scalar_tensor_tensor(
        dst=result, data=masks[1], op0=nl.multiply, operand0=float(number), op1=nl.add, operand1=column
    )
    return result


def first_pieces(lanes, state_slots, starts, offsets):
    """Return the first pieces of all lanes that are read, and those that are written: [lane, column] int32 twice.

    A sequence that starts at 0 reads beyond the last slot, which the DMA skips.
    """
    slots = load_on_quadrants(lanes, state_slots)
    fresh = load_on_quadrants(lanes, starts)
    pieces = lanes.pieces()
    beyond = float(lanes.slots * pieces)
    nisa.tensor_scalar(dst=fresh, data=fresh, op0=nl.equal, operand0=0, op1=nl.multiply, operand1=beyond)
    written = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=written,
        data=slots,
        op0=nl.multiply,
        operand0=float(pieces),
        op1=nl.add,
        operand1=offsets[0 : lanes.height(), :],
    )
    read = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    # Integers alone would be added by GpSimd; the sum is below 2^24, so the Vector engine is exact as well.
    nisa.tensor_tensor(dst=read, data1=written, data2=fresh, op=nl.add, engine=nisa.engine.vector)
    return read, written


def load_on_quadrants(lanes, numbers):
    """Load numbers of sequences [B, 1] to all partitions of their quadrants: [lane, column]."""
    tile = lanes.tile(1, numbers.dtype)
    for first, start, count in lanes.quadrants():
        # A step of 0 repeats each number on the 32 partitions of its quadrant.
        transfer(
            tile[first : first + QUADRANT, 0:count, 0],
            numbers.ap(pattern=[[0, QUADRANT], [1, count]], offset=lanes.first_sequence + start),
            STATIC,
        )
    return tile.reshape((lanes.height(), lanes.columns))


def load_keys(lanes, qkv):
    """Load the elements of queries and keys of the lanes' rows: [lane, column, queries and keys, row]."""
    heads, rows = 2 * lanes.key_heads, lanes.rows
    tile = lanes.tile(heads * rows, qkv.dtype)
    shape = (lanes.height(), lanes.columns, heads, rows)
    result = tile.reshape(shape)
    width = qkv.shape[1]
    for first, start, count in lanes.quadrants():
        pattern = [[rows, lanes.filled_lanes], [width, count], [lanes.depth, heads], [1, rows]]
        source = qkv.ap(pattern=pattern, offset=(lanes.first_sequence + start) * width)
        # Both heads of a quadrant have the same key, so their lanes load the same elements.
        for lane in range(first, first + QUADRANT, lanes.lanes_per_head):
            transfer(result[lane : lane + lanes.filled_lanes, 0:count, :, :], source, STATIC)
    return result


def decays_on_lanes(lanes, decays, masks):
    """Return the decays [128, sequence, head] of the lanes' heads: [lane, column, round]."""
    tile = lanes.tile(lanes.heads // lanes.heads_per_quadrant, nl.float32)
    for first, start, count in lanes.quadrants():
        end = first + QUADRANT
        target = tile[first:end, 0:count, :]
        source = decays[first:end, start : start + count, :]
        if lanes.heads_per_quadrant == 1:
            nisa.tensor_copy(dst=target, src=source)
            continue
        # The second head begins at lane 16, where no instruction may start: masks select the lanes of each.
        nisa.tensor_scalar(
            dst=target,
            data=source[:, :, 0 : lanes.heads : 2],
            op0=nl.multiply,
            operand0=masks[0][first:end, :],
        )
        nisa.scalar_tensor_tensor(
            dst=target,
            data=source[:, :, 1 : lanes.heads : 2],
            op0=nl.multiply,
            operand0=masks[1][first:end, :],
            op1=nl.add,
            operand1=target,
        )
    return tile
