"""attention_prefill on a logical core of two physical ones: the same results in half of the time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.timing import Reading, dependences, schedule
from tests.kernels.accuracy import compare, copied, find_faults, in_float64
from tests.kernels.test_attention_prefill import arguments, continued, options

BF16 = ml_dtypes.bfloat16
SCHEDULES = 64
WHOLE_HEADS, HALF_GROUPS, TILES = (4, 2), (4, 1), (1, 1)
"""Query heads and key/value heads that the cores divide in each way."""


def on_two(given: tuple[Any, ...], schedules: int = 0, target: str = "trn2") -> None:
    """Compare a launch on two cores with the reference; it has no findings, also not under random schedules."""
    world = simulate.World(target, 1, 2)
    done: list[simulate.Launch] = []
    call = [(copied(given), {})]
    found = find_faults(lambda: done.append(world.launch(kernels.attention_prefill, call)), seeds=schedules)
    assert found == []
    o, *caches = done[0].outputs[0]
    truth = kernels.attention_prefill_reference(*(in_float64(each) for each in given))
    plain = kernels.attention_prefill_reference(*copied(given))
    compare(o, truth[0], plain[0])
    for cache, expected in zip(caches, plain[1:], strict=True):
        assert np.array_equal(cache, expected, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 128, 129, 385])
@pytest.mark.parametrize("heads", [WHOLE_HEADS, HALF_GROUPS, TILES])
def test_two_cores_compute_what_one_does(heads: tuple[int, int], tokens: int) -> None:
    on_two(arguments(tokens, *heads, 16, dtype=BF16), target="trn3")
    on_two(options(arguments(3 * tokens, *heads, 16, 3), window=100))
    on_two((*options(arguments(tokens, *heads, 16)), np.float32([0.5 ** np.arange(1, heads[0] + 1)])))


@pytest.mark.parametrize("heads", [WHOLE_HEADS, HALF_GROUPS, TILES])
def test_64_schedules_of_the_cores_agree_without_findings(heads: tuple[int, int]) -> None:
    on_two(arguments(130, *heads, 8), SCHEDULES)


def alone(given: tuple[Any, ...], heads: int) -> tuple[Any, ...]:
    """The first key/value head of a launch over paged or contiguous caches, with so many query heads."""
    q, k, v, k_cache, v_cache, *rest = given
    depth = k.shape[1] // 2
    first = np.s_[:, :, :1] if rest[4] is not None else np.s_[:, :1]
    caches = (each[first].copy() for each in (k_cache, v_cache))
    return q[:, : heads * depth].copy(), k[:, :depth].copy(), v[:, :depth].copy(), *caches, *rest


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("heads", [1, 2])
def test_no_core_writes_what_the_other_still_reads(page: int | None, heads: int) -> None:
    """New keys lie in the bucket that both cores read; pages behind the valid ones are those of the other sequence."""
    on_two(alone(continued(130, (60,), 128, 8, page), heads), 8)
    given = list(continued(130, (60, 100), 128, 8, page))
    if page is not None:
        tables = given[10]
        tables[0, 12:], tables[1, 15:] = tables[1, 3], tables[0, 4]
    on_two(tuple(given), 4)


def busy(launch: Any) -> dict[str, float]:
    return schedule(launch.streams, launch.hardware, Reading.program, dependences(launch.streams)).busy_ns


@pytest.mark.parametrize("heads", [WHOLE_HEADS, HALF_GROUPS, TILES])
def test_each_core_does_about_half_of_the_products(heads: tuple[int, int]) -> None:
    given = [(arguments(2048, *heads, 128, dtype=BF16), {})]
    one, two = (
        busy(
            simulate.World("trn2", 1, cores).launch(kernels.attention_prefill, given, mode=simulate.Mode.dry)
        )
        for cores in (1, 2)
    )
    for core in (0, 1):
        assert two[f"rank 0 core {core} Tensor"] < 0.6 * one["Tensor"]
