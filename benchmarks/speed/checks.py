"""Cost of the detectors of `simulate.check`: shipped kernels launched with the checks and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import nki_kernels
import simulate
from benchmarks.speed.kernels import launcher, layer
from benchmarks.speed.measure import Row, against
from simulate.check import examine

_RUNS = 15
_RANKS = 2


def rows() -> Iterator[Row]:
    """Yield the time of a matmul, each kernel of a layer, and a sum over ranks, with the detectors over without."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((1024, 1024), np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    for name, arguments in [("matmul", {"a": a, "b": b}), *layer()]:
        yield _row(name, launcher(name, arguments, simulate.Mode.eager))
    yield _row("all_reduce", _sum_over_ranks(random))


def _row(name: str, launch: Callable[[], Any]) -> Row:
    """Return the row of one launch, with the detectors over without."""
    return against(f"{name}, checked", "the same without checks", lambda: examine(launch), launch, _RUNS)


def _sum_over_ranks(random: np.random.Generator) -> Callable[[], Any]:
    """Return a function that launches all_reduce on _RANKS ranks."""
    from nki.collectives import ReplicaGroup

    group = ReplicaGroup([list(range(_RANKS))])
    arguments = [((random.standard_normal((128, 512), np.float32), group), {}) for _ in range(_RANKS)]
    world = simulate.World(ranks=_RANKS)
    return lambda: world.launch(nki_kernels.all_reduce, arguments)
