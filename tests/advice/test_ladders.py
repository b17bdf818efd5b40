"""Ladders of kernels: at each step the first advice is the change that makes the next variant, and gains are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from nki_kernels.ladder import blocked, tile_by_tile
from simulate.profile import Profile, profile
from simulate.profile.advice import Kind
from tests.advice.ladders import matmul, rmsnorm_swiglu, softmax
from tests.timing import kernels

FACTOR = 1.5
"""A predicted gain may differ from what the variant brings by this factor."""

Kernel = Callable[..., Any]

LADDERS: dict[str, tuple[Sequence[np.ndarray], Sequence[Kernel], Sequence[Kind]]] = {
    "rmsnorm and swiglu": (
        (
            kernels.zeros(128, 1024),
            kernels.zeros(1, 1024),
            kernels.zeros(1024, 2048, kernels.BF16),
            kernels.zeros(1024, 2048, kernels.BF16),
        ),
        (rmsnorm_swiglu.one_buffer, rmsnorm_swiglu.wide, rmsnorm_swiglu.narrow),
        (Kind.rotation, Kind.float32),
    ),
    "matmul": (
        (kernels.zeros(1024, 1024, kernels.BF16), kernels.zeros(1024, 1024, kernels.BF16)),
        (matmul.by_tile, matmul.rotated, matmul.resident),
        (Kind.rotation, Kind.reloads),
    ),
    "matmul of the kernel library": (
        (kernels.zeros(1024, 1024, kernels.BF16), kernels.zeros(1024, 1024, kernels.BF16)),
        (tile_by_tile.func, blocked.func),
        (Kind.reloads,),
    ),
    "softmax": (
        (kernels.zeros(1024, 512),),
        (softmax.piecewise, softmax.rotated, softmax.whole, softmax.merged),
        (Kind.rotation, Kind.small_tiles, Kind.small_dmas),
    ),
}


def _profiles(name: str) -> list[Profile]:
    arguments, variants, _ = LADDERS[name]
    launches = [kernels.dry(variant, *arguments) for variant in variants]
    return [profile(launch.streams, launch.hardware) for launch in launches]


@pytest.mark.parametrize("name", LADDERS)
def test_the_first_advice_is_the_change_of_the_next_variant(name: str) -> None:
    kinds = LADDERS[name][2]
    assert [each.advice[0].kind for each in _profiles(name)[:-1]] == list(kinds)


@pytest.mark.parametrize("name", LADDERS)
def test_predicted_gains_are_what_the_next_variant_brings(name: str) -> None:
    done = _profiles(name)
    for here, following in pairwise(done):
        first = here.advice[0]
        brought = here.length_ns - following.length_ns
        assert brought / FACTOR <= first.before_ns - first.length_ns <= brought * FACTOR, first.kind


@pytest.mark.parametrize("name", LADDERS)
def test_advice_that_was_followed_is_not_given_again(name: str) -> None:
    for kind, following in zip(LADDERS[name][2], _profiles(name)[1:]):
        assert kind not in {each.kind for each in following.advice}


@pytest.mark.parametrize("name", LADDERS)
def test_advice_is_ordered_by_gain_and_none_is_below_two_per_cent(name: str) -> None:
    for each in _profiles(name):
        gains = [piece.gain for piece in each.advice]
        assert gains == sorted(gains, reverse=True)
        assert all(gain >= 0.02 for gain in gains)
        assert {piece.before_ns for piece in each.advice} <= {each.length_ns}
