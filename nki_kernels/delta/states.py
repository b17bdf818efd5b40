"""States of sequences on their way between HBM and SBUF, in slots whose numbers are read at run time."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.experts.indices import load_indices


def state_numbers(state_slots, starts, slots):
    """Two rows [1, B] int32: the slot that each sequence writes, and the slot that it reads.

    A sequence that starts at 0 reads a number beyond the last slot, which the DMA skips.
    """
    sequences = starts.shape[0]
    written = load_indices(state_slots.reshape((1, sequences)))
    fresh = load_indices(starts.reshape((1, sequences)))
    nisa.tensor_scalar(dst=fresh, data=fresh, op0=nl.equal, operand0=0, op1=nl.multiply, operand1=slots)
    read = nl.ndarray(written.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=read, data1=written, data2=fresh, op=nl.add)
    return {"written": written, "read": read}


def state_in(states, number, heads):
    """Some heads of the state of a slot, [depth, heads, width] in HBM."""
    depth, width = states.shape[2], states.shape[3]
    first, end = heads
    return states.ap(
        pattern=[[width, depth], [depth * width, end - first], [1, width]],
        offset=first * depth * width,
        scalar_offset=number,
        indirect_dim=0,
    )


def load_state(case, state):
    """The state of some heads of a sequence, float32; zeros at its start."""
    states, sequence = case["states"], state["sequence"]
    first, end = state["heads"]
    tile = nl.ndarray((states.shape[2], end - first, states.shape[3]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)
    number = case["slots"]["read"][0:1, sequence : sequence + 1]
    nisa.dma_copy(dst=tile, src=state_in(states, number, state["heads"]), oob_mode=nisa.oob_mode.skip)
    return tile


def store_heads(case, state, heads, tile):
    """Write the state of some heads [first, end) of a sequence back."""
    sequence = state["sequence"]
    number = case["slots"]["written"][0:1, sequence : sequence + 1]
    transfer(state_in(case["states"], number, heads), tile, SCALAR)
