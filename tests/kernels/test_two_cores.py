"""Kernels on a logical core of two physical ones: half of the work each, and no core writes what the other reads."""

from __future__ import annotations

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.timing import Reading, dependences, schedule
from tests.kernels import test_feed_forward, test_projections, test_qkv_projection
from tests.kernels.case import BF16, KernelCase, KernelTests, Settings, together
from tests.kernels.test_attention_prefill import arguments, attended, continued

HEADS = ((4, 2), (4, 1), (1, 1))
"""Query heads and key/value heads: the cores divide whole heads, the heads of one group, or tiles."""


class TestPrefill(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        arguments,
        two_sums=[
            *(
                settings
                for tokens in (1, 128, 129, 385)
                for settings in (
                    *together("heads kv_heads", *HEADS, tokens=tokens, dtype=BF16),
                    *together("heads kv_heads", *HEADS, tokens=3 * tokens, sequences=3, window=100),
                    *(
                        dict(
                            tokens=tokens,
                            heads=heads,
                            kv_heads=kv,
                            slopes=0.5 ** np.float32([range(1, heads + 1)]),
                        )
                        for heads, kv in HEADS
                    ),
                )
            ),
        ],
        tolerance=attended,
        seeds=0,
    )


def alone(heads: int, page: int | None) -> Settings:
    """Return settings of one sequence whose first key/value head alone has so many query heads."""
    first = np.s_[:, :, :1] if page else np.s_[:, :1]
    return dict(
        dict.fromkeys(("k_cache", "v_cache"), lambda cache: cache[first].copy()),
        q=lambda q: q[:, : 8 * heads].copy(),
        k=lambda k: k[:, :8].copy(),
        v=lambda v: v[:, :8].copy(),
        valid=(60,),
        page=page,
    )


def crossed(tables: np.ndarray) -> np.ndarray:
    """Return tables of two sequences whose pages behind the valid ones are those of the other sequence."""
    tables[0, 12:], tables[1, 15:] = tables[1, 3], tables[0, 4]
    return tables


class TestSchedulesOfPrefill(KernelTests):
    """New keys are in the bucket that both cores read."""

    case = KernelCase(
        kernels.attention_prefill,
        continued,
        two_sums=[
            dict(tokens=130, depth=8) | settings
            for settings in (
                *(alone(heads, page) for heads in (1, 2) for page in (None, 16)),
                dict(valid=(60, 100)),
                dict(valid=(60, 100), page=16, block_tables=crossed),
            )
        ],
        tolerance=attended,
        seeds=8,
    )


class TestManySchedulesOfPrefill(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        arguments,
        two_sums=together("heads kv_heads", *HEADS, tokens=130, depth=8),
        tolerance=attended,
        seeds=64,
    )


WIDE = dict(hidden=1024, dtype=BF16)


@pytest.mark.parametrize(
    ("case", "settings", "share"),
    [
        *(
            pytest.param(case, WIDE | settings | dict(tokens=tokens), 0.75, marks=pytest.mark.slow)
            for tokens in (16, 1024)
            for case, settings in (
                (test_qkv_projection.TestQkvProjection.case, dict(heads=126) | test_qkv_projection.HALVES),
                (test_projections.TestOutputProjection.case, dict(depth=1024, hidden=2048, bias=True)),
                (test_feed_forward.TestMlp.case, dict(inner=2048, biases=True)),
            )
        ),
        *(
            (TestPrefill.case, settings, 0.6)
            for settings in together("heads kv_heads", *HEADS, tokens=2048, depth=128, dtype=BF16)
        ),
    ],
)
def test_each_core_does_about_half_of_the_products(
    case: KernelCase, settings: Settings, share: float
) -> None:
    arguments, busy = tuple(case.arguments(settings).values()), []
    for cores in (1, 2):
        world = simulate.World("trn2", logical_core_size=cores)
        launch = world.launch(case.kernel, [(arguments, {})], mode=simulate.Mode.dry)
        busy.append(
            schedule(launch.streams, launch.hardware, Reading.program, dependences(launch.streams)).busy_ns
        )
    assert max(busy[1][f"rank 0 core {core} Tensor"] for core in (0, 1)) < share * busy[0]["Tensor"]
