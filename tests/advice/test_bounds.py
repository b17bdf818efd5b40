"""The vendor's bounds against numbers that are worked out by hand."""

from __future__ import annotations

import pytest

from simulate.profile import profile
from tests.advice.ladders import matmul, pairs
from tests.timing import kernels

NAMES = [
    "memory_bound",
    "memory_bound_ideal",
    "memory_bound_ideal_no_reloads",
    "compute_bound",
    "compute_bound_ideal_flops",
    "compute_bound_ideal_useful_flops",
    "perfect_pipeline",
]


def test_bounds_of_a_matmul_that_loads_its_operands_again() -> None:
    """1024 cubed in bfloat16: a (2 MiB) is loaded twice, b (2 MiB) 8 times, c (2 MiB) is stored once."""
    launch = kernels.dry(matmul.rotated, *(kernels.zeros(1024, 1024, kernels.BF16) for _ in range(2)))
    done, chip = profile(launch.streams, launch.hardware), launch.hardware
    bounds = {bound.name: bound.time_ns for bound in done.bounds}
    assert list(bounds) == NAMES
    peak = chip.dma_engines * chip.dma_engine_bytes_per_ns
    assert bounds["memory_bound_ideal"] == pytest.approx((2 + 8 + 1) * 2 * 2**20 / peak)
    assert bounds["memory_bound_ideal_no_reloads"] == pytest.approx(3 * 2 * 2**20 / peak)
    flops = 2 * 1024**3
    assert bounds["compute_bound_ideal_flops"] == pytest.approx(
        flops / (2 * 128 * 128 * chip.tensor_clock_ghz)
    )
    assert bounds["compute_bound_ideal_useful_flops"] == bounds["compute_bound_ideal_flops"]
    assert bounds["compute_bound"] == done.timeline.busy_ns["Tensor"]
    queues = [busy for name, busy in done.timeline.busy_ns.items() if name.startswith("DMA")]
    assert max(queues) <= bounds["memory_bound"] <= min(sum(queues), done.length_ns)
    assert bounds["perfect_pipeline"] == max(bounds["memory_bound"], bounds["compute_bound"])


def test_transposes_are_flops_that_are_not_useful() -> None:
    """64 transposes of 128 x 128, each a product of 128 cubed with an identity."""
    launch = kernels.dry(pairs.turned_on_tensor, kernels.zeros(1024, 1024, kernels.BF16))
    done, chip = profile(launch.streams, launch.hardware), launch.hardware
    bounds = {bound.name: bound.time_ns for bound in done.bounds}
    assert bounds["compute_bound_ideal_useful_flops"] == 0.0
    assert bounds["compute_bound_ideal_flops"] == pytest.approx(
        64 * 2 * 128**3 / (2 * 128 * 128 * chip.tensor_clock_ghz)
    )


def test_a_speedup_is_capped_by_the_other_engines() -> None:
    launch = kernels.dry(matmul.rotated, *(kernels.zeros(1024, 1024, kernels.BF16) for _ in range(2)))
    done = profile(launch.streams, launch.hardware)
    bounds = {bound.name: bound for bound in done.bounds}
    tensor_ns, memory_ns = bounds["compute_bound"].time_ns, bounds["memory_bound"].time_ns
    assert memory_ns > tensor_ns
    assert bounds["memory_bound_ideal_no_reloads"].speedup == pytest.approx(done.length_ns / tensor_ns)
    assert bounds["compute_bound_ideal_flops"].speedup == pytest.approx(done.length_ns / memory_ns)


def test_several_cores_have_no_bounds() -> None:
    launch = kernels.dry(kernels.halves, kernels.zeros(256, 128), cores=2)
    assert profile(launch.streams, launch.hardware).bounds == ()
