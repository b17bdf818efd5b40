"""Launches of the tables of benchmarks/kernels, by whose predicted times a mutant can be noticed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import cache

import simulate
from benchmarks.kernels import latent, routed
from benchmarks.kernels.__main__ import list_works
from benchmarks.kernels.measure import compute_launch_times, create_stand_ins, shared
from benchmarks.kernels.works import SHAPES
from model.layers.launch import Launch

LARGEST, MOST_POSITIONS = 2048, 1024
SEQUENCES = (1, 64)
CHOSEN = (None, SHAPES[0], SHAPES[-1], latent.SHAPES[-1], routed.SHAPES[-1])
WHOLE = 0
"""Rows of a work that its name says whole: states, images, windows of speech."""
TARGETS = {"trn2": (LARGEST, *SEQUENCES, WHOLE), "trn1": (LARGEST, *SEQUENCES)}
"""The rows of works that are predicted, by chip."""


@cache
def _launches(target: str) -> tuple[Launch, ...]:
    """Return launches of a few shapes at their smallest sizes, without repetition; larger sizes run no other code."""
    chosen: list[Launch] = []
    for work in list_works(1):
        if work.shape in CHOSEN and work.rows in TARGETS[target] and work.positions <= MOST_POSITIONS:
            chosen += [launch for launch in work.launches if launch not in chosen]
    return tuple(chosen)


def printed_times(kernels: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (name of a launch, its times in us) for the launches of some kernels, formatted as in the tables."""
    for target in TARGETS:
        chip = shared(simulate.hardware(target))
        for number, launch in enumerate(_launches(target)):
            if launch.kernel in kernels:
                kernel = getattr(sys.modules["nki_kernels"], launch.kernel)
                done = simulate.launch(
                    kernel, [(create_stand_ins(launch), {})], chip, mode=simulate.Mode.dry, trips=0
                )
                times = compute_launch_times(done).times_us.values()
                yield (
                    f"{launch.kernel} {target} row {number}",
                    " ".join(f"{time_ns:.1f}" for time_ns in times),
                )
