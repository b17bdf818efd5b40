"""The matmul ladder: every rung right, and every rung faster than the one below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nki_kernels import ladder
from simulate.profile.traffic import traffic
from simulate.timing import Reading, schedule
from tests.kernels.accuracy import TARGETS, check, normal, run

RUNGS = (ladder.tile_by_tile, ladder.hoisted, ladder.blocked)


def reference(a_t: np.ndarray, b: np.ndarray) -> np.ndarray:
    return kernels.matmul_reference(a_t, b, True)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.__name__)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", TARGETS)
def test_products_are_as_exact_as_numpys(rung: Callable[..., Any], dtype: type, target: str) -> None:
    check(rung, reference, (normal(1, 256, 128, dtype=dtype), normal(2, 256, 512, dtype=dtype)), target)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.__name__)
def test_more_than_one_block_of_every_dim(rung: Callable[..., Any]) -> None:
    check(rung, reference, (normal(1, 384, 640), normal(2, 384, 1536)))


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.__name__)
@pytest.mark.parametrize(
    ("a_t", "b", "says"),
    [
        ((256, 128), (128, 512), "differ in K: 256 and 128"),
        ((127, 128), (127, 512), "K has to be a multiple of 128, not 127"),
        ((128, 129), (128, 512), "M has to be a multiple of 128, not 129"),
        ((128, 128), (128, 511), "N has to be a multiple of 512, not 511"),
    ],
)
def test_refuses_parts_of_tiles(
    rung: Callable[..., Any], a_t: tuple[int, int], b: tuple[int, int], says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        run(rung, (np.zeros(a_t, np.float32), np.zeros(b, np.float32)))


@pytest.mark.parametrize("target", TARGETS)
def test_every_rung_is_faster_and_reads_less(target: str) -> None:
    a_t, b = (np.zeros((1024, 1024), ml_dtypes.bfloat16) for _ in range(2))
    world = simulate.World(target)
    launches = [world.launch(rung, [((a_t, b), {})], mode=simulate.Mode.dry) for rung in RUNGS]
    times = [schedule(done.streams, done.hardware, Reading.program).length_ns for done in launches]
    assert times[0] > times[1] > times[2]
    read = [{each.name: each.reads for each in traffic(done.streams)} for done in launches]
    assert [(each["a_t"], each["b"]) for each in read] == [(2, 8), (1, 8), (1, 2)]
