"""States of sequences on their way between HBM and SBUF, in slots whose numbers are read at run time."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.experts.indices import load_indices


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
    written = load_indices(state_slots.reshape((1, sequences)))
    fresh = load_indices(starts.reshape((1, sequences)))
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


def load_state(states, number, heads):
    """Load heads (first, end) of the state of a slot, float32; zeros if there is no such slot."""
    first, end = heads
    tile = nl.ndarray((states.shape[2], end - first, states.shape[3]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=tile, src=view_state(states, number, heads), oob_mode=nisa.oob_mode.skip)
    return tile


def store_state(states, number, heads, tile):
    """Store heads (first, end) of the state of a slot."""
    transfer(view_state(states, number, heads), tile, SCALAR)
