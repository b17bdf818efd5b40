"""qkv_projection, output_projection and mlp on a logical core of two physical ones: half of the work each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import nki_kernels as kernels
import simulate
from simulate.timing import Reading, dependences, schedule
from tests.kernels.case import BF16
from tests.kernels.test_feed_forward import block
from tests.kernels.test_projections import heads
from tests.kernels.test_qkv_projection import HALVES, arguments


def busy_on_products(kernel: Any, given: Any, cores: int) -> Mapping[str, float]:
    """Return the time that each engine is busy in a dry launch."""
    world = simulate.World("trn2", logical_core_size=cores)
    launch = world.launch(kernel, [(tuple(given), {})], mode=simulate.Mode.dry)
    return schedule(launch.streams, launch.hardware, Reading.program, dependences(launch.streams)).busy_ns


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 1024])
def test_each_core_does_about_half_of_the_products(tokens: int) -> None:
    for kernel, given in (
        (kernels.qkv_projection, arguments(tokens, 1024, 126, dtype=BF16, **HALVES)),
        (kernels.output_projection, heads(tokens, 1024, 2048, BF16, bias=True)),
        (kernels.mlp, block(tokens, 1024, 2048, BF16, biases=True)),
    ):
        whole, both = (busy_on_products(kernel, given, cores) for cores in (1, 2))
        for core in (0, 1):
            assert both[f"rank 0 core {core} Tensor"] < 0.75 * whole["Tensor"]


def test_refuses_a_column_that_two_cores_cannot_divide() -> None:
    world = simulate.World("trn2", logical_core_size=2)
    world.launch(kernels.mlp, [(block(3, 40, 2), {})])
    with pytest.raises(AssertionError, match="2 cores divide at least 2 columns, not 1"):
        world.launch(kernels.mlp, [(block(3, 40, 1), {})])
