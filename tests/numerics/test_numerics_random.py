"""The random generators against the scalar programs of their publications."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.numerics import random

MASK = 0xFFFFFFFF


def shift_register(word: int, count: int) -> list[int]:
    """Step x^32 + x^22 + x^2 + x + 1, bit by bit; one word per 32 steps."""
    words = []
    for _ in range(count):
        for _ in range(32):
            bit = (word >> 31 ^ word >> 21 ^ word >> 1 ^ word) & 1
            word = (word << 1 | bit) & MASK
        words.append(word)
    return words


def marsaglia(state: list[int], count: int) -> tuple[list[int], list[int]]:
    """Run xorwow as printed: t=(x^(x>>2)); x=y; y=z; z=w; w=v; v=(v^(v<<4))^(t^(t<<1)); return (d+=362437)+v."""
    x, y, z, w, v, d = state
    words = []
    for _ in range(count):
        t = x ^ x >> 2
        x, y, z, w = y, z, w, v
        v = (v ^ v << 4 ^ t ^ t << 1) & MASK
        d = d + 362437 & MASK
        words.append(d + v & MASK)
    return words, [x, y, z, w, v, d]


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 100])
def test_lfsr_is_the_shift_register(count: int) -> None:
    state = random.spread_seed(5, 4, 1)
    words, after = random.advance_lfsr(state, count)
    for lane in range(4):
        expected = shift_register(int(state[lane, 0]), count)
        assert words[lane].tolist() == expected
        assert after[lane].tolist() == expected[-1:]


@pytest.mark.parametrize("count", [1, 2, 5, 6, 50])
def test_xorwow_is_the_published_generator(count: int) -> None:
    state = random.spread_seed(6, 3, 6)
    words, after = random.advance_xorwow(state, count)
    for lane in range(3):
        expected, end = marsaglia(state[lane].tolist(), count)
        assert words[lane].tolist() == expected
        assert after[lane].tolist() == end


@pytest.mark.parametrize("count", [4, 8, 40])
def test_four_generators_take_turns(count: int) -> None:
    state = random.spread_seed(7, 2, 24)
    words, after = random.advance_xorwow(state, count)
    for generator in range(4):
        mine = slice(6 * generator, 6 * generator + 6)
        alone, end = random.advance_xorwow(state[:, mine], count // 4)
        assert np.array_equal(words[:, generator::4], alone)
        assert np.array_equal(after[:, mine], end)


def test_seeds_give_different_nonzero_lanes() -> None:
    states = np.concatenate([random.spread_seed(seed, 128, 24) for seed in (0, 1, 2**32 - 1)])
    assert len(np.unique(states, axis=0)) == 3 * 128
    assert (states != 0).all()
    assert np.array_equal(random.spread_seed(3, 128, 6), random.spread_seed(3, 128, 6))
    assert np.array_equal(random.spread_seed(-1, 4, 1), random.spread_seed(2**32 - 1, 4, 1))


def test_the_state_given_is_not_changed() -> None:
    for advance, words in ((random.advance_lfsr, 1), (random.advance_xorwow, 6), (random.advance_xorwow, 24)):
        state = random.spread_seed(9, 4, words)
        before = state.copy()
        advance(state, 12)
        assert np.array_equal(state, before)


def test_unit_interval_excludes_one() -> None:
    ends = random.scale_to_unit_interval(np.array([0, 255, 256, MASK], np.uint32))
    assert ends.tolist() == [0, 0, 2.0**-24, 1 - 2.0**-24]
