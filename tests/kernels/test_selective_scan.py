"""selective_scan: the recurrence of Mamba, in chunks and token by token."""

from __future__ import annotations

from typing import Any

import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import normal
from tests.kernels.case import (
    BF16,
    DTYPES,
    MIXED_DTYPES,
    KernelCase,
    KernelTests,
    limit,
    refuse,
    slow,
    together,
    vary,
)
from tests.kernels.recurrent import (
    beside_channels,
    check_pieces,
    column,
    fresh_states,
    nan_of_a_step,
    padding,
    selective,
)

SIZES = [1, 127, 128, 129]
BY_TOKEN = ("u", "projected", "gate")


class TestSelectiveScan(KernelTests):
    """Several chunks, pieces and groups of states; steps in sets, batches and parts.

    28 sequences are 7 sets, of which 3 are a batch; 84 or 81 channels on a partition with 64 states are 2 parts.
    """

    case = KernelCase(
        kernels.selective_scan,
        selective,
        values=[
            *together("dtype weights", *MIXED_DTYPES, sequences=3, tokens=[1, 9], channels=140),
            *vary(tokens=[1, 3], channels=SIZES),
            *vary(sequences=1, tokens=SIZES),
            *vary(sequences=SIZES, tokens=1),
            *slow(*together("states rank", (1, 1), (16, 129), (64, 8), tokens=[1, 5])),
            dict(sequences=1, tokens=600, channels=8, states=2, dtype=BF16),
            dict(sequences=1, tokens=300, channels=8, states=2),
            dict(sequences=128, tokens=1, channels=80, states=16),
            dict(sequences=3, tokens=515, channels=140, states=1, dtype=BF16),
            dict(sequences=2, tokens=43, channels=600, states=9, dtype=BF16),
            dict(sequences=2, tokens=126, channels=520, states=5, dtype=BF16),
            *slow(
                *together(
                    "sequences channels states rank",
                    (6, 64, 4, 40),
                    (17, 2100, 2, 3),
                    (28, 5120, 16, 3),
                    (8, 2688, 64, 3),
                    (8, 81, 64, 3),
                    (67, 3, 40, 3),
                    (2, 1300, 2, 1024),
                    tokens=1,
                    dtype=BF16,
                )
            ),
        ],
        refusals=[
            refuse("projected is (6, 11), not (6, 12)", projected=normal(1, 6, 12)),
            refuse("a_log is (24, 4), not (25, 4)", a_log=normal(1, 25, 4)),
            refuse("gate is [6, 24 or more], not (6, 23)", gate=normal(1, 6, 23)),
            refuse("state is [S, 24, 4], not (4, 24, 5)", state=normal(1, 4, 24, 5)),
            refuse("state is float32, not bfloat16", state=normal(1, 4, 24, 4, dtype=BF16)),
            refuse("starts are [3, 1], not (2, 1)", state_slots=column([1, 1, 1])),
            refuse("gate is [6, 25 or more], not (6, 24)", gate_first=lambda _: 1),
        ],
        limits=[
            limit(
                "rank", 1024, "a rank of at most 1024, not 1025", sequences=1, tokens=2, channels=8, states=64
            ),
            limit("states", 64, "at most 64 states, not 65", dry=True, sequences=1, tokens=2, channels=8),
        ],
        fits=[
            *slow(*vary(tokens=300, channels=[128, 640], states=64, rank=160, dtype=[*DTYPES])),
            *together(
                "channels states rank",
                *((5120, 16, 160), (8192, 16, 512), (3072, 64, 160)),
                sequences=[64, 127, 128],
                tokens=1,
                dtype=[*DTYPES],
            ),
        ],
        undefined=[
            *nan_of_a_step(8, *BY_TOKEN, channels=64),
            *beside_channels("gate"),
            *fresh_states(),
            padding(*BY_TOKEN),
        ],
        two_sums=vary(tokens=[1, 9], channels=200),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_equal_step_by_step(dtype: type) -> None:
    check_pieces(TestSelectiveScan.case, BY_TOKEN, [1] * 21, dict(dtype=dtype), (7, 19))


@pytest.mark.slow
@pytest.mark.nki_budget(time_us=770.0, target="trn2")
def test_a_prompt_keeps_to_its_budget(nki_budget: Any) -> None:
    """Its scans alone hold the Vector engine for 546 us."""
    nki_budget.ranks(kernels.selective_scan, [tuple(selective(1, 2048, 1024, 16, 160, dtype=BF16))])


@pytest.mark.nki_budget(time_us=85.0, target="trn2")
def test_a_step_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.selective_scan, [tuple(selective(64, 1, 1024, 16, 160, dtype=BF16))])
