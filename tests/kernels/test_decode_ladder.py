"""The decode ladder: every rung right, and every rung faster than the one below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import simulate
from nki_kernels.ladder import decode
from nki_kernels.precision import widened
from simulate.timing import Reading, schedule
from tests.kernels.accuracy import TARGETS, check, normal, run

BF16 = ml_dtypes.bfloat16
RUNGS = (decode.head_per_lane, decode.key_per_lane, decode.group_of_sequences)


def reference(
    q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, positions: np.ndarray, scale: float
) -> np.ndarray:
    """Sequence by sequence, in float32."""
    rows = []
    for queries, keys, values, (last,) in zip(q, k_cache, v_cache, positions):
        keys, values = widened(keys[:, : last + 1]), widened(values[: last + 1])
        scores = widened(queries).reshape(-1, len(keys)) @ keys
        scores = scores * scores.dtype.type(scale)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        rows.append((weights / weights.sum(axis=1, keepdims=True)) @ values)
    return np.stack(rows).reshape(q.shape).astype(q.dtype)


def arguments(sequences: int, heads: int, capacity: int, dtype: Any = np.float32) -> tuple[Any, ...]:
    positions = np.random.default_rng(4).integers(0, capacity, (sequences, 1)).astype(np.int32)
    positions[0], positions[-1] = 0, capacity - 1
    return (
        normal(1, sequences, heads * 128, dtype=dtype),
        normal(2, sequences, 128, capacity, dtype=dtype),
        normal(3, sequences, capacity, 128, dtype=dtype),
        positions,
        128**-0.5,
    )


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.__name__)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("target", TARGETS)
def test_attention_is_as_exact_as_numpys(rung: Callable[..., Any], dtype: type, target: str) -> None:
    check(rung, reference, arguments(3, 4, 256, dtype), target)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.__name__)
@pytest.mark.parametrize(("sequences", "heads", "capacity"), [(1, 1, 128), (5, 1, 2048), (9, 2, 1024)])
def test_groups_that_are_not_full(
    rung: Callable[..., Any], sequences: int, heads: int, capacity: int
) -> None:
    check(rung, reference, arguments(sequences, heads, capacity))


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.__name__)
def test_refuses_parts_of_tiles(rung: Callable[..., Any]) -> None:
    q, k_cache, v_cache, positions, scale = arguments(2, 2, 128)
    for changed, says in (
        ((q, k_cache[:, :64], v_cache, positions, scale), "the rungs take heads of 128, not 64"),
        ((q, k_cache[..., :127], v_cache, positions, scale), "S has to be a multiple of 128, not 127"),
        ((q, k_cache, v_cache[:, :64], positions, scale), r"v_cache is \(2, 64, 128\) beside k_cache"),
        (
            (q[:1], k_cache, v_cache, positions, scale),
            r"q is \[2, G \* 128\] for 2 sequences, not \(1, 256\)",
        ),
        ((q, k_cache, v_cache, positions[:1], scale), r"positions are \[2, 1\], not \(1, 1\)"),
    ):
        with pytest.raises(AssertionError, match=says):
            run(
                rung,
                tuple(
                    np.ascontiguousarray(each) if isinstance(each, np.ndarray) else each for each in changed
                ),
            )


@pytest.mark.parametrize("target", TARGETS)
def test_every_rung_is_faster(target: str) -> None:
    given = arguments(16, 4, 1024, BF16)
    times = []
    for rung in RUNGS:
        done = simulate.World(target).launch(rung, [(given, {})], mode=simulate.Mode.dry)
        times.append(
            [
                schedule(done.streams, done.hardware, each).length_ns
                for each in (Reading.program, Reading.scheduled)
            ]
        )
    assert times[0][0] > times[1][0] > times[2][0]
    assert times[0][1] > times[1][1] > times[2][1]
