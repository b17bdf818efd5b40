"""States of sequences: in slots of HBM, whose numbers are read at run time, and in SBUF by pairs of heads.

`gated_delta` keeps the states [depth, width] of a sequence's heads in SBUF from its first chunk to its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import load, ranges

PAIR = 2
"""Heads whose products with the state share a tile of PSUM."""


@dataclass
class SlotNumbers(nl.NKIObject):
    """The slots that sequences write and those that they read: SBUF tiles [1, B] int32."""

    written: nl.NkiTensor
    read: nl.NkiTensor


def load_slot_numbers(state_slots, starts, slots):
    """Return the SlotNumbers of all sequences: loads state_slots and starts, [B, 1] int32 in HBM, to rows in SBUF.

    A sequence whose start is 0 reads slot number state_slot + `slots`. It is beyond the last slot, so that
    the DMA skips it.

    Args:
        slots: the number of all slots.
    """
    sequences = starts.shape[0]
    written = load(state_slots.reshape((1, sequences)), nl.int32)
    fresh = load(starts.reshape((1, sequences)), nl.int32)
    nisa.tensor_scalar(dst=fresh, data=fresh, op0=nl.equal, operand0=0, op1=nl.multiply, operand1=slots)
    read = nl.ndarray(written.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=read, data1=written, data2=fresh, op=nl.add)
    return SlotNumbers(written, read)


def view_state(states, number, heads):
    """Return a view of the state of heads (first, end) in a slot of `states`: [depth, heads, width] in HBM.

    Args:
        number: the slot, a tile [1, 1] int32 in SBUF, read at run time.
    """
    depth, width = states.shape[2], states.shape[3]
    first, end = heads
    return states.ap(
        pattern=[[width, depth], [depth * width, end - first], [1, width]],
        offset=first * depth * width,
        scalar_offset=number,
        indirect_dim=0,
    )


@dataclass
class StatePair(nl.NKIObject):
    """States [depth, head, width] of up to two heads in SBUF: `wide` float32, `narrow` in the dtype of products.

    In float32 launches both are the same tile.
    """

    wide: nl.NkiTensor
    narrow: nl.NkiTensor


def build_state_pair(wide, dtype):
    """Return a StatePair: the tile `wide` itself in float32, and a new copy of it in SBUF of a dtype.

    For dtype float32 no copy is made; `wide` is both.
    """
    if dtype == nl.float32:
        return StatePair(wide, wide)
    narrow = nl.ndarray(wide.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=narrow, op=nl.copy, data=wide)
    return StatePair(wide, narrow)


@dataclass
class SequenceState(nl.NKIObject):
    """The state of heads (first, end) of a sequence.

    pairs: a StatePair for every two heads; an empty list until the state is loaded.
    """

    sequence: int
    heads: tuple
    pairs: list

    def load(self, arguments, slots):
        """Load the state from its slot in HBM, and append its StatePairs to `pairs`; does nothing if it is loaded.

        A sequence that starts at position 0, whose slot number is beyond all slots, gets zeros.

        Args:
            slots: the SlotNumbers of all sequences.
        """
        if len(self.pairs) > 0:
            return
        states, heads = arguments.states, self.heads[1] - self.heads[0]
        tile = nl.ndarray((states.shape[2], heads, states.shape[3]), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
        source = view_state(states, slots.read[0:1, self.sequence : self.sequence + 1], self.heads)
        nisa.dma_copy(dst=tile, src=source, oob_mode=nisa.oob_mode.skip)
        for first, end in ranges(0, heads, PAIR):
            self.pairs.append(build_state_pair(tile[:, first:end, :], arguments.qkv.dtype))

    def store(self, states, slots):
        """Store the float32 states of all heads to the sequence's slot of `states` in HBM.

        Args:
            slots: the SlotNumbers of all sequences.
        """
        number = slots.written[0:1, self.sequence : self.sequence + 1]
        bounds = ranges(self.heads[0], self.heads[1], PAIR)
        for i in range(len(bounds)):  # i: pair
            transfer(view_state(states, number, bounds[i]), self.pairs[i].wide, SCALAR)
