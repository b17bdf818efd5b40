"""The ladders of matmul and of decode attention: every rung right, and every rung faster than the one below it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nki_kernels import ladder
from nki_kernels.ladder import decode
from nki_kernels.precision import widened
from simulate.profile.traffic import sum_traffic
from simulate.timing import Reading, schedule
from tests.kernels.accuracy import TARGETS, normal
from tests.kernels.case import BF16, DTYPES, F32, KernelCase, KernelTests, refuse, together, vary


def factors(depth: int = 128, rows: int = 128, columns: int = 512, dtype: Any = F32) -> list[np.ndarray]:
    return [normal(1, depth, rows, dtype=dtype), normal(2, depth, columns, dtype=dtype)]


def product(rung: Any) -> KernelCase:
    """Return the case of a rung of matmul: one block, and more than one of every dim."""
    return KernelCase(
        rung,
        factors,
        values=[*vary(depth=256, dtype=[*DTYPES]), dict(depth=384, rows=640, columns=1536)],
        refusals=[
            refuse("differ in K: 256 and 128", dict(depth=256), b=normal(2, 128, 512)),
            refuse("K has to be a multiple of 128, not 127", depth=127),
            refuse("M has to be a multiple of 128, not 129", rows=129),
            refuse("N has to be a multiple of 512, not 511", columns=511),
        ],
        reference=lambda a_t, b: kernels.matmul_reference(a_t, b, True),
    )


def attended(
    q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, positions: np.ndarray, scale: float
) -> np.ndarray:
    """Attend sequence by sequence, in float32."""
    rows = []
    for queries, keys, values, (last,) in zip(q, k_cache, v_cache, positions):
        keys, values = widened(keys[:, : last + 1]), widened(values[: last + 1])
        scores = widened(queries).reshape(-1, len(keys)) @ keys
        scores = scores * scores.dtype.type(scale)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        rows.append((weights / weights.sum(axis=1, keepdims=True)) @ values)
    return np.stack(rows).reshape(q.shape).astype(q.dtype)


def step(sequences: int = 2, heads: int = 2, capacity: int = 128, dtype: Any = F32) -> tuple[Any, ...]:
    positions = np.random.default_rng(4).integers(0, capacity, (sequences, 1)).astype(np.int32)
    positions[0], positions[-1] = 0, capacity - 1
    return (
        normal(1, sequences, heads * 128, dtype=dtype),
        normal(2, sequences, 128, capacity, dtype=dtype),
        normal(3, sequences, capacity, 128, dtype=dtype),
        positions,
        128**-0.5,
    )


def attention(rung: Any) -> KernelCase:
    """Return the case of a rung of decode attention; groups of sequences may be not full."""
    return KernelCase(
        rung,
        step,
        values=[
            *vary(sequences=3, heads=4, capacity=256, dtype=[*DTYPES]),
            *together("sequences heads capacity", (1, 1, 128), (5, 1, 2048), (9, 2, 1024)),
        ],
        refusals=[
            refuse("the rungs take heads of 128, not 64", k_cache=lambda keys: keys[:, :64]),
            refuse("S has to be a multiple of 128, not 127", k_cache=lambda keys: keys[..., :127]),
            refuse("v_cache has to be [2, 128, 128] for k_cache", v_cache=lambda values: values[:, :64]),
            refuse("q has to be [2, G * 128] for 2 sequences, not (1, 256)", q=lambda q: q[:1]),
            refuse("positions have to be [2, 1], not (1, 1)", positions=lambda positions: positions[:1]),
        ],
        reference=attended,
    )


class TestTileByTile(KernelTests):
    case = product(ladder.tile_by_tile)


class TestHoisted(KernelTests):
    case = product(ladder.hoisted)


class TestBlocked(KernelTests):
    case = product(ladder.blocked)


class TestHeadPerLane(KernelTests):
    case = attention(decode.head_per_lane)


class TestKeyPerLane(KernelTests):
    case = attention(decode.key_per_lane)


class TestGroupOfSequences(KernelTests):
    case = attention(decode.group_of_sequences)


PRODUCTS = TestTileByTile.case, TestHoisted.case, TestBlocked.case
ATTENTION = TestHeadPerLane.case, TestKeyPerLane.case, TestGroupOfSequences.case


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("rungs", "settings", "reads"),
    [
        (PRODUCTS, dict(depth=1024, rows=1024, columns=1024), dict(a_t=[2, 1, 1], b=[8, 8, 2])),
        (ATTENTION, dict(sequences=16, heads=4, capacity=1024), {}),
    ],
)
def test_every_rung_is_faster_and_reads_less(
    rungs: tuple[KernelCase, ...], settings: dict[str, int], reads: dict[str, list[int]], target: str
) -> None:
    launches = []
    for case in rungs:
        inputs = tuple(case.arguments(settings | dict(dtype=BF16)).values())
        launches.append(simulate.World(target).launch(case.kernel, [(inputs, {})], mode=simulate.Mode.dry))
    for reading in (Reading.program, Reading.scheduled):
        first, second, third = (schedule(done.streams, done.hardware, reading).length_ns for done in launches)
        assert first > second > third
    counts = [{stream.name: stream.reads for stream in sum_traffic(done.streams)} for done in launches]
    assert reads == {name: [count[name] for count in counts] for name in reads}
