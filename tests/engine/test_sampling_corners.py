"""The likeliest allowed token can always be drawn, whatever value a sampling parameter has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from model import LLM, SamplingParams
from model.engine.draw import draw
from model.engine.sampler import TokenSampler, choose
from model.errors import ModelError
from model.layers.sample import DRAWS, build_sample_arrays, choose_draws
from model.sampling import RowSampling, StepOutput
from nki_kernels import sample
from tests.kernels.accuracy import run

SIZE = 24
ALLOWED = [5, 6, 9, 20]

SINGLE = np.finfo(np.float32)
DOUBLE = np.finfo(np.float64)
ONE = np.float32(1)
SMALL = (
    *(0.0, 5e-324, 1e-300, float(DOUBLE.tiny), 1e-60),
    *(float(SINGLE.smallest_subnormal), float(np.nextafter(SINGLE.tiny, np.float32(0))), float(SINGLE.tiny)),
)
"""0, and numbers that are 0, subnormal or barely normal in float32 or float64."""

AROUND_ONE = (
    *(float(np.nextafter(ONE, np.float32(0))), float(np.nextafter(1.0, 0.0)), 1.0),
    *(float(np.nextafter(1.0, 2.0)), float(np.nextafter(ONE, np.float32(2)))),
)
LARGE = (2.0, 16.0, 100.0, 1e6, 1e38, float(SINGLE.max), 1e300, float(DOUBLE.max))
NO_NUMBERS = (float("nan"), float("inf"), -float("inf"))
CORNERS = (*SMALL, *AROUND_ONE, *LARGE, *(-corner for corner in (*SMALL, *AROUND_ONE, *LARGE)))

RANGES = {
    "temperature": (0, 1e6),
    "top_p": (5e-324, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1 / 16, 16),
}
UNIFORMS = (0.0, 0.5, float(np.float32(1 - 2**-24)))


def accepted(name: str) -> list[float]:
    """Return the corners that a parameter accepts, with its limits and their neighbours inside."""
    least, most = RANGES[name]
    inner = [float(np.nextafter(least, most)), float(np.nextafter(most, least))]
    return [candidate for candidate in (*CORNERS, least, most, *inner) if least <= candidate <= most]


def sampler(**values: Any) -> TokenSampler:
    return TokenSampler(SamplingParams(**values), [1, 5, 5], [2], (7,), SIZE)


def rows_of(**values: Any) -> list[RowSampling]:
    """Return the row that parameters ask for, for each of `UNIFORMS`."""
    (row,) = sampler(**values).rows()
    return [RowSampling(uniform, **{name: getattr(row, name) for name in NAMES}) for uniform in UNIFORMS]


NAMES = [name for name in RowSampling.__dataclass_fields__ if name != "uniform"]


def logits_of(logits_kind: str) -> np.ndarray:
    """Return logits of a kind: usual, equal or huge values, or -inf for the allowed tokens."""
    random = np.random.default_rng(3)
    scores = {
        "usual": random.standard_normal(SIZE) * 4,
        "equal": np.zeros(SIZE),
        "huge": random.choice([-3e38, 3e38], SIZE),
        "masked": np.where(np.isin(np.arange(SIZE), ALLOWED), -np.inf, 1.0),
    }
    return scores[logits_kind].astype(np.float32)


KINDS = ("usual", "equal", "huge", "masked")


def every_row() -> list[tuple[RowSampling, dict[str, Any]]]:
    """Return a draw for each corner of each parameter, alone and with logit_bias and allowed tokens."""
    cases = []
    for name in RANGES:
        for value in accepted(name):
            more: dict[str, Any]
            for more in (
                {},
                {"allowed_token_ids": ALLOWED},
                {"logit_bias": {5: -100.0, 6: 5e-324, 9: 100.0}},
            ):
                values = {name: value, **more}
                cases += [(row, values) for row in rows_of(**values)]
    return cases


@pytest.mark.parametrize("logits_kind", KINDS)
def test_host_draws_an_allowed_token_at_every_corner(logits_kind: str) -> None:
    cases, logits = every_row(), logits_of(logits_kind)
    tokens = draw(np.tile(logits, (len(cases), 1)), [row for row, _ in cases])
    for token, (row, values) in zip(tokens.tolist(), cases):
        assert 0 <= token < SIZE, values
        assert "allowed_token_ids" not in values or token in ALLOWED, values
        if row.top_p < 1e-30 and row.temperature:
            greedy = RowSampling(0.0, **{name: getattr(row, name) for name in NAMES if name != "temperature"})
            assert token == draw(logits[None], [greedy])[0], values


@pytest.mark.parametrize("logits_kind", KINDS)
def test_device_draws_the_tokens_of_the_host_at_every_corner(logits_kind: str) -> None:
    """The device draws from all tokens, as the vocabulary is no larger than a kind's candidates."""
    cases, logits = [row for row, _ in every_row()], logits_of(logits_kind)
    if logits_kind == "masked":
        cases = [row for row in cases if row.bias is None or np.isnan(row.bias).any()]
    assert all(choose_draws(row, SIZE, 1) is not None for row in cases)
    for first in range(0, len(cases), 128):
        rows = cases[first : first + 128]
        arrays = build_sample_arrays(rows, SIZE, full_vocabulary=True)
        limits = [arrays[name] for name in ("uniform", "temperature", "top_k", "top_p", "min_p")]
        adjusting = [arrays[name] for name in ("bias", "prompt_counts", "output_counts")]
        penalties = [arrays[name] for name in ("repetition", "presence", "frequency")]
        table = np.tile(logits, (len(rows), 1))
        chosen, *_ = run(sample, (table, *limits, SIZE, None, *adjusting, *penalties), "trn2")
        assert chosen[:, 0].tolist() == draw(table, rows).tolist()


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    least, most = RANGES[name]
    below = float(np.nextafter(least, -1))
    for value in (*NO_NUMBERS, *CORNERS, below, float(np.nextafter(most, 1e7))):
        if not least <= value <= most:
            with pytest.raises(ModelError, match=f"^{name} is "):
                SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [*NO_NUMBERS, 100.1, -100.1, 1e300])
def test_a_bias_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ModelError, match="logit_bias of token 3 is "):
        SamplingParams(logit_bias={3: value})


@pytest.mark.parametrize("top_k", [-1, 0, 1, SIZE - 1, SIZE, SIZE + 1, 2**24 + 1, 2**53 + 1, 2**1030])
def test_any_top_k_leaves_a_token(top_k: int) -> None:
    for row in rows_of(top_k=top_k):
        assert 0 <= draw(logits_of("usual")[None], [row])[0] < SIZE
        build_sample_arrays([row], SIZE, full_vocabulary=False)


def test_kinds_of_draws_are_those_of_the_device() -> None:
    assert DRAWS[-1].full_vocabulary and DRAWS[-1].candidates >= SIZE


def test_tokens_that_differ_by_less_than_float32_expresses_draw_alike_on_host_and_device() -> None:
    (row,) = sampler(temperature=1e-300, top_p=float(np.nextafter(1.0, 0.0)), min_p=1e-300).rows()
    assert (row.temperature, row.top_p, row.min_p) == (np.float32(1e-6), 1.0, 0.0)


@cache
def llm() -> LLM:
    return LLM(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


CORNER_PARAMS: Sequence[dict[str, Any]] = (
    {"top_p": 1e-300},
    {"top_p": 1e-300, "top_k": 4},
    {"top_p": 1e-45, "top_k": 4, "presence_penalty": 2},
    {"temperature": 1e-300, "top_k": 4},
    {"temperature": 1e6, "min_p": 1.0},
    {"top_p": 1e-300, "allowed_token_ids": [400, 401]},
)


@pytest.mark.slow
@pytest.mark.parametrize("values", CORNER_PARAMS)
def test_a_request_at_a_corner_ends_like_others_and_beside_them(values: dict[str, Any]) -> None:
    """Draws of the first one come from the host, of those with top_k from the device."""
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    corner = SamplingParams(**values, max_tokens=3, ignore_eos=True, seed=1)
    (alone,) = llm().generate("Lily", greedy, use_tqdm=False)
    both = llm().generate(["Lily", "Tom had a red"], [greedy, corner], use_tqdm=False)
    assert both[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len(both[1].outputs[0].token_ids) == 3
    if "top_p" in values and set(values) <= {"top_p", "top_k"}:
        (best,) = llm().generate("Tom had a red", greedy, use_tqdm=False)
        assert both[1].outputs[0].token_ids == best.outputs[0].token_ids


def test_choices_of_corners_have_log_probabilities() -> None:
    rows = rows_of(top_p=1e-300, logprobs=2)
    draws = [(row, StepOutput(logits_of("usual"))) for row in rows]
    assert {type(draw).__name__ for draw in choose(draws, str)} == {"Choice"}
