"""Random generators of the Vector and GpSimd engines: each partition has a generator of its own, here called a lane.

Which generators the chips have is documented (a linear feedback shift register in the Vector engine before gen4, XORWOW
in GpSimd and in gen4's Vector engine). Their bit streams, the way one seed reaches 128 lanes and the power-on state are
not documented. So published generators of these names are used, and only distribution and repeatability agree with a
chip:

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
def spread_seed(seed: int, lanes: int, words: int) -> Words:
    """Return the generator state that a seed gives, uint32 [lanes, words]: different in every lane and never zero.

    Args:
        seed: The seed, of which the lower 32 bits count.
        lanes: Number of lanes, which are partitions.
        words: 32-bit words of state per lane.
    """
    mixed = np.arange(1, lanes * words + 1, dtype=np.uint32).reshape(lanes, words)
    mixed = mixed * np.uint32(0x9E3779B9) + np.uint32(seed & 0xFFFFFFFF) * np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return np.where(mixed == 0, np.uint32(0x6C078965), mixed)


def advance_lfsr(state: Words, count: int) -> tuple[Words, Words]:
    """Return `count` random words of each lane, uint32 [lanes, count], and the shift registers afterwards, [lanes, 1].

    A step is linear over GF(2), so 32·2^k steps are one table lookup per byte: the words are made by doubling the known
    words instead of one by one. `state` is not changed.

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
def advance_xorwow(state: Words, count: int) -> tuple[Words, Words]:
    """Return `count` random words of each lane, uint32 [lanes, count], and the state afterwards.

    The state afterwards has the shape of `state`, which is not changed. The g generators of a lane advance together:
    word i of a lane comes from generator i % g.

    Args:
        state: The six words of each generator one after the other, uint32 [lanes, 6 * g].
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


def scale_to_unit_interval(words: Words) -> NDArray[np.float32]:
    """Return random words as float32 numbers uniform on [0, 1): the upper 24 bits of each word times 2**-24, exact."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _apply(tables: Words, words: Words) -> Words:
    """Return words after a linear map over GF(2).

    Args:
        tables: Images [4, 256] of the map: row b has the image of each value of byte b, byte 0 being the lowest.
        words: The words, uint32 of any shape.
    """
    image = tables[0][words & 0xFF]
    for byte in range(1, 4):
        image ^= tables[byte][(words >> np.uint32(8 * byte)) & 0xFF]
    return image


@cache
def _lfsr_word() -> Words:
    """Return the table [4, 256] with which `_apply` advances a shift register by 32 steps, which is one random word.

    Each step shifts the parity of the bits 32, 22, 2 and 1 (counted from 1, the lowest) in from below.
    """
    images = np.stack([_BYTES << np.uint32(8 * byte) for byte in range(4)])
    one = np.uint32(1)
    for _ in range(32):
        bit = (images >> np.uint32(31)) ^ (images >> np.uint32(21)) ^ (images >> one) ^ images
        images = (images << one) | (bit & one)
    return images
