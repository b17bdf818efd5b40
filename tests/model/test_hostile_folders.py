"""Folders of every dense family with one thing wrong: loaded and computed, or refused in one sentence that names it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from model.commands.generate.prompts import read_sampling_params
from model.errors import ModelError
from model.families import compose, load_config, read_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.plan.sizes import ModelSizes
from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.hostile.fields import VALUES, spoilt
from tests.model.family_folders import ARCHITECTURES, write_family
from tests.model.random_families import FAMILIES

LONGEST = 1000


def describe_refusal(action: Callable[[], object]) -> str:
    """Return the message of the ModelError that `action` raises, or "" if it raises none."""
    try:
        action()
    except ModelError as error:
        sentence = str(error)
        assert sentence.isprintable() and len(sentence) <= LONGEST, sentence
        return sentence
    return ""


def used(folder: Path) -> None:
    """Load a folder and compute two steps with what it holds."""
    config = load_config(folder)
    weights = open_checkpoint(folder, config)
    model = ReferenceModel(config, weights)
    model.prefill([[3, 4, 5]])
    model.decode([4], [3])
    shard_weights(config, weights, 1)


def planned(path: Path) -> None:
    """Read a config as `nkw plan` does."""
    config = read_config(path)
    _ = ModelSizes(config).parameters
    if config.architecture and not config.refusals:
        compose(config).list_tensor_shapes()


def check_configs(folder: Path, configs: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Check that random configs are refused or accepted, and that both outcomes occur."""
    outcomes = set()
    for label, config in configs:
        (folder / "config.json").write_text(json.dumps(config))
        try:
            outcomes.add(bool(describe_refusal(lambda: used(folder))))
            describe_refusal(lambda: planned(folder))
        except Exception as error:
            raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
    assert outcomes == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("family", deep_except(FAMILIES, 3))
def test_a_wrong_field_is_refused_in_one_sentence(family, tmp_path) -> None:
    folder = write_family(tmp_path / "m", family)
    configs = list(spoilt(json.loads((folder / "config.json").read_text())))
    check_configs(folder, random.Random(family).sample(configs, 12))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrong_field_is_refused_in_one_sentence(family, seed, tmp_path) -> None:
    folder = write_family(tmp_path / "m", family, seed)
    check_configs(folder, spoilt(json.loads((folder / "config.json").read_text())))


@pytest.mark.slow
def test_every_wrong_field_of_generation_config_is_refused_in_one_sentence(tmp_path, namespace) -> None:
    folder = write_family(tmp_path / "m", "Llama")
    options = namespace(folder)
    sound = dict(do_sample=True, temperature=0.5, top_k=4, top_p=0.5, eos_token_id=[2], bos_token_id=1)
    outcomes = set()
    for _, fields in spoilt(sound):
        (folder / "generation_config.json").write_text(json.dumps(fields))
        outcomes.add(bool(describe_refusal(lambda: (load_config(folder), read_sampling_params(options)))))
    assert outcomes == {True, False}


@pytest.fixture
def namespace() -> Callable[[Path], Any]:
    """Return the options of a command that says nothing about sampling."""
    from argparse import Namespace

    values = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "logprobs", "structured_outputs"))
    values |= dict(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    return lambda folder: Namespace(model=folder, seed=0, n=1, max_new_tokens=1, stop=[], **values)


Weights = dict[str, np.ndarray]


def without(tensors: Weights, name: str) -> Weights:
    return {tensor_name: tensor for tensor_name, tensor in tensors.items() if tensor_name != name}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_is_missing_surplus_or_misshapen_is_named(family, tmp_path) -> None:
    """Of the last layer, and of those around the layers, each tensor; one of a dtype of its own is noticed as well."""
    folder = write_family(tmp_path / "m", family)
    config, path = load_config(folder), folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    assert describe_refusal(lambda: open_checkpoint(folder, config)) == ""
    last = f".{len(config.blocks) - 1}."
    for name in [name for name in tensors if last in name or not any(map(str.isdigit, name))]:
        tensor = tensors[name]
        for changed, sentence in (
            (
                without(tensors, name),
                f"tensor {name} is missing; a {ARCHITECTURES[family]} has it: download the checkpoint again",
            ),
            ({**tensors, f"{name}.more": tensor}, f"{name}.more is not a tensor of {ARCHITECTURES[family]}"),
            (
                {**tensors, name: tensor[:-1].copy()},
                f"{name} has shape {tensor[:-1].shape}; config.json asks for {tensor.shape}",
            ),
            (
                {**tensors, name: tensor.astype(np.int8)},
                f"{name} has dtype 'I8'; known are F32, F16, BF16",
            ),
        ):
            safetensors.numpy.save_file(changed, path)
            assert describe_refusal(lambda: open_checkpoint(folder, config)) == f"{path}: {sentence}"


@pytest.mark.parametrize("value", [value for value in VALUES if isinstance(value, dict)] + [7])
def test_quantised_weights_are_refused_by_name_in_every_family(value, tmp_path) -> None:
    for family in FAMILIES:
        folder = write_family(tmp_path / family, family)
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": value}))
        sentence = describe_refusal(lambda: load_config(folder))  # noqa: B023 - called here
        assert sentence.startswith(f"{folder / 'config.json'}: quantization_config: ")
