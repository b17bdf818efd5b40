"""Every dense family against transformers: the numpy reference and the kernels, at odd sizes, by random weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.model.oracle import Oracle
from tests.model.tiny_families import TINY, each_feature, tiny_model, write_tiny

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

IDS = np.random.default_rng(3).integers(3, 151, 18).tolist()
PROMPT = 15
CACHE = 64


@cache
def oracle(name: str) -> Oracle:
    """Return the oracle of a tiny model: transformers after the prompt and after every later token."""
    return Oracle(tiny_model(name), IDS, PROMPT)


def logits_of(
    model: ReferenceModel | KernelModel, ids: Sequence[int] = IDS, prompt: int = PROMPT
) -> np.ndarray:
    rows = [model.prefill([ids[:prompt]])[0].logits]
    rows += [model.decode([ids[position]], [position])[0].logits for position in range(prompt, len(ids))]
    return np.stack(rows)


def assert_equal(model: ReferenceModel | KernelModel, oracle: Oracle) -> None:
    """Check that logits are within the bound and choices equal beyond it, in steps as in one prompt."""
    wanted, bound = oracle.logits, oracle.bound()
    logits = logits_of(model, oracle.ids, oracle.prompt)
    assert np.abs(logits - wanted).max() <= bound
    assert np.abs(model.prefill([oracle.ids])[0].logits - wanted[-1]).max() <= bound
    second, first = np.sort(wanted, axis=1)[:, -2:].T
    sure = first - second > 2 * bound
    assert sure.any()
    assert np.array_equal(logits.argmax(axis=1)[sure], wanted.argmax(axis=1)[sure])


def load(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    config = load_config(folder)
    return config, dict(open_checkpoint(folder, config))


def kernels(
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    ranks: int,
    dtype: str,
    sequences: int = 1,
    cache: int = CACHE,
) -> KernelModel:
    shards = shard_weights(config, weights, ranks, dtype=dtype)
    return KernelModel(config, shards, SimulatedDevice("trn2", ranks), cache, sequences=sequences)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_reference_equals_transformers(tmp_path, name) -> None:
    assert_equal(ReferenceModel(*load(write_tiny(tmp_path, name))), oracle(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", each_feature())
def test_kernels_equal_transformers(tmp_path, name) -> None:
    config, weights = load(write_tiny(tmp_path, name))
    for ranks in (1, 2):
        assert_equal(kernels(config, weights, ranks, "float32"), oracle(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "gemma3",
        "gemma4",
        "olmo2",
        "gpt2",
        "gpt-oss",
        "phi3 of a part of the head",
        "granite",
        "qwen3-next",
    ],
)
def test_bfloat16_costs_what_it_costs_transformers(tmp_path, name) -> None:
    config, weights = load(write_tiny(tmp_path, name))
    logits = logits_of(kernels(config, weights, 1, "bfloat16"))
    assert np.abs(logits - oracle(name).logits).max() <= oracle(name).bound("bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", deep_except(["llama with longrope", "gemma3", "gemma4", "gpt2", "qwen3-next"], 4)
)
def test_sequences_of_a_batch_get_what_they_get_alone(tmp_path, name) -> None:
    """Of the first, longrope changes the frequencies in the second step; the second stays short, and so do its keys.

    Both models err.
    """
    config, weights = load(write_tiny(tmp_path, name))
    model, alone = kernels(config, weights, 1, "float32", sequences=2), ReferenceModel(config, weights)
    first, second = IDS[:PROMPT], IDS[4:11]
    steps = [model.prefill([first, second])]
    wanted = [alone.prefill([first, second])]
    for position in range(PROMPT, len(IDS)):
        arguments = [IDS[position], IDS[position - 4]], [position, position - 8]
        steps.append(model.decode(*arguments))
        wanted.append(alone.decode(*arguments))
    for step, expected in zip(steps, wanted):
        for output, other in zip(step, expected):
            assert np.abs(output.logits - other.logits).max() <= 2 * oracle(name).bound()


def test_a_checkpoint_of_gpt2_without_its_head_lacks_a_prefix_and_holds_masks(tmp_path) -> None:
    config, weights = load(write_tiny(tmp_path, "gpt2"))
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    bare |= {f"h.{layer}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for layer in range(3)}
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
    again = open_checkpoint(tmp_path, config)
    assert set(again) == set(weights)
    assert all(np.array_equal(again[name], weights[name]) for name in weights)
    safetensors.numpy.save_file(
        {**bare, "h.3.attn.bias": bare["h.0.attn.bias"]}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"transformer\.h\.3\.attn\.bias is not a tensor of GPT2LMHeadModel"):
        open_checkpoint(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), "tensor {} is missing"),
        (lambda tensors, name: tensors.update({name: tensors[name][:-1].copy()}), "{} has shape"),
        (
            lambda tensors, name: tensors.update({name + "s": tensors[name]}),
            "{}s is not a tensor of Phi3ForCausalLM",
        ),
    ],
)
def test_a_fused_tensor_is_held_against_the_config(tmp_path, change, message) -> None:
    config, weights = load(write_tiny(tmp_path, "phi3"))
    name, tensors = "model.layers.1.self_attn.qkv_proj.weight", dict(weights)
    change(tensors, name)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        open_checkpoint(tmp_path, config)
    assert message.format(name) in str(refused.value)
