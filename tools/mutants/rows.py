"""Launches of the tables of benchmarks/kernels: a mutant that changes their predicted times shows there as a diff."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import lru_cache

import simulate
from benchmarks.kernels.measure import launch_times, shared, stand_in
from benchmarks.kernels.works import SHAPES, Work, works
from model.layers.launch import Launch

TARGETS = ("trn2", "trn1")
LARGEST, MOST_POSITIONS = 2048, 1024
SEQUENCES = (1, 64)


def _is_chosen(work: Work) -> bool:
    """Rows of the first and the last shape at their smallest sizes: larger ones take longer, and no other code."""
    return (
        work.shape in (None, SHAPES[0], SHAPES[-1])
        and work.rows in (LARGEST, *SEQUENCES)
        and work.positions <= MOST_POSITIONS
    )


@lru_cache(maxsize=1)
def _launches() -> tuple[Launch, ...]:
    chosen: list[Launch] = []
    for work in filter(_is_chosen, works()):
        chosen += [launch for launch in work.launches if launch not in chosen]
    return tuple(chosen)


def printed_times(kernels: Collection[str]) -> Iterator[tuple[str, str]]:
    """Names of the launches of some kernels, with their times in both readings as the tables print them."""
    for target in TARGETS:
        chip = shared(simulate.hardware(target))
        for number, launch in enumerate(_launches()):
            if launch.kernel in kernels:
                kernel = getattr(sys.modules["nki_kernels"], launch.kernel)
                arguments = tuple(map(stand_in, launch.arguments))
                done = simulate.launch(kernel, [(arguments, {})], chip, mode=simulate.Mode.dry)
                times = launch_times(done).times_us.values()
                yield f"{launch.kernel} {target} row {number}", " ".join(f"{each:.1f}" for each in times)
