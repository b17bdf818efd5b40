"""qkv_projection, output_projection and mlp on a logical core of two physical ones: half of the work each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from simulate.timing import Reading, dependences, schedule
from tests.kernels.accuracy import as_tuple, compare_all, copied, find_faults, normal

BF16 = ml_dtypes.bfloat16
EPS = 1e-5


def weight(seed: int, rows: int, columns: int, dtype: Any) -> np.ndarray:
    return normal(seed, rows, columns, dtype=dtype, scale=rows**-0.5)


def qkv(tokens: int, hidden: int, heads: int, dtype: Any) -> tuple[Any, ...]:
    """Of heads of 8, two of them keys and values, with a bias, norms of heads and rotation."""
    width = 8 * (heads + 2)
    angles = np.arange(40)[:, None] / 100 ** (np.arange(4) / 4)
    return (
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype),
        weight(3, hidden, width, dtype),
        EPS,
        8 * heads,
        8,
        normal(4, 1, width, dtype=dtype),
        np.random.default_rng(5).integers(0, 40, (tokens, 1)).astype(np.int32),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        None,
        normal(6, 1, 8, dtype=dtype),
        normal(7, 1, 8, dtype=dtype),
    )


def output(tokens: int, depth: int, hidden: int, dtype: Any) -> tuple[Any, ...]:
    o, residual = normal(1, tokens, depth, dtype=dtype), normal(3, tokens, hidden, dtype=dtype)
    return o, weight(2, depth, hidden, dtype), residual, None, normal(4, 1, hidden, dtype=dtype)


def mlp(tokens: int, hidden: int, inner: int, dtype: Any, gated: bool = True) -> tuple[Any, ...]:
    return (
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype),
        weight(3, hidden, inner, dtype) if gated else None,
        weight(4, hidden, inner, dtype),
        weight(5, inner, hidden, dtype),
        EPS,
        None,
        "silu",
        normal(6, 1, inner, dtype=dtype) if gated else None,
        normal(7, 1, inner, dtype=dtype),
        normal(8, 1, hidden, dtype=dtype),
    )


def on_two(
    kernel: Any, ranks: list[tuple[Any, ...]], target: str = "trn2", mode: Any = simulate.Mode.eager
) -> Any:
    world = simulate.World(target, ranks=len(ranks), logical_core_size=2)
    return world.launch(kernel, [(copied(arguments), {}) for arguments in ranks], mode=mode)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 5, 127, 128, 129, 300])
def test_two_cores_compute_what_one_does(tokens: int, dtype: Any) -> None:
    for kernel, reference, arguments in (
        (kernels.qkv_projection, kernels.qkv_projection_reference, qkv(tokens, 172, 3, dtype)),
        (kernels.output_projection, kernels.output_projection_reference, output(tokens, 72, 1100, dtype)),
        (kernels.mlp, kernels.mlp_reference, mlp(tokens, 172, 172, dtype)),
    ):
        compare_all(as_tuple(on_two(kernel, [arguments]).outputs[0]), reference, arguments)


@pytest.mark.parametrize("inner", [2, 127, 128, 129, 192, 320, 896])
@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_halves_of_the_intermediate_may_differ(inner: int, target: str) -> None:
    for gated in (True, False):
        arguments = mlp(3, 40, inner, BF16, gated)
        compare_all(on_two(kernels.mlp, [arguments], target).outputs, kernels.mlp_reference, arguments)


@pytest.mark.slow
def test_64_schedules_of_the_cores_agree_without_findings() -> None:
    group = ReplicaGroup([[0, 1]])
    x, norm, gate, up, down, *_ = mlp(5, 40, 128, np.float32)
    parts = [
        (x, norm, gate[:, own].copy(), up[:, own].copy(), down[own].copy(), EPS, group)
        for own in np.split(np.arange(128), 2)
    ]
    for kernel, ranks in (
        (kernels.qkv_projection, [qkv(5, 40, 3, np.float32)]),
        (kernels.output_projection, [output(130, 24, 40, np.float32)]),
        (kernels.mlp, parts),
    ):
        assert find_faults(lambda kernel=kernel, ranks=ranks: on_two(kernel, ranks), orders=2, seeds=64) == []


def busy_on_products(launch: Any) -> Mapping[str, float]:
    return schedule(launch.streams, launch.hardware, Reading.program, dependences(launch.streams)).busy_ns


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 1024])
def test_each_core_does_about_half_of_the_products(tokens: int) -> None:
    for kernel, arguments in (
        (kernels.qkv_projection, qkv(tokens, 1024, 126, BF16)),
        (kernels.output_projection, output(tokens, 1024, 2048, BF16)),
        (kernels.mlp, mlp(tokens, 1024, 2048, BF16)),
    ):
        both = on_two(kernel, [arguments], mode=simulate.Mode.dry)
        alone = simulate.World("trn2").launch(kernel, [(arguments, {})], mode=simulate.Mode.dry)
        whole = busy_on_products(alone)["Tensor"]
        for core in (0, 1):
            assert busy_on_products(both)[f"rank 0 core {core} Tensor"] < 0.75 * whole


def test_refuses_a_column_that_two_cores_cannot_divide() -> None:
    with pytest.raises(AssertionError, match="2 cores divide at least 2 columns, not 1"):
        on_two(kernels.mlp, [mlp(3, 40, 1, np.float32)])
