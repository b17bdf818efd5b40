"""Draws on the device: the tokens of the host, for the rows that the kernel serves, and nothing else comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.device import SimulatedDevice
from model.device.binding import bind_arguments
from model.engine import Batch, Chunk, Request
from model.engine.buckets import Buckets
from model.engine.draw import draw
from model.engine.sampler import choose
from model.errors import ModelError
from model.families import load_config
from model.layers.launch import DrawVariant
from model.layers.sample import DRAWS, choose_draws, count_candidates
from model.loading.checkpoint import open_checkpoint
from model.loading.shipped import PRETRAINED
from model.loading.weights import shard_weights
from model.runners.paged import PagedModel
from model.sampling import RowSampling, StepOutput
from model.state import BlockTable, PagePool
from tests.deep import deep_except
from tests.kernels.test_sample import draw as exact_draw

ROWS = 16
PROMPTS = np.random.default_rng(8).integers(3, 290, (ROWS, 5))


class Watched(SimulatedDevice):
    """A device that keeps the kernels launched and the shapes that came back to the host."""

    def __init__(self, ranks: int) -> None:
        super().__init__("trn2", ranks)
        self.launched: list[tuple[str, int]] = []
        self.returned: list[tuple[int, ...]] = []

    def run(self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Any = ()) -> list[Any]:
        self.launched.append((kernel, len(bind_arguments(kernel, arguments[0]))))
        return super().run(kernel, arguments, written)

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        self.returned.append(arrays[0].shape)
        return super().gather(arrays)


class Model:
    """A model of which every step computes the same rows."""

    def __init__(self, folder: Path, ranks: int, factor: float = 1.0) -> None:
        config = load_config(folder)
        tensors = dict(open_checkpoint(folder, config))
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(factor)
        weights = shard_weights(config, tensors, ranks)
        self.device = Watched(ranks)
        self.vocabulary = config.vocab_size
        buckets = Buckets((ROWS,), (16,), (128,))
        self._model = PagedModel(config, weights, self.device, PagePool(ROWS * 8, 16), buckets)
        self._requests = [Request(str(index), prompt.tolist(), 4) for index, prompt in enumerate(PROMPTS)]
        for index, request in enumerate(self._requests):
            request.tables = [BlockTable(0, [index])]

    def step(self, rows: Sequence[RowSampling] | None) -> list[StepOutput]:
        self.device.launched.clear()
        self.device.returned.clear()
        batch = Batch({request: Chunk(request, 0, 5, True) for request in self._requests})
        rows_by_request = (
            {} if rows is None else {request: [row] for request, row in zip(self._requests, rows)}
        )
        outputs = self._model.step(batch, rows_by_request)
        return [outputs[request][0] for request in self._requests]

    @property
    def returns_logits(self) -> bool:
        columns = -(-self.vocabulary // self.device.ranks)
        return any(shape[-1] == columns for shape in self.device.returned)


@cache
def pretrained() -> Model:
    return Model(PRETRAINED, 1)


@pytest.fixture(params=deep_except([1, 2, 3], [3]))
def small(write_model, request: pytest.FixtureRequest) -> Model:
    """Return a model whose vocabulary of 301 tokens does not divide by the ranks."""
    return Model(write_model(vocab_size=301), request.param)


def options(random: np.random.Generator, size: int, most: int, adjusts: bool) -> RowSampling:
    """Return a row that the device serves."""
    biased, penalised = (random.random(2) < 0.5) & adjusts
    return RowSampling(
        float(random.random(dtype=np.float32)),
        float(random.choice([0.0, 0.4, 1.0, 2.5])),
        int(random.integers(1, most + 1)),
        float(random.choice([0.4, 0.9, 1.0])),
        float(random.choice([0.0, 0.1, 1.0])),
        random.choice([0, 0, 1.5, -np.inf], size).astype(np.float32) if biased else None,
        (random.random(size) < 0.2).astype(np.float32) if penalised else None,
        random.choice([0, 0, 1, 3], size).astype(np.float32) if penalised else None,
        float(random.choice([0.8, 1.3])),
        float(random.choice([-0.5, 0.7])),
        float(random.choice([0.0, 0.2])),
        None if adjusts else random.choice([None, 0, 5, 20]),
    )


def near_an_edge(logits: np.ndarray, row: RowSampling) -> bool:
    """Return whether rounding may decide a draw: 2 units in the last place for each of K terms."""
    wide = logits.astype(np.float32) if row.bias is None else logits + row.bias
    if row.output_counts is not None:
        assert row.prompt_counts is not None
        factor = np.where(wide > 0, 1 / np.float32(row.repetition), np.float32(row.repetition))
        wide = np.where(row.output_counts + row.prompt_counts > 0, wide * factor, wide)
        wide -= row.output_counts * np.float32(row.frequency)
        wide -= (row.output_counts > 0) * np.float32(row.presence)
    limits = (row.uniform, row.temperature, float(row.top_k), row.top_p, row.min_p)
    # Exponents of at most 90 count; a rounding of theirs moves a weight by as many units as they are large.
    return exact_draw(wide, limits, row.top_k).margin < 2.0**-24 * (3 * 90 + 2 * row.top_k)


@pytest.mark.slow
@pytest.mark.parametrize("adjusts", [False, True])
def test_the_device_draws_the_tokens_of_the_host(small: Model, adjusts: bool) -> None:
    logits = np.stack([output.logits for output in small.step(None)])  # type: ignore[misc]
    random, size = np.random.default_rng(adjusts), small.vocabulary
    compared = 0
    for most in (8, 64, count_candidates(256, size, small.device.ranks)):
        rows = [options(random, size, most, adjusts) for _ in range(ROWS)]
        for output, row_logits, row, token in zip(small.step(rows), logits, rows, draw(logits, rows)):
            assert output.drawn is not None
            if row.temperature == 0 or not near_an_edge(row_logits, row):
                assert output.drawn.token == token
                compared += 1
        assert [kernel for kernel, _ in small.device.launched][-2:] == ["lm_head", "sample"]
        assert not small.returns_logits
    assert compared > 40


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_host(small: Model) -> None:
    """float32 against float64: exponents of at most 30 round three times, 301 terms once each, exp twice."""
    plain = small.step(None)
    rows = [RowSampling(index / ROWS, index % 3, 40, logprobs=index % 21) for index in range(ROWS)]
    drawn = small.step(rows)
    assert all(output.drawn is not None for output in drawn)
    texts: Any = lambda ids: str(ids[0])  # noqa: E731
    bound = 2.0**-24 * (3 * 30 + 301 + 2)
    for choice, other in zip(choose([*zip(rows, drawn)], texts), choose([*zip(rows, plain)], texts)):
        assert choice.token == other.token  # type: ignore[union-attr]
        one, two = choice.logprobs, other.logprobs  # type: ignore[union-attr]
        assert [*one] == [*two]
        for token in one:
            assert one[token].rank == two[token].rank
            assert one[token].logprob == pytest.approx(two[token].logprob, abs=bound)


@pytest.mark.slow
def test_logits_come_back_for_rows_that_the_device_does_not_serve() -> None:
    model = pretrained()
    rows = [RowSampling(0.3, 1.0, 40)] * (ROWS - 1)
    assert all(output.drawn is not None and output.logits is None for output in model.step(rows + rows[:1]))
    assert not model.returns_logits
    outputs = model.step([*rows, RowSampling(0.3, 1.0)])  # draws from all 4,096 tokens
    assert [output.drawn is None for output in outputs] == [False] * (ROWS - 1) + [True]
    assert outputs[-1].logits is not None
    assert model.returns_logits
    assert [kernel for kernel, _ in model.device.launched].count("sample") == 1


def test_no_row_that_the_device_serves_is_no_launch() -> None:
    model = pretrained()
    outputs = model.step([RowSampling(0.3, 1.0)] * ROWS)
    assert all(output.drawn is None and output.logits is not None for output in outputs)
    assert "sample" not in [kernel for kernel, _ in model.device.launched]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (RowSampling(0, 0.0), DrawVariant(8)),
        (RowSampling(0, 0.0, top_k=0), DrawVariant(8)),
        (RowSampling(0, 1.0, top_k=7), DrawVariant(8)),
        (RowSampling(0, 1.0, top_k=8), DrawVariant(8)),
        (RowSampling(0, 1.0, top_k=9), DrawVariant(64)),
        (RowSampling(0, 1.0, top_k=64), DrawVariant(64)),
        (RowSampling(0, 1.0, top_k=65), DrawVariant(256, full_vocabulary=True)),
        (RowSampling(0, 1.0, top_k=256), DrawVariant(256, full_vocabulary=True)),
        (RowSampling(0, 1.0, top_k=257), None),
        (RowSampling(0, 1.0, top_k=0), None),
        (RowSampling(0, 0.0, logprobs=0), DrawVariant(64, full_vocabulary=True)),
        (RowSampling(0, 0.0, logprobs=20), DrawVariant(64, full_vocabulary=True)),
        (RowSampling(0, 0.0, bias=np.zeros(4096, np.float32)), DrawVariant(64, full_vocabulary=True)),
        (RowSampling(0, 0.0, bias=np.zeros(4096, np.float32), logprobs=0), None),
    ],
)
def test_rows_take_the_least_kind_that_serves_them(row: RowSampling, wanted: DrawVariant | None) -> None:
    assert choose_draws(row, 4096, 1) == wanted


def test_all_of_a_small_vocabulary_is_drawn_from() -> None:
    every = RowSampling(0, 1.0)
    assert [choose_draws(every, size, 1) for size in (64, 256, 257, 264)] == [
        DrawVariant(64),
        DRAWS[-1],
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("wanted", "vocabulary", "ranks", "candidates"),
    [(1, 4096, 1, 8), (9, 4096, 1, 16), (256, 4096, 16, 256), (256, 4096, 17, 240), (256, 128256, 32, 256)]
    + [(256, 128256, 33, 248), (64, 128256, 64, 64), (64, 20, 1, 16), (64, 7, 1, 8)],
)
def test_candidates_are_what_kernels_take_and_every_part_has(
    wanted: int, vocabulary: int, ranks: int, candidates: int
) -> None:
    assert count_candidates(wanted, vocabulary, ranks) == candidates


def test_a_row_draws_the_same_beside_any_other() -> None:
    model = pretrained()
    rows = [RowSampling(index / ROWS, 1.0, 50) for index in range(ROWS)]
    alone = [output.drawn for output in model.step(rows)]
    other = [
        output.drawn for output in model.step([rows[0], *(replace(row, temperature=0.0) for row in rows[1:])])
    ]
    assert alone[0] is not None and other[0] is not None
    assert alone[0].token == other[0].token


@pytest.mark.slow
@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_on_both_ways(write_model, weight: float) -> None:
    row = RowSampling(0.5, 1.0, 5)
    model = Model(write_model(vocab_size=301), 1, weight)
    for sampled_rows in ([row] * ROWS, None):
        choices = choose([(row, output) for output in model.step(sampled_rows)], str)
        assert all(isinstance(choice, ModelError) for choice in choices)
        assert all("the model's largest logit is" in str(choice) for choice in choices)
