"""ssd: the recurrence of Mamba-2, in chunks and token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import copied, normal
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
    duality,
    fresh_states,
    nan_of_a_step,
    padding,
)

SIZES = [1, 127, 128, 129]
BY_TOKEN = ("u", "steps", "gate")


def full(value: float) -> Any:
    return lambda array: np.full_like(array, value)


def every_second(value: float) -> Any:
    return lambda steps: np.where(np.arange(len(steps))[:, None] % 2, steps, value).astype(steps.dtype)


NARROW = dict(sequences=1, dtype=BF16, padded=False)
PANELS = [(2, 11, 256, 1), (9, 20, 256, 4), (7, 43, 120, 1), (31, 3, 96, 1), (32, 3, 96, 3), (33, 3, 96, 1)]


class TestSsd(KernelTests):
    """Of one or two sequences 2816 columns are two panels, of more 5160; 9 states of 5120 columns are 3 batches.

    Up to 128 heads pass together in chunks of narrow steps; many packs of a group have their scores repeated. Time
    steps of the first of many chunks are worked out before those of the others. Sums of decays over a chunk may be far
    beyond what exp holds, down to -10^6; with every second step at -30 a token decays nothing and writes next to
    nothing.
    """

    case = KernelCase(
        kernels.ssd,
        duality,
        values=[
            *slow(
                *together("dtype weights", *MIXED_DTYPES, sequences=3, tokens=[1, 9], groups=2),
                *vary(tokens=SIZES, heads=3),
                *vary(sequences=SIZES, tokens=1, heads=3),
            ),
            *together(
                "heads depth states groups",
                (1, 512, 1, 1),
                (9, 128, 12, 3),
                (9, 64, 128, 3),
                (20, 96, 16, 1),
                (12, 1, 3, 12),
                (70, 1, 3, 2),
                tokens=[1, 5],
            ),
            *slow(
                *together("sequences heads depth groups", *PANELS, tokens=1, states=3, dtype=BF16),
                *together(
                    "heads depth groups",
                    *((9, 256, 1), (9, 256, 3), (127, 1, 1), (128, 2, 1), (129, 2, 1), (30, 16, 1)),
                    tokens=150,
                    states=5,
                    dtype=BF16,
                    weights=BF16,
                ),
                *together("heads depth", (6, 8), (9, 256), sequences=3, tokens=290, dtype=[*DTYPES]),
            ),
            *vary(sequences=1, tokens=[1, 300], heads=3, padded=False, a_log=full(4.0)),
            *(
                dict(tokens=260, a_log=full(rate), **NARROW, **more)
                for rate in (-20.0, 4.0, 9.0)
                for more in ({}, dict(steps=every_second(-30.0)))
            ),
            dict(tokens=130, steps=full(-60.0), **NARROW),
            *vary(tokens=[1, 7], limits=(0.1, 0.2), padded=False),
        ],
        refusals=[
            refuse("u is [6, 60], not (6, 61)", u=normal(1, 6, 61)),
            refuse("a_log is [1, 6], not (1, 7)", a_log=normal(1, 1, 7)),
            refuse("steps has 5 columns, not 6 or more", steps=normal(1, 6, 5)),
            refuse("gate has 47 columns, not 48 or more", gate=normal(1, 6, 47)),
            refuse("47 elements of 6 heads in 1 groups", state=normal(1, 4, 6, 47)),
            refuse("state is float32, not bfloat16", state=normal(1, 4, 6, 48, dtype=BF16)),
            refuse("starts are [2, 1], not (3, 1)", starts=column([1, 1, 1])),
            refuse("48 elements of 6 heads in 4 groups", dict(groups=3), groups=4),
        ],
        limits=[
            limit("states", 128, "states of at most 128, not 129", sequences=1, tokens=2, heads=2, depth=8),
        ],
        fits=slow(
            *(
                {**heads, **rows}
                for heads in together("heads groups", (80, 1), (112, 2), (128, 8), depth=64, states=128)
                for rows in together("sequences tokens", (1, 300), (1, 1), (128, 1), dtype=[*DTYPES])
            )
        ),
        undefined=[
            *nan_of_a_step(5, *BY_TOKEN, groups=2),
            *beside_channels("steps", "gate"),
            *fresh_states(),
            padding(*BY_TOKEN),
        ],
        two_sums=vary(tokens=[1, 9], heads=9, groups=3),
    )


@pytest.mark.parametrize("tokens", [1, 7])
def test_limits_of_time_steps_change_the_output(tokens: int) -> None:
    inputs = duality(tokens=tokens, limits=(0.1, 0.2), padded=False)
    limited, free = (kernels.ssd_reference(*copied(arguments)) for arguments in (inputs, inputs[:-2]))
    assert not np.allclose(free[0], limited[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_equal_step_by_step(dtype: type) -> None:
    check_pieces(TestSsd.case, BY_TOKEN, [1] * 21, dict(dtype=dtype), (6, 18))


@pytest.mark.nki_budget(time_us=1.1 * 282.8, target="trn2")
def test_a_prompt_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.ssd, [tuple(duality(1, 2048, 16, 64, 128, dtype=BF16))])


@pytest.mark.nki_budget(time_us=1.1 * 316.4, target="trn2")
def test_a_step_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.ssd, [tuple(duality(64, 1, 16, 64, 128, dtype=BF16))])
