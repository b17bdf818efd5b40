"""Scales of quantised caches: from a checkpoint, from a calibration text, or 1, in all kinds of attention."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import SPEECH, compose, load_config
from model.layers.attention import Attention
from model.layers.cache_formats import CACHE_FORMATS, CacheRounding, CacheScales
from model.layers.cross_attention import CrossAttention
from model.llm.cache_scales import calibrate_on_tokens
from model.llm.loaded import LoadedModel
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.model.folders import TINY, random_weights, write_folder
from tests.model.tiny_families import write_tiny
from tests.model.whisper_folders import spectrum, write_whisper

PREFIX = "model.layers.{}.self_attn.{}"
NAMES = [PREFIX.format(layer, f"{letter}_scale") for layer in range(2) for letter in "kv"]
PROMPT = np.random.default_rng(3).integers(3, 151, 15).tolist()


def write_scaled(folder: Path, scales: dict[str, np.ndarray], **changes: object) -> LoadedModel:
    """Write a tiny model with further tensors and return it opened."""
    write_folder(folder, **changes)
    safetensors.numpy.save_file(random_weights(TINY) | scales, folder / "model.safetensors")
    return LoadedModel.open(folder)


def list_scales(smallest: float = 0.01) -> dict[str, np.ndarray]:
    return {name: np.float32([smallest * (index + 1)]) for index, name in enumerate(NAMES)}


@pytest.mark.parametrize(("name", "factor"), [("fp8", 2.0), ("fp8_e4m3", 2.0), ("int8", 448 / 127)])
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: name.replace("self_attn.", "self_attn.attn."),
        lambda name: name.replace("k_scale", "k_proj.output_scale").replace("v_scale", "v_proj.output_scale"),
        lambda name: name.replace("k_scale", "k_proj.k_scale").replace("v_scale", "v_proj.v_scale"),
    ],
)
def test_scales_of_a_checkpoint_are_converted(
    tmp_path: Path, name: str, factor: float, rename: Callable[[str], str]
) -> None:
    model = write_scaled(tmp_path / "m", {rename(key): scale for key, scale in list_scales().items()})
    scales = model.choose_cache_scales(name, None).by_array
    expected = zip(("keys", "values") * 2, (0, 0, 1, 1), (0.01, 0.02, 0.03, 0.04))
    for array, layer, scale in expected:
        np.testing.assert_allclose(
            scales[f"layers.{layer}.attention.{array}"], [scale * factor], rtol=2.0**-23
        )
    assert not model.choose_cache_scales("fp8_e5m2", None).by_array


def test_scales_of_integers_stay_for_int8_and_of_heads_stay_apart(tmp_path: Path) -> None:
    scheme = dict(num_bits=8, type="int", symmetric=True, dynamic=False, strategy="attn_head")
    quantization = dict(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme=scheme)
    by_head = {key: np.float32([[[0.25]], [[0.5]]]) for key in NAMES}
    model = write_scaled(tmp_path / "m", by_head, quantization_config=quantization)
    assert model.choose_cache_scales("int8", None).find("layers.1.attention.keys", 2).tolist() == [0.25, 0.5]
    fields = json.loads((tmp_path / "m" / "config.json").read_text())
    scheme["num_bits"] = 4
    fields["quantization_config"]["kv_cache_scheme"] = scheme
    (tmp_path / "m" / "config.json").write_text(json.dumps(fields))
    four_bits = LoadedModel.open(tmp_path / "m")
    assert not four_bits.choose_cache_scales("auto", None).by_array
    with pytest.raises(ModelError, match="kv_cache_scheme has num_bits 4, not 8: its scales cannot be used"):
        four_bits.choose_cache_scales("int8", None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.float32([0]), r"0.self_attn.k_scale contains 0.0; scales are finite and above 0"),
        (np.float32([-1]), r"0.self_attn.k_scale contains -1.0; scales are finite and above 0"),
        (np.float32([np.nan]), r"0.self_attn.k_scale contains nan; scales are finite and above 0"),
        (np.float32([np.inf]), r"0.self_attn.k_scale contains inf; scales are finite and above 0"),
        (np.float32([1, 1, 1]), r"k_scale has shape \(3,\); it is one scale, or one for each of 2 heads"),
        (None, r"0.self_attn.k_scale is missing, while other layers have scales of their caches"),
    ],
)
def test_wrong_scales_are_refused(tmp_path: Path, wrong: np.ndarray | None, message: str) -> None:
    scales = list_scales()
    assert write_scaled(tmp_path / "right", scales).choose_cache_scales("fp8", None).by_array
    changed = {key: scale for key, scale in scales.items() if key != NAMES[0]}
    changed |= {} if wrong is None else {NAMES[0]: wrong}
    model = write_scaled(tmp_path / "wrong", changed)
    with pytest.raises(ModelError, match=message):
        model.choose_cache_scales("fp8", None)


def test_without_scales_1_is_used_with_a_warning(tmp_path: Path) -> None:
    model = LoadedModel.open(write_folder(tmp_path / "m"))
    with pytest.warns(UserWarning, match="no scales for a cache of int8: 1.0 is used"):
        assert model.choose_cache_scales("int8", None).find("layers.0.attention.keys", 2).tolist() == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("auto", "bfloat16", "fp8_e5m2"):
            model.choose_cache_scales(name, None)


def test_a_text_determines_the_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale is the largest magnitude of a head, after rotation, over the largest stored number."""
    model = LoadedModel.open(write_folder(tmp_path / "m"))
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl. " * 3)
    scales = model.choose_cache_scales("int8", text).by_array
    magnitudes: dict[str, np.ndarray] = {}
    append = Attention._append_to_cache

    def record(self, new, states, numpy):
        for name, rows in zip(("keys", "values"), new):
            largest = np.abs(rows).max(axis=(1, 2))
            magnitudes[f"{self.name}.{name}"] = np.maximum(largest, magnitudes.get(f"{self.name}.{name}", 0))
        return append(self, new, states, numpy)

    monkeypatch.setattr(Attention, "_append_to_cache", record)
    ids = [1, *(byte + 3 for byte in text.read_bytes())]
    tokenizer_ids = model.choose_cache_scales("fp8", text).by_array
    assert len(ids) > 2 * 64  # pieces of the context of 64
    assert magnitudes.keys() == scales.keys() == tokenizer_ids.keys()
    for name, largest in magnitudes.items():
        # A scale is one quotient, rounded to float32.
        np.testing.assert_allclose(scales[name], largest / 127, rtol=2.0**-23)
        np.testing.assert_allclose(tokenizer_ids[name], largest / 224, rtol=2.0**-23)


def test_texts_that_give_no_scales_are_refused(tmp_path: Path) -> None:
    model = LoadedModel.open(write_folder(tmp_path / "m"))
    text = tmp_path / "text.txt"
    text.write_text("a")
    assert model.choose_cache_scales("fp8", text).by_array
    with pytest.raises(ModelError, match="caches of auto have no scales: leave it out"):
        model.choose_cache_scales("auto", text)
    with pytest.raises(ModelError, match=r"missing\.txt cannot be read as a calibration text"):
        model.choose_cache_scales("fp8", tmp_path / "missing.txt")
    for content in ("", " \n"):
        text.write_text(content)
        with pytest.raises(ModelError, match=r"text\.txt has no text; give texts like those"):
            model.choose_cache_scales("fp8", text)


def compare(kernels: KernelModel, reference: ReferenceModel, prompt: list[int] = PROMPT) -> None:
    """Check that the logits of kernels and of the reference differ by roundings of float32 only.

    A stored number that is its neighbour would cost a step of 2^-4 of it for fp8, and of 2^-7 for int8.
    """
    outputs, expected = kernels.prefill([prompt]), reference.prefill([prompt])
    for position in range(len(prompt), len(prompt) + 3):
        bound = 2**-17 * np.abs(expected[0].logits).max()
        assert np.abs(outputs[0].logits - expected[0].logits).max() <= bound
        token = int(np.argmax(expected[0].logits))
        outputs, expected = kernels.decode([token], [position]), reference.decode([token], [position])


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_latent_attention_stores_rows_in_few_bits(tmp_path: Path, name: str, ranks: int) -> None:
    config = load_config(write_tiny(tmp_path, "deepseek v3"))
    loaded = LoadedModel.open(tmp_path, config=config)
    scales = calibrate_on_tokens(config, loaded.checkpoint, CACHE_FORMATS[name], PROMPT)
    assert scales.find("layers.0.attention.rows", 2).shape == (2,)
    shards = shard_weights(config, loaded.checkpoint, ranks)
    device = SimulatedDevice("trn2", ranks)
    kernels = KernelModel(config, shards, device, 64, kv_cache_dtype=name, cache_scales=scales)
    reference = loaded.create_reference(kv_cache_dtype=name, cache_scales=scales)
    compare(kernels, reference)
    plain = ReferenceModel(config, loaded.checkpoint).prefill([PROMPT])[0].logits
    assert np.abs(plain - reference.prefill([PROMPT])[0].logits).max() > 1e-4


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_keys_and_values_of_an_encoder_are_stored_in_few_bits(tmp_path: Path, name: str) -> None:
    config = load_config(write_whisper(tmp_path / "whisper"), SPEECH)
    loaded = LoadedModel.open(tmp_path / "whisper", config=config)
    format = CACHE_FORMATS[name]
    crosses = [layer for layer in compose(config).all_layers if isinstance(layer, CrossAttention)]
    names = [array for layer in crosses for array in layer.cached_projections]
    assert len(names) == 2 * len(crosses) > 0
    scales = CacheScales({array: np.float32([3 / format.largest]) for array in names})
    device = SimulatedDevice("trn2", 1)
    shards = shard_weights(config, loaded.checkpoint, 1)
    kernels = KernelModel(config, shards, device, 128, kv_cache_dtype=name, cache_scales=scales)
    reference = ReferenceModel(config, loaded.checkpoint, caching=CacheRounding(format, scales))
    plain = ReferenceModel(config, loaded.checkpoint)
    for model in (kernels, reference, plain):
        model.encode([spectrum(1)])
    compare(kernels, reference, [3, 9, 27])
    expected = reference.prefill([[3, 9, 27]])[0].logits
    assert np.abs(plain.prefill([[3, 9, 27]])[0].logits - expected).max() > 1e-4
