"""causal_conv1d: a convolution along the tokens of each sequence, with a state."""

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
    together,
    vary,
)
from tests.kernels.recurrent import beside_channels, check_pieces, column, convolution, fresh_states, padding

SIZES = [1, 127, 128, 129]


class TestCausalConv1d(KernelTests):
    """Several panels of channels; sequences of several row tiles; one token and several take other ways."""

    case = KernelCase(
        kernels.causal_conv1d,
        convolution,
        values=[
            *together("dtype weights", *MIXED_DTYPES, sequences=3, tokens=[1, 9], channels=140),
            *vary(tokens=[1, 3], channels=SIZES),
            *vary(tokens=SIZES),
            *vary(sequences=SIZES, tokens=1),
            dict(sequences=1, channels=4100, dtype=BF16),
            dict(channels=2060, taps=8),
            dict(tokens=1, channels=1100, dtype=BF16),
            dict(sequences=3, tokens=257, dtype=BF16),
            *vary(sequences=4, tokens=[1, 2, 5], taps=[2, 3, 8]),
            *vary(tokens=[1, 7], bias=[False, True], activation=["silu", "gelu_tanh", None]),
        ],
        refusals=[
            refuse("bias has to be [1, 24], not (1, 25)", bias=normal(1, 1, 25)),
            refuse("state has to be [S, 3, 24], not (4, 2, 24)", state=normal(1, 4, 2, 24)),
            refuse("state is bfloat16, x is float32", state=normal(1, 4, 3, 24, dtype=BF16)),
            refuse("starts are [2, 1], not (3, 1)", starts=column([1, 1, 1])),
            refuse("x has 24 columns, not all of 1 to 24", first=1, x=normal(1, 6, 24)),
            refuse("takes 2 to 8 taps, not 1", dict(taps=2), weight=normal(1, 1, 24)),
            refuse("5 tokens of 2 sequences", x=normal(1, 5, 24)),
        ],
        limits=[limit("taps", 8, "takes 2 to 8 taps, not 9")],
        fits=vary(tokens=128, channels=8192, taps=[2, 5, 8], dtype=[*DTYPES]),
        undefined=[*beside_channels("x"), *fresh_states(padded=False), padding("x")],
        two_sums=vary(tokens=[1, 9], channels=200),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_give_the_bytes_of_a_whole_sequence(dtype: type) -> None:
    check_pieces(TestCausalConv1d.case, ["x"], (3, 1, 129, 1, 1, 5), dict(dtype=dtype), (7, 20))


@pytest.mark.nki_budget(time_us=87.0, target="trn2")
def test_a_prompt_keeps_to_its_budget(nki_budget: Any) -> None:
    """Its bytes take 47 us of HBM."""
    nki_budget.ranks(kernels.causal_conv1d, [tuple(convolution(1, 2048, 2048, dtype=BF16))])


@pytest.mark.nki_budget(time_us=40.0, target="trn2")
def test_a_step_keeps_to_its_budget(nki_budget: Any) -> None:
    nki_budget.ranks(kernels.causal_conv1d, [tuple(convolution(64, 1, 1024, dtype=BF16))])
