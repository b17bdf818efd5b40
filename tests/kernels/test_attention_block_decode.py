"""attention_block_decode: one launch does what three do, and takes less time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.timing import Reading, schedule
from tests.kernels.accuracy import TARGETS, check, copied, normal, run

BF16 = ml_dtypes.bfloat16


def arguments(
    sequences: int, hidden: int, heads: int, positions: int, dtype: Any = np.float32
) -> tuple[Any, ...]:
    """x … w_o for heads of 32 on two key/value heads, then the number of those, tables and norms."""
    depth, kv = 32, 2
    q_size, kv_size = heads * depth, kv * depth
    last = np.random.default_rng(5).integers(0, positions, (sequences, 1)).astype(np.int32)
    angles = np.arange(positions)[:, None] * 100.0 ** (-np.arange(depth // 2) / (depth // 2))
    return (
        normal(1, sequences, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype),
        (normal(3, hidden, q_size + 2 * kv_size) * hidden**-0.5).astype(dtype),
        1e-5,
        q_size,
        kv_size,
        normal(4, sequences, kv, depth, positions, dtype=dtype),
        normal(5, sequences, kv, positions, depth, dtype=dtype),
        last,
        depth**-0.5,
        (normal(6, q_size, hidden) * q_size**-0.5).astype(dtype),
        kv,
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        normal(7, 1, depth, dtype=dtype),
        normal(8, 1, depth, dtype=dtype),
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_block_is_as_exact_as_numpys(target: str, dtype: type) -> None:
    check(
        kernels.attention_block_decode,
        kernels.attention_block_decode_reference,
        arguments(3, 256, 4, 172, dtype),
        target,
    )


@pytest.mark.parametrize(("sequences", "hidden", "positions"), [(1, 127, 8), (5, 129, 128), (17, 300, 129)])
def test_a_block_equals_its_three_launches(sequences: int, hidden: int, positions: int) -> None:
    x, norm, w_qkv, eps, q_size, kv_size, *caches, at, scale, w_o, kv, cos, sin, q_norm, k_norm = arguments(
        sequences, hidden, 4, positions
    )
    block = run(
        kernels.attention_block_decode,
        (x, norm, w_qkv, eps, q_size, kv_size, *caches, at, scale, w_o, kv, cos, sin, q_norm, k_norm),
    )
    q, k, v = run(kernels.qkv_projection, (x, norm, w_qkv, eps, q_size, kv_size))
    tables = cos, sin, q_norm, k_norm, eps
    o, *held = run(kernels.attention_decode, (q, k, v, *copied(caches), at, scale, kv, *tables))
    y = run(kernels.output_projection, (o, w_o, x))
    for one, other in zip(block, (y, *held)):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("target", TARGETS)
def test_loads_of_a_later_part_run_under_an_earlier_one(target: str) -> None:
    """In program order a launch takes less than its three parts one after another."""
    x, norm, w_qkv, eps, q_size, kv_size, *caches, at, scale, w_o, kv, cos, sin, _, _ = arguments(
        4, 2048, 16, 1024, BF16
    )
    tokens = np.zeros((4, q_size), BF16), np.zeros((4, kv_size), BF16), np.zeros((4, kv_size), BF16)
    launched = (
        (kernels.qkv_projection, (x, norm, w_qkv, eps, q_size, kv_size)),
        (kernels.attention_decode, (*tokens, *caches, at, scale, kv, cos, sin)),
        (kernels.output_projection, (tokens[0], w_o, x)),
        (
            kernels.attention_block_decode,
            (x, norm, w_qkv, eps, q_size, kv_size, *caches, at, scale, w_o, kv, cos, sin),
        ),
    )
    times = []
    for kernel, given in launched:
        done = simulate.World(target).launch(kernel, [(given, {})], mode=simulate.Mode.dry)
        times.append(schedule(done.streams, done.hardware, Reading.program).length_ns)
    assert times[3] < 0.95 * sum(times[:3])
