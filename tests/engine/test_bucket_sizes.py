"""Sizes of buckets: read from a text, fitted to what was asked, and used by an engine."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from model.engine import SamplingParams
from model.engine.bucket_sizes import BucketLimits, SizeCounts, fit_buckets, read_buckets
from model.engine.buckets import Buckets
from model.errors import ModelError
from model.llm.llm import LLM

LIMITS = BucketLimits(16, 64, 256)


def test_an_axis_without_sizes_keeps_powers_of_two() -> None:
    assert read_buckets("tokens=64,20", LIMITS) == Buckets((1, 2, 4, 8, 16), (20, 64), (128, 256))
    assert str(read_buckets("context=384 sequences=3", LIMITS)) == "sequences=3 tokens=16,32,64 context=384"
    assert read_buckets(str(LIMITS.powers), LIMITS) == LIMITS.powers


@pytest.mark.parametrize(
    ("wrong", "reason", "right"),
    [
        ("tokens=63", "tokens of the buckets end at 63; up to 64 are needed", "tokens=64"),
        ("context=128", "context of the buckets end at 128; up to 256 are needed", "context=256"),
        ("sequences=129", "sequences of the buckets go up to 129; a launch takes 128", "sequences=128"),
        ("context=257", "context of the buckets is in multiples of 128 positions", "context=384"),
        ("tokens=512", "tokens of the buckets go up to 512, beyond their context, 256", "tokens=256"),
        ("tokens=0,64", "tokens of the buckets are '0,64', not positive whole numbers", "tokens=1,64"),
        ("tokens=", "tokens of the buckets are '', not positive whole numbers", "tokens=64"),
        ("rows=64", "buckets have 'rows=64'; they are such as", "tokens=64"),
        ("tokens=64 tokens=64", "buckets have 'tokens=64'; they are such as", "tokens=64 context=256"),
        ("", "buckets have no sizes", "sequences=1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: str, reason: str, right: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_buckets(wrong, LIMITS)
    read_buckets(right, LIMITS)


@pytest.mark.parametrize(("drafts", "fits"), [(31, True), (32, False)])
def test_the_fewest_sequences_have_room_for_their_drafts(drafts: int, fits: bool) -> None:
    limits = BucketLimits(16, 64, 256, drafts)
    text = "sequences=4 context=512"
    if fits:
        assert read_buckets(text, limits).drafts == drafts
    else:
        with pytest.raises(ModelError, match="4 sequences with 32 drafts each have more than the 128 rows"):
            read_buckets(text, limits)


def padding(seen: Counter[int], sizes: tuple[int, ...]) -> int:
    return sum(
        (min(bucket for bucket in sizes if bucket >= size) - size) * times for size, times in seen.items()
    )


def test_fitted_sizes_pad_least_of_all_sizes() -> None:
    draw = np.random.default_rng(4)
    limits = BucketLimits(16, 160, 256)
    for _ in range(20):
        seen = Counter(draw.integers(1, 160, 30).tolist())
        # Three sizes: one context, with five sequences, and prompts with and without cached positions.
        buckets = fit_buckets(SizeCounts(tokens=seen, context=Counter({256: 1})), limits, 5 + 5 * 3 * 2)
        assert (buckets.sequences, buckets.context) == ((1, 2, 4, 8, 16), (256,))
        assert len(buckets.tokens) == 3
        candidates = combinations(range(16, 176, 16), 3)
        assert padding(seen, buckets.tokens) == min(
            padding(seen, candidate) for candidate in candidates if candidate[-1] == 160
        )


@pytest.mark.slow
def test_more_shapes_never_pad_more() -> None:
    draw = np.random.default_rng(5)
    limits = BucketLimits(64, 512, 2048)
    counts = SizeCounts.from_lengths(zip(draw.integers(1, 900, 200).tolist(), [100] * 200), 512)
    counts.sequences.update(draw.integers(1, 40, 100).tolist())
    before = None
    for shapes in (3, 20, 100, 400):
        buckets = fit_buckets(counts, limits, shapes)
        assert len(buckets.shapes()) <= shapes
        share = 1.0
        for axis in ("sequences", "tokens", "context"):
            seen = getattr(counts, axis)
            share *= 1 + padding(seen, getattr(buckets, axis)) / sum(
                size * times for size, times in seen.items()
            )
        assert before is None or share <= before
        before = share
    with pytest.raises(ModelError, match="no sizes of buckets give at most 2 shapes"):
        fit_buckets(counts, limits, 2)


def test_lengths_ask_for_chunks_and_for_positions_of_every_token() -> None:
    counts = SizeCounts.from_lengths([(130, 200)], 64)
    assert counts.tokens == Counter({64: 2, 2: 1})
    assert counts.context == Counter({64: 1, 128: 1, 130: 1, 256: 126, 384: 74})


@pytest.mark.slow
def test_chosen_sizes_change_no_token() -> None:
    draw = np.random.default_rng(6)
    prompts = [draw.integers(3, 4000, count).tolist() for count in (130, 40, 9, 70)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    answers = []
    for buckets in (None, "sequences=3 tokens=20,64 context=384"):
        llm = LLM(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64, buckets=buckets)
        answers.append(
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        )
        assert llm.engine.use.buckets is not None
        assert set(llm.engine.use.steps) <= set(llm.engine.use.buckets.shapes())
    assert answers[0] == answers[1]


def test_an_engine_does_not_know_which_requests_will_come() -> None:
    with pytest.raises(ModelError, match="nkw traffic --buckets auto says the sizes"):
        LLM(buckets="auto")


@pytest.mark.parametrize(
    ("limits", "tokens", "context"),
    [
        (BucketLimits(16, 512, 2048), (128, 256, 512), 2048),
        (BucketLimits(16, 129, 2048), (128, 256), 2048),
        (BucketLimits(16, 128, 2048), (128,), 2048),
        (BucketLimits(16, 127, 2048), (128,), 2048),
        (BucketLimits(16, 16, 2048), (128,), 2048),
        (BucketLimits(16, 512, 128), (128,), 128),
        (BucketLimits(16, 512, 129), (128, 256), 256),
        (BucketLimits(16, 512, 128, drafts=3), (128,), 256),
    ],
)
def test_what_is_compiled_by_default_are_powers_of_two_with_the_longest_context(
    limits: BucketLimits, tokens: tuple[int, ...], context: int
) -> None:
    buckets = limits.compiled
    assert (buckets.sequences, buckets.tokens, buckets.context) == ((1, 2, 4, 8, 16), tokens, (context,))
    assert {step.decoding for step in buckets.shapes()} == {None}
    assert read_buckets(str(buckets), limits, buckets) == buckets
    # 5 sizes of decoding sequences, with and without drafts; prompts with and without a cached prefix.
    assert len(buckets.shapes()) == 5 * (2 if limits.drafts else 1) + 5 * len(tokens) * 2
