"""Whole generations through the kernels: the NumPy reference's tokens, at every number of ranks and prompt length.

The kernels are launched eagerly, replayed, or replayed exactly.
That the reference's tokens are those of transformers is the business of test_reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from model.commands.generate.generation import generate
from model.config import ModelConfig
from model.device import SimulatedDevice
from model.engine import SamplingParams
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.tokenizer import Tokenizer
from model.loading.weights import shard_weights
from model.runners.bucket_length import bucket_length
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.model.conftest import WAYS
from tests.model.reordering import reordered

PROMPTS = ("Once upon a time", "Lily and Tom went to the park.", "The dog", "One day, a little boy named Tim")
NEW_TOKENS = 64

Devices = Callable[[str, int], SimulatedDevice]


@cache
def loaded(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray], Tokenizer]:
    config = load_config(folder)
    return config, dict(open_checkpoint(folder, config)), Tokenizer(folder, config.vocab_size)


def kernel_model(folder: Path, device: SimulatedDevice, positions: int) -> KernelModel:
    config, weights, _ = loaded(folder)
    length = bucket_length(positions, config.max_position_embeddings)
    return KernelModel(config, shard_weights(config, weights, device.ranks), device, length)


def check_story(folder: Path, prompt: str, device: SimulatedDevice, tokens: int = NEW_TOKENS) -> None:
    config, weights, tokenizer = loaded(folder)
    ids = tokenizer.encode(prompt)
    model = kernel_model(folder, device, len(ids) + tokens)
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    (generation,) = generate(model, tokenizer, config, [ids], greedy)
    (plain,) = generate(ReferenceModel(config, weights), tokenizer, config, [ids], greedy)
    assert (generation.generated_ids, generation.text) == (plain.generated_ids, plain.text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated", "prompt"),
    deep_except(product(WAYS, PROMPTS), [("eager", PROMPTS[0]), ("replay", PROMPTS[0])]),
    indirect=["simulated"],
)
def test_the_default_model_tells_the_references_story(
    default_model: Path, prompt: str, simulated: Devices
) -> None:
    check_story(default_model, prompt, simulated("trn1", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated", "prompt"),
    deep_except(product(WAYS, PROMPTS), [("replay", PROMPTS[1])]),
    indirect=["simulated"],
)
def test_stories260k_tells_the_references_story(stories260k: Path, prompt: str, simulated: Devices) -> None:
    check_story(stories260k, prompt, simulated("trn1", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated", "ranks"), deep_except(product(WAYS, [2, 4]), [("exact replay", 4)]), indirect=["simulated"]
)
def test_tensor_parallel_ranks_tell_the_same_story(
    default_model: Path, stories260k: Path, ranks: int, simulated: Devices
) -> None:
    for folder in (default_model, stories260k):
        check_story(folder, PROMPTS[0], simulated("trn1", ranks), tokens=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated", "target"),
    deep_except(product(WAYS, ["trn2", "trn3"]), [("replay", "trn3")]),
    indirect=["simulated"],
)
def test_every_generation_tells_the_same_story(default_model: Path, target: str, simulated: Devices) -> None:
    check_story(default_model, PROMPTS[1], simulated(target, 2), tokens=16)


def story_ids(folder: Path, count: int) -> list[int]:
    """Return `count` tokens of running text: the model's greedy continuation, by the reference."""
    config, weights, tokenizer = loaded(folder)
    model = ReferenceModel(config, weights)
    ids = tokenizer.encode(PROMPTS[0])
    step = model.prefill([ids])[0]
    while len(ids) < count:
        ids.append(int(np.argmax(step.logits)))
        step = model.decode([ids[-1]], [len(ids) - 1])[0]
    return ids[:count]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated", "prompt_tokens"),
    deep_except(product(WAYS, [1, 127, 128, 129, 255]), [("replay", 129)]),
    indirect=["simulated"],
)
def test_prefill_and_one_step_equal_a_longer_prefill(
    default_model: Path, prompt_tokens: int, simulated: Devices
) -> None:
    """Two orders of the same float32 sums: four times what eight reorderings of numpy's own sums do to the logits.

    255 tokens and the one after them fill the context of 256.
    """
    config, weights, _ = loaded(default_model)
    ids = story_ids(default_model, prompt_tokens + 1)
    plain = ReferenceModel(config, weights).prefill([ids])[0].logits
    reordered_logits = [
        ReferenceModel(config, reordered(config, weights, seed)).prefill([ids])[0].logits for seed in range(8)
    ]
    bound = 4 * max(float(np.abs(other - plain).max()) for other in reordered_logits)

    model = kernel_model(default_model, simulated("trn1", 1), prompt_tokens + 1)
    model.prefill([ids[:-1]])
    stepped = model.decode([ids[-1]], [prompt_tokens])[0].logits
    prefilled = kernel_model(default_model, simulated("trn1", 1), prompt_tokens + 1).prefill([ids])[0].logits
    assert np.abs(stepped - prefilled).max() <= bound
    assert np.abs(prefilled - plain).max() <= bound
