"""The numpy Llama against transformers: equal logits within float32's own noise, equal greedy tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.commands.generate.generation import generate
from model.engine import SamplingParams
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.tokenizer import Tokenizer
from model.runners.reference import ReferenceModel

PROMPTS = ("Once upon a time", "Lily and Tom went to the park.", "The dog", "One day, a little boy named Tim")
NEW_TOKENS = 64
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "every head its own keys": {"num_key_value_heads": 4},
    "one key/value head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 16},
    "narrow heads": {"head_dim": 4},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "yarn rope": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    },
    "bfloat16": {"dtype": ml_dtypes.bfloat16},
    "one layer, eps of old models": {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 500000.0},
}


def reference(folder: Path) -> ReferenceModel:
    config = load_config(folder)
    return ReferenceModel(config, open_checkpoint(folder, config))


def stepwise_logits(model: ReferenceModel, ids: list[int], prompt: int) -> np.ndarray:
    """Return logits after the prompt and after every later token, computed with the cache."""
    rows = [model.prefill([ids[:prompt]])[0].logits]
    rows += [model.decode([ids[position]], [position])[0].logits for position in range(prompt, len(ids))]
    return np.stack(rows)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(write_model, transformers_llama, changes) -> None:
    """The yardstick is what float32 costs transformers itself, measured against its float64 run.

    Both float32 programs round in each of the same places, in another order. Their errors are then of one size, and
    their difference at most the sum of two of them; the factor 4 is twice that, since maxima over few values scatter.
    """
    import torch

    folder = write_model(**changes)
    ids = np.random.default_rng(1).integers(3, 300, 40).tolist()
    oracle = transformers_llama.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        single = oracle(torch.tensor([ids])).logits[0].numpy()
        double = oracle.double()(torch.tensor([ids])).logits[0].numpy()
    noise = np.abs(single - double).max()
    ours = stepwise_logits(reference(folder), ids, 9)
    assert np.abs(ours - double[8:]).max() <= 4 * noise


def test_prefill_and_decode_agree(write_model) -> None:
    """Integers through the same weights: however the ids are split, the choice after them is the same."""
    model = reference(write_model())
    ids = np.random.default_rng(2).integers(3, 300, 20).tolist()
    wanted = stepwise_logits(model, ids, 20)[0]
    for prompt in (1, 2, 10, 19):
        last = stepwise_logits(model, ids, prompt)[-1]
        assert np.argsort(-last)[:5].tolist() == np.argsort(-wanted)[:5].tolist()


def test_a_new_prompt_starts_over(write_model) -> None:
    model = reference(write_model())
    first = model.prefill([[5, 6, 7]])[0].logits
    model.decode([8], [3])
    model.prefill([[9] * 12])
    assert np.array_equal(model.prefill([[5, 6, 7]])[0].logits, first)


def test_later_tokens_do_not_change_earlier_logits(write_model) -> None:
    model = reference(write_model())
    ids = [4, 5, 6, 7, 8, 9]
    changed = stepwise_logits(model, [*ids[:4], 100, 200], 1)
    assert np.array_equal(stepwise_logits(model, ids, 1)[:4], changed[:4])


def test_sharded_checkpoint_gives_the_same_model(write_model, transformers_llama) -> None:
    folder = write_model()
    wanted = reference(folder).prefill([[4, 5, 6]])[0].logits
    oracle = transformers_llama.LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    oracle.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert np.array_equal(reference(folder).prefill([[4, 5, 6]])[0].logits, wanted)


@cache
def oracle_of(folder: Path):
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy_agrees(folder: Path, prompt: str) -> None:
    import torch

    config = load_config(folder)
    tokenizer = Tokenizer(folder, config.vocab_size)
    ids = tokenizer.encode(prompt)
    (done,) = generate(
        reference(folder), tokenizer, config, [ids], SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    )
    with torch.no_grad():
        wanted = oracle_of(folder).generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    assert list(done.generated_ids) == wanted[0, len(ids) :].tolist()
    assert done.text == tokenizer.decode([*ids, *done.generated_ids])[len(tokenizer.decode(ids)) :]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_default_model_writes_what_transformers_writes(default_model, transformers_llama, prompt) -> None:
    greedy_agrees(default_model, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_stories260k_writes_what_transformers_writes(stories260k, transformers_llama, prompt) -> None:
    greedy_agrees(stories260k, prompt)


def test_weights_widened_at_every_use_give_the_same_logits(write_model) -> None:
    folder = write_model(dtype=ml_dtypes.bfloat16)
    config = load_config(folder)
    kept, used = (
        ReferenceModel(config, open_checkpoint(folder, config), widened_bytes=limit) for limit in (2**30, 0)
    )
    for model in (kept, used):
        model.prefill([[1, 2, 3]])
    assert kept.decode([4], [3])[0].logits.tobytes() == used.decode([4], [3])[0].logits.tobytes()
