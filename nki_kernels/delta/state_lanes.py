"""Layout of the states of a decode step: four sequences at a time, each in a quadrant of the partitions.

`gated_delta_step` holds states [depth, width] of several heads this way. A quadrant is 32 partitions. A
matmul over the partitions of a quadrant reads one sequence, so no undefined number of another one reaches it.
Two heads with the same key share a quadrant, 16 partitions (lanes) each. A lane has some neighbouring rows of
a head's state, a piece, which is contiguous in HBM: one indirect DMA moves several heads of four sequences,
in pieces of 4 KiB for heads of 128.

More than four sequences follow one another in columns: quadrant i has sequences i * columns … of those that
are taken together. A round is the head, or the two heads, that each quadrant has at a time. A group is the
states that one DMA moves: one column, up to four rounds.
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
"""Sequences that one DMA moves."""

ROUNDS = BANK // PARTITIONS
"""Rounds that one DMA moves at most: what their heads write fills a PSUM bank."""


@dataclass
class Lanes(nl.NKIObject):
    """Sizes of states [slots, heads, depth, width], and the lanes that hold the states of some sequences.

    A lane is a partition. A quadrant (32 partitions) has `heads_per_quadrant` heads of `lanes_per_head`
    lanes. The first `filled_lanes` lanes of a head have `rows` rows of its state each; filled_lanes divides
    the depth. Quadrant i has the sequences i * columns … of the `sequences` from `first_sequence` on.
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

    def count_partitions(self):
        """Return the number of partitions of a tile that has all sequences: 32 for each quadrant in use, up to 128."""
        return QUADRANT * blocks(self.sequences, self.columns)

    def count_pieces(self):
        """Return the number of pieces of a slot in HBM: `heads` * `filled_lanes`.

        A piece is the neighbouring rows of a head's state that one lane (partition) holds.
        """
        return self.heads * self.filled_lanes

    def list_quadrants(self):
        """Return a list of (first partition, first sequence, number of sequences), an entry for each quadrant in use.

        A quadrant is 32 partitions. Sequences count from 0, relative to `first_sequence`.
        """
        result = []
        for first, end in ranges(0, self.sequences, self.columns):
            result.append((len(result) * QUADRANT, first, end - first))
        return result

    def find_key_head(self, head):
        """Return the index of the key head whose keys and queries value head `head` uses."""
        return head * self.key_heads // self.heads

    def allocate_tile(self, size, dtype):
        """Allocate an SBUF tile [lane, column, size] of a dtype; a column has one sequence in each quadrant.

        It is filled with zeros if some lanes (partitions) have no rows of a state or some quadrants fewer
        sequences than columns; else it has no contents.
        """
        result = nl.ndarray((self.count_partitions(), self.columns, size), dtype=dtype, buffer=nl.sbuf)
        if self.filled_lanes < self.lanes_per_head or self.sequences % self.columns != 0:
            nisa.memset(dst=result, value=0)
        return result

    def view_rounds(self, states, first_pieces, group, first, count):
        """Return a view of rounds first … first + count - 1 of a group's states in HBM: [lane, round, element].

        A round is the heads of a quadrant that are moved together; rounds count from the group's first one.

        Args:
            states: the whole tensor, [slots, heads, depth, width].
            first_pieces: [lane, column] int32 in SBUF, the index of the first piece of a lane's sequence in
                HBM plus the lane's offset, from `compute_first_pieces`. An index beyond all pieces marks a
                lane to be skipped.
        """
        piece = self.rows * self.width
        flat = states.reshape((self.slots * self.count_pieces(), piece))
        # A round has the filled lanes of the heads of a quadrant, whose pieces follow one another in HBM.
        step = self.heads_per_quadrant * self.filled_lanes * piece
        lanes, column = group.count_lanes(), group.column
        return flat.ap(
            pattern=[[piece, lanes], [step, count], [1, piece]],
            offset=group.heads[0] * self.filled_lanes * piece + first * step,
            vector_offset=first_pieces[0:lanes, column : column + 1],
        )


@dataclass
class StateGroup(nl.NKIObject):
    """The states that one DMA moves: up to four sequences, and heads (first, end) of each.

    column: of the lanes. sequences: a slice of the sequences of `Lanes`; members: their number. key_heads:
    (first, end) of the heads' keys.
    """

    column: int
    sequences: slice
    members: int
    heads: tuple
    key_heads: tuple

    def count_lanes(self):
        """Return the number of partitions that the group's states take: 32 for each of its sequences."""
        return self.members * QUADRANT


def plan_lanes(states, first_sequence, end_sequence, key_heads):
    """Return the `Lanes` for sequences first_sequence … end_sequence - 1 of states [slots, heads, depth, width].

    Raises:
        AssertionError: there are so many slots that float32 does not hold the indices of pieces exactly.
    """
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
    most = 2**24 // (3 * lanes.count_pieces())
    assert slots <= most, (
        f"states of {heads} heads lie in at most {most} slots, not {slots}: "
        "the indices of their pieces must be exact in float32; pass fewer slots"
    )
    return lanes


def plan_groups(lanes):
    """Return the list of StateGroups of all sequences and heads, each the states that one DMA moves.

    A group has up to four sequences, one in each quadrant, and up to four rounds of heads. All sequences of
    the first heads come before the next heads.
    """
    groups = []
    heads = ROUNDS * lanes.heads_per_quadrant
    for first, end in ranges(0, lanes.heads, heads):
        for column in range(lanes.columns):
            members = blocks(lanes.sequences - column, lanes.columns)
            sequences = slice(column, lanes.sequences, lanes.columns)
            key_heads = (lanes.find_key_head(first), lanes.find_key_head(end - 1) + 1)
            groups.append(StateGroup(column, sequences, members, (first, end), key_heads))
    return groups


def compute_lane_offsets(lanes):
    """Return (offsets, masks): the index of each lane's piece of a state, and masks of the two heads of a quadrant.

    Both are new float32 SBUF tiles [128, 1]. A lane is a partition, and a piece the neighbouring rows of a
    state that it holds. The offset is the index of the lane's piece among the pieces of its quadrant. A lane
    without rows gets an index beyond the pieces of all slots, which a DMA skips. masks is a list: for two
    heads in a quadrant a tile for each head, with ones in its lanes and zeros elsewhere; empty for one head.
    """
    within = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=within, pattern=[[0, 1]], channel_multiplier=1)
    # The low five bits of a partition are the lane in its quadrant.
    nisa.tensor_scalar(dst=within, data=within, op0=nl.bitwise_and, operand0=QUADRANT - 1)
    # A column operand of tensor_scalar is float32, so the integers are copied to it.
    offsets = allocate_like(within)
    nisa.tensor_copy(dst=offsets, src=within)
    masks = []
    if lanes.heads_per_quadrant == 2:
        for op in (nl.less, nl.greater_equal):
            mask = allocate_like(offsets)
            nisa.tensor_scalar(dst=mask, data=offsets, op0=op, operand0=float(lanes.lanes_per_head))
            masks.append(mask)
    if lanes.filled_lanes < lanes.lanes_per_head:
        lane_of_head = offsets
        if lanes.heads_per_quadrant == 2:
            lane_of_head = add_to_second_head(masks, -lanes.lanes_per_head, offsets)
            # Pieces of two heads follow one another in HBM, without the first head's empty lanes between them.
            offsets = add_to_second_head(masks, lanes.filled_lanes - lanes.lanes_per_head, offsets)
        beyond = allocate_like(lane_of_head)
        nisa.tensor_scalar(
            dst=beyond,
            data=lane_of_head,
            op0=nl.greater_equal,
            operand0=float(lanes.filled_lanes),
            op1=nl.multiply,
            operand1=float(lanes.slots * lanes.count_pieces()),
        )
        nisa.tensor_tensor(dst=offsets, data1=offsets, data2=beyond, op=nl.add)
    return offsets, masks


def allocate_like(tile):
    """Allocate a float32 SBUF tile of a tile's shape, without contents."""
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def add_to_second_head(masks, number, column):
    """Return a copy of `column` [128, 1] float32 with `number` added for the lanes of the second head of a quadrant.

    Args:
        masks: from `compute_lane_offsets`, of two heads.
    """
    result = allocate_like(column)
    nisa.scalar_tensor_tensor(
        dst=result, data=masks[1], op0=nl.multiply, operand0=float(number), op1=nl.add, operand1=column
    )
    return result


def compute_first_pieces(lanes, state_slots, starts, offsets):
    """Return (read, written): the index in HBM of the piece from which each lane's states are read and written.

    Both are new SBUF tiles [lane, column] int32. A piece is the neighbouring rows of a state that one lane
    (partition) holds; pieces count over all slots. A sequence whose start is 0 reads indices beyond all
    pieces: the DMA skips them, so that its state stays zeros.

    Args:
        state_slots: [B, 1] int32 in HBM, as are starts.
        offsets: from `compute_lane_offsets`.
    """
    slots = load_on_quadrants(lanes, state_slots)
    fresh = load_on_quadrants(lanes, starts)
    pieces = lanes.count_pieces()
    beyond = float(lanes.slots * pieces)
    nisa.tensor_scalar(dst=fresh, data=fresh, op0=nl.equal, operand0=0, op1=nl.multiply, operand1=beyond)
    written = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=written,
        data=slots,
        op0=nl.multiply,
        operand0=float(pieces),
        op1=nl.add,
        operand1=offsets[0 : lanes.count_partitions(), :],
    )
    read = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    # Integers alone would be added by GpSimd; the sum is below 2^24, so the Vector engine is exact as well.
    nisa.tensor_tensor(dst=read, data1=written, data2=fresh, op=nl.add, engine=nisa.engine.vector)
    return read, written


def load_on_quadrants(lanes, numbers):
    """Load numbers [B, 1] of HBM, one of each sequence, to all 32 partitions of the sequence's quadrant.

    Returns a new SBUF tile [partition, column] of their dtype, where a column has one sequence in each
    quadrant.
    """
    tile = lanes.allocate_tile(1, numbers.dtype)
    for first, start, count in lanes.list_quadrants():
        # A step of 0 repeats each number on the 32 partitions of its quadrant.
        transfer(
            tile[first : first + QUADRANT, 0:count, 0],
            numbers.ap(pattern=[[0, QUADRANT], [1, count]], offset=lanes.first_sequence + start),
            STATIC,
        )
    return tile.reshape((lanes.count_partitions(), lanes.columns))


def load_keys(lanes, qkv):
    """Load for each lane the elements of queries and keys that belong to its rows of the states.

    Returns a new SBUF tile [lane, column, head, row] in qkv's dtype, where a column has one sequence in each
    quadrant. The heads are the key heads of the queries, and then those of the keys. qkv is [T, .] in HBM.
    Lanes without rows have zeros.
    """
    heads, rows = 2 * lanes.key_heads, lanes.rows
    tile = lanes.allocate_tile(heads * rows, qkv.dtype)
    shape = (lanes.count_partitions(), lanes.columns, heads, rows)
    result = tile.reshape(shape)
    width = qkv.shape[1]
    for first, start, count in lanes.list_quadrants():
        pattern = [[rows, lanes.filled_lanes], [width, count], [lanes.depth, heads], [1, rows]]
        source = qkv.ap(pattern=pattern, offset=(lanes.first_sequence + start) * width)
        # Both heads of a quadrant have the same key, so their lanes load the same elements.
        for lane in range(first, first + QUADRANT, lanes.lanes_per_head):
            transfer(result[lane : lane + lanes.filled_lanes, 0:count, :, :], source, STATIC)
    return result


def spread_decays(lanes, decays, masks):
    """Return for each lane the decay of the head whose rows it has: a new float32 SBUF tile [lane, column, round].

    A column has one sequence in each quadrant, and a round one or two heads.

    Args:
        decays: [128, sequence, head] float32, the same on all partitions.
        masks: from `compute_lane_offsets`.
    """
    tile = lanes.allocate_tile(lanes.heads // lanes.heads_per_quadrant, nl.float32)
    for first, start, count in lanes.list_quadrants():
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
