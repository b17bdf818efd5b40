"""States of sequences: in slots of HBM, whose numbers are read at run time, and in SBUF by pairs of heads."""

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
    """The slots that sequences write and those that they read, rows [1, B] int32."""

    written: nl.NkiTensor
    read: nl.NkiTensor


def slot_numbers(state_slots, starts, slots):
    """Return the slots of sequences [B, 1], of `slots` in all.

    A sequence that starts at 0 reads a number beyond the last slot, which the DMA skips.
    """
    sequences = starts.shape[0]
    written = load(state_slots.reshape((1, sequences)), nl.int32)
    fresh = load(starts.reshape((1, sequences)), nl.int32)
    nisa.tensor_scalar(dst=fresh, data=fresh, op0=nl.equal, operand0=0, op1=nl.multiply, operand1=slots)
    read = nl.ndarray(written.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=read, data1=written, data2=fresh, op=nl.add)
    return SlotNumbers(written, read)


def view_state(states, number, heads):
    """Return a view of heads (first, end) of the state of a slot, [depth, heads, width] in HBM."""
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
    """States [depth, head, width] of up to two heads: in float32, and in the dtype of products."""

    wide: nl.NkiTensor
    narrow: nl.NkiTensor


def pair_states(wide, dtype):
    """Return a StatePair of states in float32, with a copy of them in the dtype of products."""
    if dtype == nl.float32:
        return StatePair(wide, wide)
    narrow = nl.ndarray(wide.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=narrow, op=nl.copy, data=wide)
    return StatePair(wide, narrow)


@dataclass
class SequenceState(nl.NKIObject):
    """The state of heads (first, end) of a sequence: a StatePair for every two heads, none until it is loaded."""

    sequence: int
    heads: tuple
    pairs: list

    def load(self, arguments, slots):
        """Load the state from its slot, if it is not loaded; zeros if there is no such slot."""
        if len(self.pairs) > 0:
            return
        states, heads = arguments.states, self.heads[1] - self.heads[0]
        tile = nl.ndarray((states.shape[2], heads, states.shape[3]), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
        source = view_state(states, slots.read[0:1, self.sequence : self.sequence + 1], self.heads)
        nisa.dma_copy(dst=tile, src=source, oob_mode=nisa.oob_mode.skip)
        for first, end in ranges(0, heads, PAIR):
            self.pairs.append(pair_states(tile[:, first:end, :], arguments.qkv.dtype))

    def store(self, states, slots):
        """Store the state to its slot."""
        number = slots.written[0:1, self.sequence : self.sequence + 1]
        bounds = ranges(self.heads[0], self.heads[1], PAIR)
        for i in range(len(bounds)):  # i: pair
            transfer(view_state(states, number, bounds[i]), self.pairs[i].wide, SCALAR)
