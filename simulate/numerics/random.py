"""Random generators of the Vector and GpSimd engines: one for each partition, advanced word by word.

Which generators the chips have is documented (a linear feedback shift register in the Vector engine before gen4, XORWOW
in GpSimd and in gen4's Vector engine); their bit streams, the way one seed reaches 128 lanes and the power-on state are
not. So published generators of these names are used, and only distribution and repeatability agree with a chip:

- LFSR: 32 bits, x^32 + x^22 + x^2 + x + 1 (maximal, Xilinx XAPP 052), 32 steps per word.
- XORWOW: G. Marsaglia, "Xorshift RNGs", Journal of Statistical Software 8 (2003), section 3.1: five words of xorshift
  and a counter, in the order x, y, z, w, v, d.
- One seed becomes a word per lane by the finalising mix of MurmurHash3 over (seed, lane, word), never zero.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from simulate.numerics.quiet import quiet

Words = NDArray[np.uint32]

XORWOW_WORDS = 6
_COUNTER_STEP = np.uint32(362437)
_BYTES = np.arange(256, dtype=np.uint32)


@quiet
def seeded(seed: int, lanes: int, words: int) -> Words:
    """Return the state that a 32-bit seed gives, uint32 [lanes, words], different in every lane."""
    mixed = np.arange(1, lanes * words + 1, dtype=np.uint32).reshape(lanes, words)
    mixed = mixed * np.uint32(0x9E3779B9) + np.uint32(seed & 0xFFFFFFFF) * np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return np.where(mixed == 0, np.uint32(0x6C078965), mixed)


def lfsr(state: Words, count: int) -> tuple[Words, Words]:
    """Return `count` words of each lane, and the shift registers afterwards.

    A step is linear over GF(2), so 32·2^k steps are one table lookup per byte: the words are made by doubling the known
    words instead of one by one.

    Args:
        state: The shift registers, uint32 [lanes, 1].
        count: The number of words of each lane.
    """
    words = np.empty((state.shape[0], count + 1), np.uint32)
    words[:, :1] = state
    known, jump = 1, _lfsr_word()
    while known <= count:
        more = min(known, count + 1 - known)
        words[:, known : known + more] = _apply(jump, words[:, :more])
        known += more
        jump = _apply(jump, jump)
    return words[:, 1:], words[:, -1:].copy()


@quiet
def xorwow(state: Words, count: int) -> tuple[Words, Words]:
    """Return `count` words of each lane, and the state afterwards.

    Args:
        state: The state of g generators in turn, uint32 [lanes, 6 * g].
        count: The number of words of each lane.
    """
    lanes, generators = state.shape[0], state.shape[1] // XORWOW_WORDS
    x, y, z, w, v, counter = np.moveaxis(state.reshape(lanes, generators, XORWOW_WORDS), 2, 0).copy()
    rounds = -(-count // generators)
    made = np.empty((rounds, lanes, generators), np.uint32)
    for step in range(rounds):
        x ^= x >> np.uint32(2)
        x ^= x << np.uint32(1)
        x ^= v ^ (v << np.uint32(4))
        counter = counter + _COUNTER_STEP
        np.add(counter, x, out=made[step])
        x, y, z, w, v = y, z, w, v, x
    after = np.stack((x, y, z, w, v, counter), axis=2).reshape(lanes, -1)
    return np.moveaxis(made, 0, 1).reshape(lanes, -1)[:, :count], after


def unit_interval(words: Words) -> NDArray[np.float32]:
    """Return words as float32 uniform on [0, 1): the upper 24 bits, each exact."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _apply(tables: Words, words: Words) -> Words:
    """Return words after a GF(2)-linear map, given by the images [4, 256] of each byte."""
    image = tables[0][words & 0xFF]
    for byte in range(1, 4):
        image ^= tables[byte][(words >> np.uint32(8 * byte)) & 0xFF]
    return image


@cache
def _lfsr_word() -> Words:
    """Return the images of 32 steps: each shifts in the parity of the taps 32, 22, 2 and 1 from below."""
    images = np.stack([_BYTES << np.uint32(8 * byte) for byte in range(4)])
    one = np.uint32(1)
    for _ in range(32):
        bit = (images >> np.uint32(31)) ^ (images >> np.uint32(21)) ^ (images >> one) ^ images
        images = (images << one) | (bit & one)
    return images
