"""Chains of tensor_scalar on 32-bit words, whose times tell whether bit operations stream two words per cycle.

`stream_copies` loads words and stores them. `stream_bits` passes them through LENGTH instructions with bitvec
operators in between, `stream_products` through as many multiplications in float32, which traces of gen3 show at 1.6
to 2 elements per cycle. The difference of two times over LENGTH is the time of one instruction.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

LENGTH = 255
"""Instructions of a chain: enough for half a millisecond, beside which the start of a launch is short."""
WITHOUT_SIGN = 0x7FFFFFFF


@nki.jit
def stream_bits(words):
    """Return words after LENGTH instructions: xor with the step's pattern and masks, then shifts to the left and back.

    Args:
        words: [P, F] @ HBM, int32, P at most 128.

    Returns:
        [P, F] @ shared HBM, int32, without the sign bit.
    """
    tile = load_words(words)
    for step in range(LENGTH):
        if step % 2 == 0:
            nisa.tensor_scalar(
                dst=tile,
                data=tile,
                op0=nl.bitwise_xor,
                operand0=compute_pattern(step),
                op1=nl.bitwise_and,
                operand1=WITHOUT_SIGN,
            )
        else:
            nisa.tensor_scalar(
                dst=tile, data=tile, op0=nl.left_shift, operand0=1, op1=nl.right_shift, operand1=1
            )
    return store_words(tile)


@nki.jit
def stream_products(words):
    """Return words times -2 after LENGTH multiplications, by -2 and -0.5 in turn: exact in float32.

    Args:
        words: [P, F] @ HBM, float32, P at most 128.

    Returns:
        [P, F] @ shared HBM, float32.
    """
    tile = load_words(words)
    for step in range(LENGTH):
        factor = -2.0 if step % 2 == 0 else -0.5
        nisa.tensor_scalar(
            dst=tile, data=tile, op0=nl.multiply, operand0=factor, op1=nl.multiply, operand1=1.0
        )
    return store_words(tile)


@nki.jit
def stream_copies(words):
    """Return a copy of words [P, F] @ HBM in shared HBM, by way of SBUF: what the chains take besides their chain."""
    return store_words(load_words(words))


def compute_pattern(step):
    """Return the pattern of 31 bits that an instruction of `stream_bits` combines with the words."""
    return (step + 1) * 0x01010101 % WITHOUT_SIGN


def load_words(words):
    """Load an array [P, F] of HBM into a new SBUF tile of its dtype."""
    tile = nl.ndarray(words.shape, dtype=words.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=words)
    return tile


def store_words(tile):
    """Store an SBUF tile to a new array in shared HBM and return the array."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def stream_bits_reference(words):
    """Return what `stream_bits` returns: the shifts change nothing without a sign bit."""
    pattern = 0
    for step in range(0, LENGTH, 2):
        pattern ^= compute_pattern(step)
    return (words ^ np.int32(pattern)) & np.int32(WITHOUT_SIGN)


def stream_products_reference(words):
    """Return what `stream_products` returns."""
    return -2 * words


def stream_copies_reference(words):
    """Return a copy of the words."""
    return words.copy()
