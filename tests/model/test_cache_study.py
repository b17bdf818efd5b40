"""The study of caches of few bits: what its schemes store, and the order of their errors on shipped texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.caches.schemes import PAGE, quantise_keys_and_values, quantise_latents, round_to_levels
from benchmarks.caches.study import create_bases, measure_loss
from model.llm.loaded import LoadedModel
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parents[2] / "model" / "commands" / "bench" / "stories.txt"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.open(PRETRAINED)


@pytest.fixture(scope="module")
def texts(model: LoadedModel) -> list[list[int]]:
    tokenizer = Tokenizer(PRETRAINED, model.config.vocab_size)
    stories = TEXTS.read_text(encoding="utf-8").split("\n\n")[:4]
    return [[0, *tokenizer.encode(story, special_tokens=False)] for story in stories]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_have_as_many_levels_as_their_bits_and_keep_their_ends(bits: int, axis: int) -> None:
    """Roundings of float32 are relative to 2^-24: of the range twice in the scale, and once in its multiples.

    A quotient has two roundings, which move the nearest level by so much of the range. The sum with the least number is
    rounded once.
    """
    rows = np.random.default_rng(2).standard_normal((300, 300)).astype(np.float32)
    rounded = round_to_levels(rows, bits, axis)
    assert len(np.unique(np.take(rounded, 7, axis=1 - axis))) <= 2**bits
    least, largest = (end(axis, keepdims=True).astype(np.float64) for end in (rows.min, rows.max))
    span, sums = largest - least, np.maximum(np.abs(least), np.abs(largest))
    bound = 2.0**-24 * (5 * span + sums)
    assert (np.abs(rounded - rows.astype(np.float64)) <= span / (2**bits - 1) / 2 + bound).all()
    assert np.array_equal(rounded.min(axis, keepdims=True), least)
    # The quotient of the largest number is rounded to the last level, so that only three roundings are of the range.
    ends = np.abs(rounded.max(axis, keepdims=True) - largest)
    assert (ends <= 2.0**-24 * (3 * span + np.abs(largest))).all()
    assert np.array_equal(round_to_levels(np.ones((3, 3), np.float32), bits, axis), np.ones((3, 3)))


@pytest.mark.slow
def test_errors_are_ordered_by_bits(model: LoadedModel, texts: list[list[int]]) -> None:
    assert all(len(text) > 2 * PAGE for text in texts)
    base = measure_loss(model.config, model.checkpoint, texts)
    errors = {
        bits: abs(measure_loss(model.config, model.checkpoint, texts, quantise_keys_and_values(bits)) - base)
        for bits in (8, 4, 2)
    }
    assert errors[8] < errors[4] < errors[2]


@pytest.mark.slow
def test_a_complete_basis_of_latents_changes_nothing_and_rounding_does(
    model: LoadedModel, texts: list[list[int]]
) -> None:
    bases = create_bases(model.config, model.checkpoint)
    base, unrounded, rounded = (
        measure_loss(model.config, model.checkpoint, texts[:2], store)
        for store in (None, quantise_latents(0, bases), quantise_latents(4, bases))
    )
    assert abs(unrounded - base) < 1e-5
    assert abs(rounded - base) > 1e-3
