"""Ladders of kernels: at each step the first advice is the change that makes the next variant, and gains are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from nki_kernels.ladder import blocked, hoisted, tile_by_tile
from simulate.hardware import hardware
from simulate.profile import Profile, profile
from simulate.profile.advice import Advice, AdviceKind
from simulate.timing import Reading
from tests.advice.ladders import matmul, rmsnorm_swiglu, softmax
from tests.timing import kernels

FACTOR = 1.5
"""A predicted gain may differ from what the variant brings by this factor."""

Kernel = Callable[..., Any]

LADDERS: dict[str, tuple[Sequence[np.ndarray], Sequence[Kernel], Sequence[AdviceKind]]] = {
    "rmsnorm and swiglu": (
        (
            kernels.zeros(128, 1024),
            kernels.zeros(1, 1024),
            kernels.zeros(1024, 2048, kernels.BF16),
            kernels.zeros(1024, 2048, kernels.BF16),
        ),
        (rmsnorm_swiglu.one_buffer, rmsnorm_swiglu.wide, rmsnorm_swiglu.narrow),
        (AdviceKind.rotation, AdviceKind.float32),
    ),
    "matmul": (
        (kernels.zeros(1024, 1024, kernels.BF16), kernels.zeros(1024, 1024, kernels.BF16)),
        (matmul.by_tile, matmul.rotated, matmul.resident),
        (AdviceKind.rotation, AdviceKind.reloads),
    ),
    "matmul of the kernel library": (
        (kernels.zeros(1024, 1024, kernels.BF16), kernels.zeros(1024, 1024, kernels.BF16)),
        (tile_by_tile.func, hoisted.func, blocked.func),
        (AdviceKind.reloads, AdviceKind.reloads),
    ),
    "softmax": (
        (kernels.zeros(1024, 512),),
        (softmax.piecewise, softmax.rotated, softmax.whole_rows, softmax.merged),
        (AdviceKind.rotation, AdviceKind.small_tiles, AdviceKind.small_dmas),
    ),
}

TENSORS = {("matmul of the kernel library", 0): ("a_t",), ("matmul of the kernel library", 1): ("b",)}
"""What the next variant keeps in SBUF, by ladder and step, where that is a part of what could be kept."""


def _profiles(name: str) -> list[Profile]:
    arguments, variants, _ = LADDERS[name]
    launches = [kernels.dry(variant, *arguments) for variant in variants]
    return [profile(launch.streams, launch.hardware) for launch in launches]


@pytest.mark.parametrize("name", LADDERS)
def test_the_first_advice_is_the_change_of_the_next_variant(name: str) -> None:
    advice_kinds = LADDERS[name][2]
    assert [rung.advice[0].advice_kind for rung in _profiles(name)[:-1]] == list(advice_kinds)


def _find_advice_of_step(name: str, step: int, pieces: Sequence[Advice]) -> Advice | None:
    """Return the piece of advice that the next variant follows: the first of its kind, or that on its tensors."""
    advice_kind, tensors = LADDERS[name][2][step], TENSORS.get((name, step))
    matching = [
        piece for piece in pieces if piece.advice_kind is advice_kind and tensors in (None, piece.tensors)
    ]
    return matching[0] if matching else None


@pytest.mark.parametrize("name", LADDERS)
def test_predicted_gains_are_what_the_next_variant_brings(name: str) -> None:
    for step, (current, following) in enumerate(pairwise(_profiles(name))):
        piece = _find_advice_of_step(name, step, current.advice)
        assert piece is not None
        brought = current.length_ns - following.length_ns
        assert brought / FACTOR <= piece.before_ns - piece.length_ns <= brought * FACTOR, piece.kind


@pytest.mark.parametrize("name", LADDERS)
def test_advice_that_was_followed_is_not_given_again(name: str) -> None:
    for step, following in enumerate(_profiles(name)[1:]):
        assert _find_advice_of_step(name, step, following.advice) is None


def test_swiglu_goes_from_the_bound_of_float32_products_to_that_of_its_bytes() -> None:
    """27.8 us: x, weight, gate, up and the float32 result at the rate of HBM while both cores of a stack work."""
    _, wide, narrow = _profiles("rmsnorm and swiglu")
    assert [round(rung.length_ns / 1000, 1) for rung in (wide, narrow)] == [76.9, 31.1]
    assert round(wide.timelines[Reading.scheduled].length_ns / 1000, 1) == 72.0
    assert (round(wide.roofline.least_ns / 1000, 1), wide.roofline.bound) == (54.6, "compute")
    assert (round(narrow.roofline.least_ns / 1000, 1), narrow.roofline.bound) == (22.9, "memory")
    shared = narrow.roofline.needed_bytes / hardware("trn2").hbm_gb_per_s_per_core
    assert round(shared / 1000, 1) == 27.8


@pytest.mark.parametrize("name", LADDERS)
def test_advice_is_ordered_by_gain_and_none_is_below_two_per_cent(name: str) -> None:
    for rung in _profiles(name):
        gains = [piece.gain for piece in rung.advice]
        assert gains == sorted(gains, reverse=True)
        assert all(gain >= 0.02 for gain in gains)
        assert {piece.before_ns for piece in rung.advice} <= {rung.length_ns}
