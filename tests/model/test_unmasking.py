"""Unmasking against LLaDA's sampling loop, restated here: blocks, remasking, guidance, noise and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import load_config
from model.families.tasks import MASKED_TEXT
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.masked_text import KernelMaskPredictor, ReferenceMaskPredictor
from model.runners.unmasking import (
    MaskPredictor,
    PassRecord,
    Remasking,
    UnmaskingOptions,
    divide_evenly,
    unmask,
)
from tests.model.llada_folders import FIELDS, write_llada

MASK = FIELDS["mask_token_id"]
PROMPTS = np.random.default_rng(1).integers(3, MASK, (2, 5)).tolist()
OPTIONS = UnmaskingOptions(new_tokens=12, passes=6, block_length=6)
SEEDS = [11, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "llada"
    return write_llada(folder)


def create_reference(folder: Path, caches: bool = False) -> ReferenceMaskPredictor:
    config = load_config(folder, MASKED_TEXT)
    return ReferenceMaskPredictor(config, open_checkpoint(folder, config), caches=caches)


def create_kernels(
    folder: Path, sequences: int, ranks: int = 1, caches: bool = False, dtype: str = "float32"
) -> KernelMaskPredictor:
    config = load_config(folder, MASKED_TEXT)
    shards = shard_weights(config, open_checkpoint(folder, config), ranks, dtype=dtype)
    device = SimulatedDevice("trn2", ranks)
    length = len(PROMPTS[0]) + OPTIONS.new_tokens
    return KernelMaskPredictor(config, shards, device, sequences, length, caches, max_bound_steps=3)


def restate_llada(
    predictor: MaskPredictor, prompt: list[int], options: UnmaskingOptions, seed: int
) -> tuple[list[int], int]:
    """Return the text of LLaDA's loop for one prompt, and the number of forward passes.

    As published, but for one thing: the mask cannot be predicted. Random numbers are those that the runner documents:
    Philox by the seed, with the number of the pass in the highest word of its counter; first noise, then an order.
    """
    text = np.array(prompt + [MASK] * options.new_tokens)
    is_prompt = np.arange(len(text)) < len(prompt)
    blocks = options.new_tokens // options.block_length
    steps = options.passes // blocks
    forward = number = 0
    for block in range(blocks):
        start = len(prompt) + block * options.block_length
        end = start + options.block_length
        transfers = [options.block_length // steps] * steps
        for index in range(options.block_length % steps):
            transfers[index] += 1
        for index in range(steps):
            reuses = options.reuses and index > 0
            texts = [text]
            if options.guidance > 0:
                texts.append(np.where(is_prompt, MASK, text))
            logits = predictor.predict(np.stack(texts), range(start, end), reuses).astype(np.float64)
            forward += len(texts)
            if options.guidance > 0:
                conditional, unconditional = logits
                logits = unconditional + (options.guidance + 1) * (conditional - unconditional)
            else:
                (logits,) = logits
            logits[:, MASK] = -np.inf
            random = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, number]))
            number += 1
            scores = np.exp(logits)
            if options.temperature > 0:
                scores = scores / (-np.log(random.random(logits.shape))) ** options.temperature
            predicted = scores.argmax(axis=1)
            if options.strategy is Remasking.low_confidence:
                probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
                confidence = probabilities[np.arange(len(predicted)), predicted]
            else:
                confidence = random.random(len(predicted))
            confidence[text[start:end] != MASK] = -np.inf
            for position in sorted(range(len(predicted)), key=lambda row: -confidence[row])[
                : transfers[index]
            ]:
                text[start + position] = predicted[position]
    return text.tolist(), forward


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        replace(OPTIONS, passes=12),
        replace(OPTIONS, passes=1, block_length=12),
        replace(OPTIONS, passes=5, block_length=12),
        replace(OPTIONS, block_length=3, passes=4),
        replace(OPTIONS, strategy=Remasking.random),
        replace(OPTIONS, temperature=0.7),
        replace(OPTIONS, temperature=1.0, strategy=Remasking.random),
        replace(OPTIONS, guidance=1.5),
        replace(OPTIONS, reuses=True),
        replace(OPTIONS, reuses=True, guidance=0.5, temperature=0.5),
    ],
    ids=lambda options: f"{options}"[17:-1],
)
def test_texts_are_those_of_lladas_loop(folder: Path, options: UnmaskingOptions) -> None:
    predictor = create_reference(folder, options.reuses)
    texts = unmask(predictor, PROMPTS, MASK, options, SEEDS)
    expected = [restate_llada(predictor, prompt, options, seed) for prompt, seed in zip(PROMPTS, SEEDS)]
    assert texts.ids.tolist() == [text for text, _ in expected]
    assert len(texts.passes) * (2 if options.guidance else 1) == expected[0][1]
    assert sum(record.kept for record in texts.passes) == options.new_tokens
    assert (texts.ids != MASK).all()


def test_the_first_passes_of_a_block_keep_one_token_more() -> None:
    assert divide_evenly(32, 5) == [7, 7, 6, 6, 6]
    assert divide_evenly(6, 6) == [1] * 6
    assert divide_evenly(7, 1) == [7]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, OPTIONS), (2, replace(OPTIONS, reuses=True)), (2, replace(OPTIONS, temperature=0.8, guidance=1.0))],
)
def test_kernels_choose_the_tokens_of_the_reference(
    folder: Path, ranks: int, options: UnmaskingOptions
) -> None:
    sequences = len(PROMPTS) * (2 if options.guidance else 1)
    reference = create_reference(folder, options.reuses)
    texts = unmask(
        create_kernels(folder, sequences, ranks, options.reuses), PROMPTS, MASK, options, SEEDS, reference
    )
    assert texts.ids.tolist() == unmask(reference, PROMPTS, MASK, options, SEEDS).ids.tolist()
    assert (texts.compared, texts.equal) == (24, 24)


@pytest.mark.parametrize("prompt", [127, 128, 129])
def test_prefixes_of_a_tile_and_one_less_and_more_are_reused(tmp_path: Path, prompt: int) -> None:
    """Blocks begin at 127, 128 and 129 and five later, where the last tile of keys is full, almost full, or begun."""
    config = load_config(write_llada(tmp_path / "f", max_sequence_length=160), MASKED_TEXT)
    weights = open_checkpoint(tmp_path / "f", config)
    ids = np.random.default_rng(prompt).integers(3, MASK, (1, prompt)).tolist()
    options = UnmaskingOptions(10, 4, 5, reuses=True)
    reference = ReferenceMaskPredictor(config, weights, caches=True)
    device = SimulatedDevice("trn2", 1)
    kernels = KernelMaskPredictor(config, shard_weights(config, weights, 1), device, 1, prompt + 10, True, 3)
    texts = unmask(kernels, ids, MASK, options, [0], reference)
    assert [record.start for record in texts.passes] == [0, prompt, 0, prompt + 5]
    assert (texts.compared, texts.equal) == (10, 10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sequences_of_a_batch_get_what_they_get_alone(folder: Path, temperature: float) -> None:
    options = replace(OPTIONS, temperature=temperature)
    both = unmask(create_kernels(folder, 2), PROMPTS, MASK, options, SEEDS)
    for prompt, seed, text in zip(PROMPTS, SEEDS, both.ids):
        alone = unmask(create_kernels(folder, 1), [prompt], MASK, options, [seed])
        assert alone.ids[0].tolist() == text.tolist()


def test_no_mask_is_left_in_bfloat16_on_two_ranks(folder: Path) -> None:
    config = load_config(folder, MASKED_TEXT)
    reference = ReferenceMaskPredictor(config, open_checkpoint(folder, config), "bfloat16", ranks=2)
    texts = unmask(create_kernels(folder, 2, 2, dtype="bfloat16"), PROMPTS, MASK, OPTIONS, SEEDS, reference)
    assert texts.compared == 24
    assert (texts.ids != MASK).all()


def test_passes_after_the_first_of_a_block_start_at_the_block(folder: Path) -> None:
    options = replace(OPTIONS, reuses=True)
    texts = unmask(create_reference(folder, True), PROMPTS, MASK, options, SEEDS)
    starts = [record.start for record in texts.passes]
    assert starts == [0, 5, 5, 0, 11, 11]
    assert texts.passes[0] == PassRecord(0, 2)


def test_another_seed_and_no_other_option_changes_drawn_texts(folder: Path) -> None:
    predictor, options = create_reference(folder), replace(OPTIONS, temperature=1.0)
    first, again, reseeded = (
        unmask(predictor, PROMPTS, MASK, options, seeds).ids.tolist() for seeds in (SEEDS, SEEDS, [13, 12])
    )
    assert first == again
    assert first[0] != reseeded[0]
    assert first[1] == reseeded[1]


def test_a_difference_from_the_reference_is_counted(folder: Path) -> None:
    class Reversed:
        def predict(self, ids: np.ndarray, block: range, reuses: bool) -> np.ndarray:
            return -predictor.predict(ids, block, reuses)

    predictor = create_reference(folder)
    texts = unmask(predictor, PROMPTS, MASK, OPTIONS, SEEDS, Reversed())
    assert texts.compared == 24
    assert texts.equal < 6


def test_logits_that_are_not_finite_are_refused() -> None:
    class Overflowing:
        def predict(self, ids: np.ndarray, block: range, reuses: bool) -> np.ndarray:
            return np.full((len(ids), len(block), 300), np.inf, np.float32)

    with pytest.raises(ModelError, match="the logits of a pass are not finite"):
        unmask(Overflowing(), PROMPTS, MASK, OPTIONS, SEEDS)


@pytest.mark.parametrize(
    ("changes", "works", "message"),
    [
        (dict(passes=13, block_length=12), dict(passes=12, block_length=12), "13 passes for 12 new tokens"),
        (dict(block_length=5), dict(block_length=4), "blocks of 5 masks do not divide 12 new tokens"),
        (dict(block_length=24), dict(block_length=12), "blocks of 24 masks do not divide 12 new tokens"),
        (dict(passes=5), dict(passes=4), "5 passes for 2 blocks of 6 masks; all blocks take as many: take a multiple"),
        (dict(new_tokens=18), dict(new_tokens=12), "5 tokens of the prompt and 18 masks; the model takes 17 together"),
    ],
)  # fmt: skip
def test_refuses_options(changes: dict[str, int], works: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(OPTIONS, **changes).check(PROMPTS[0], MASK, 17)
    replace(OPTIONS, **works).check(PROMPTS[0], MASK, 17)


@pytest.mark.parametrize(
    ("prompt", "works", "message"),
    [
        ([], [0], "the prompt has no tokens"),
        ([5, MASK], [5, MASK - 1], f"the prompt has the mask, token {MASK}"),
    ],
)
def test_refuses_a_prompt(prompt: list[int], works: list[int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        OPTIONS.check(prompt, MASK, 64)
    OPTIONS.check(works, MASK, 64)
