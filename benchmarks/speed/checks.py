"""The cost of the detectors: every shipped kernel launched with checks against the same launch without."""

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
    """Time eager kernels of a layer, a matmul and a sum over ranks, with the detectors and without."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((1024, 1024), np.float32).astype(ml_dtypes.bfloat16) for _ in range(2))
    for name, arguments in [("matmul", {"a": a, "b": b}), *layer()]:
        yield _row(name, launcher(name, arguments, simulate.Mode.eager))
    yield _row("all_reduce", _sum_over_ranks(random))


def _row(name: str, launch: Callable[[], Any]) -> Row:
    return against(f"{name}, checked", "the same without checks", lambda: examine(launch), launch, _RUNS)


def _sum_over_ranks(random: np.random.Generator) -> Callable[[], Any]:
    from nki.collectives import ReplicaGroup

    group = ReplicaGroup([list(range(_RANKS))])
    arguments = [((random.standard_normal((128, 512), np.float32), group), {}) for _ in range(_RANKS)]
    world = simulate.World(ranks=_RANKS)
    return lambda: world.launch(nki_kernels.all_reduce, arguments)
