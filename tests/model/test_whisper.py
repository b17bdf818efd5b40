"""Whisper against transformers: encoder, attention to it, and decoder, by random weights at odd sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.blocks import SpeechEncoder
from model.device import DryDevice, SimulatedDevice
from model.errors import ModelError
from model.families import SPEECH, load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.model.folders import write_folder
from tests.model.oracle import Oracle
from tests.model.whisper_folders import FIELDS, listening, spectrum, write_whisper

IDS = np.random.default_rng(3).integers(10, 300, 9).tolist()
PROMPT = 5


@cache
def oracle(seed: int) -> Oracle:
    """Return the oracle of the Whisper that hears the spectrum of a seed."""
    pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    return Oracle(listening(spectrum(seed)), IDS, PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model of every oracle and return its folder."""
    folder: Path = tmp_path_factory.mktemp("whisper")
    oracle(1).model.save_pretrained(folder)
    return folder


def assert_equal(model: Any, seed: int, dtype: str = "float32") -> None:
    """Check that logits are within the bound of the error of the dtype in transformers."""
    wanted, bound = oracle(seed).logits, oracle(seed).bound(dtype)
    model.encode([spectrum(seed)])
    rows = [model.prefill([IDS[:PROMPT]])[0].logits]
    rows += [model.decode([IDS[position]], [position])[0].logits for position in range(PROMPT, len(IDS))]
    assert np.abs(np.stack(rows) - wanted).max() <= bound
    assert np.abs(model.prefill([IDS])[0].logits - wanted[-1]).max() <= bound


def kernel_model(folder: Path, target: str, ranks: int, dtype: str = "float32") -> KernelModel:
    config = load_config(folder, SPEECH)
    shards = shard_weights(config, open_checkpoint(folder, config), ranks, dtype=dtype)
    return KernelModel(config, shards, SimulatedDevice(target, ranks), 128)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_gives_the_logits_of_transformers(folder: Path, dtype: str) -> None:
    config = load_config(folder, SPEECH)
    model = ReferenceModel(config, open_checkpoint(folder, config), dtype)
    assert_equal(model, 1, dtype)
    assert_equal(model, 2, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "ranks", "dtype"),
    [("trn1", 1, "float32"), ("trn2", 2, "float32"), ("trn3", 5, "float32"), ("trn2", 1, "bfloat16")],
)
def test_the_kernels_give_the_logits_of_transformers(
    folder: Path, target: str, ranks: int, dtype: str
) -> None:
    """Window after window: nothing of one is heard in the next. Two of five ranks hold padding only."""
    model = kernel_model(folder, target, ranks, dtype)
    assert_equal(model, 1, dtype)
    assert_equal(model, 2, dtype)


@pytest.mark.slow
def test_windows_of_a_batch_are_heard_alone(folder: Path) -> None:
    config = load_config(folder, SPEECH)
    shards = shard_weights(config, open_checkpoint(folder, config), 1)
    both = KernelModel(config, shards, SimulatedDevice("trn2", 1), 128, sequences=2)
    both.encode([spectrum(2), spectrum(1)])
    steps = [both.prefill([IDS[:PROMPT]] * 2)]
    steps += [both.decode([IDS[position]] * 2, [position] * 2) for position in range(PROMPT, len(IDS))]
    for sequence, seed in enumerate((2, 1)):
        logits = np.stack([step[sequence].logits for step in steps])
        assert np.abs(logits - oracle(seed).logits).max() <= oracle(seed).bound()


def test_keys_of_the_encoder_are_projected_once(folder: Path) -> None:
    """A decode step launches nothing of the encoder and writes no keys or values of it."""
    config = load_config(folder, SPEECH)
    device = DryDevice("trn2", 1)
    model = KernelModel(config, shard_weights(config, open_checkpoint(folder, config), 1), device, 128)
    model.encode([spectrum(1)])
    encoder = [launch.launch.kernel for launch in device.take_pass().launches]
    assert encoder.count("conv1d") == 2
    assert encoder.count("attention_prefill") == FIELDS["encoder_layers"]
    model.prefill([IDS[:PROMPT]])
    prompt = [launch.launch.kernel for launch in device.take_pass().launches]
    assert prompt.count("attention_prefill") == 2 * FIELDS["decoder_layers"]
    model.decode([IDS[PROMPT]], [PROMPT])
    step = [launch.launch.kernel for launch in device.take_pass().launches]
    assert step.count("attention_decode") == 2 * FIELDS["decoder_layers"]
    assert step.count("qkv_projection") == 2 * FIELDS["decoder_layers"]
    assert not {"conv1d", "attention_prefill"} & set(step)


def test_a_whisper_is_loaded_for_speech_and_a_llama_for_texts(tmp_path: Path) -> None:
    whisper, llama = write_whisper(tmp_path / "whisper"), write_folder(tmp_path / "llama")
    assert isinstance(load_config(whisper, SPEECH).encoder, SpeechEncoder)
    assert load_config(llama).encoder is None
    with pytest.raises(
        ModelError, match="a whisper transcribes speech; nkw transcribe and nkw serve do that"
    ):
        load_config(whisper)
    with pytest.raises(ModelError, match="a llama continues texts"):
        load_config(llama, SPEECH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(encoder_attention_heads=4), "4; ranks divide as many as decoder_attention_heads, 3"),
        (dict(scale_embedding=True), "true; no layer computes that"),
        (dict(d_model=33), "heads of 11; the kernels of attention take even sizes"),
        (dict(d_model=37), "37 is not a multiple of decoder_attention_heads, 3"),
        (dict(activation_function="tanh"), "'tanh'; an MLP is computed with"),
    ],
)
def test_refuses_what_no_layer_computes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_whisper(tmp_path / "other", d_model=42, activation_function="relu", encoder_attention_heads=3)
    with pytest.raises(ModelError, match=message):
        write_whisper(tmp_path / "whisper", **changes)
