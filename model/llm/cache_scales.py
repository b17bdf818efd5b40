"""Scales of quantised caches: from the checkpoint, from a text that the reference model computes, or 1.

A scale is the largest magnitude of the keys or values of a tensor or a head, divided by the stored number that the
cache format has for it. A checkpoint has the scales of another format, float8_e4m3fn or int8. They are converted by the
largest numbers of both formats, so scales of float8_e4m3fn are doubled for caches of float8_e4m3.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.families import compose
from model.formats import CacheScheme
from model.layers.cache_formats import CACHE_FORMATS, UNSCALED, CacheFormat, CacheRounding, CacheScales
from model.layers.layer import Layer
from model.loading.checkpoint import Checkpoint
from model.loading.tokenizer import Tokenizer
from model.runners.reference import ReferenceModel
from nkw.files import read_text

CALIBRATION_TOKENS = 2048
"""Most tokens of a calibration text that the reference model computes, in pieces of at most the model's context."""


def choose_cache_scales(
    folder: Path,
    config: ModelConfig,
    checkpoint: Checkpoint,
    kv_cache_dtype: str,
    calibration: Path | None = None,
) -> CacheScales:
    """Return the scales of a model's caches: of the text `calibration`, else of the checkpoint, else 1 with a warning.

    Formats without such scales need none, and `calibration` is then refused.

    Args:
        folder: The model folder, whose tokenizer encodes the text.
        config: The model.
        checkpoint: Its weights.
        kv_cache_dtype: One of `CACHE_FORMATS`.
        calibration: Text file; None for the checkpoint's scales.

    Raises:
        ModelError: The text cannot be used, or a scale of the checkpoint is missing, has a wrong shape, or is not a
            finite number above 0.
    """
    format = CACHE_FORMATS[kv_cache_dtype]
    if not format.largest:
        if calibration is not None:
            raise ModelError(
                f"a calibration text is given, and caches of {kv_cache_dtype} have no scales: leave it out, or use "
                "fp8 or int8"
            )
        return UNSCALED
    if calibration is not None:
        return calibrate(folder, config, checkpoint, format, calibration)
    layers = [layer for layer in compose(config).all_layers if list_cached_arrays(layer)]
    scales = read_cache_scales(layers, checkpoint.cache_scales, config.cache_scheme, format)
    if scales is None:
        warnings.warn(
            f"the checkpoint has no scales for a cache of {kv_cache_dtype}: 1.0 is used, which may lose accuracy; "
            "give a calibration text (--calibration TEXT)",
            stacklevel=2,
        )
        return UNSCALED
    return scales


def list_cached_arrays(layer: Layer) -> Mapping[str, Any]:
    """Return the projections whose outputs a layer caches, by the name of the cache array; empty for other layers."""
    projections: Mapping[str, Any] = getattr(layer, "cached_projections", {})
    return projections


def read_cache_scales(
    layers: Sequence[Layer], tensors: Mapping[str, np.ndarray], scheme: CacheScheme, format: CacheFormat
) -> CacheScales | None:
    """Return the scales of layers in the tensors of a checkpoint, for a cache format; None if there are none.

    Args:
        layers: Layers with caches.
        tensors: Tensors of a checkpoint that may be scales of caches, by name.
        scheme: The element type for which they are.
        format: The cache format.

    Raises:
        ModelError: Some layers have scales and others have none, or a scale has a wrong shape or value.
    """
    scales_by_array: dict[str, np.ndarray] = {}
    missing: list[str] = []
    for layer in layers:
        heads = getattr(getattr(layer, "heads", None), "kv_heads", 1)
        for array, projection in list_cached_arrays(layer).items():
            names = _list_scale_names(array, projection.tensor)
            name = next((name for name in names if name in tensors), None)
            if name is None:
                missing.append(names[0])
            else:
                factor = np.float32(scheme.largest / format.largest)
                scales_by_array[array] = _check_scale(name, tensors[name], heads) * factor
    if not scales_by_array:
        return None
    if scheme.problem:
        raise ModelError(
            f"{scheme.problem}: its scales cannot be used; give a calibration text", "NKW-MODEL-CONFIG"
        )
    if missing:
        raise ModelError(
            f"tensor {missing[0]} is missing, while other layers have scales of their caches; give a calibration text",
            "NKW-MODEL-WEIGHTS",
        )
    return CacheScales(scales_by_array)


def _list_scale_names(array: str, tensor: str) -> list[str]:
    """Return the names that a checkpoint may use for the scale of a cache array.

    Args:
        array: Name of the array, such as "layers.0.attention.keys".
        tensor: Name of the projection's matrix, such as "model.layers.0.self_attn.k_proj.weight".
    """
    module = tensor.rpartition(".")[0]
    parent = module.rpartition(".")[0]
    letter = "v" if array.endswith(".values") else "k"
    attention = [f"{parent}.{letter}_scale", f"{parent}.attn.{letter}_scale", f"{parent}.kv_scale"]
    return [*attention, f"{module}.{letter}_scale", f"{module}.output_scale"]


def _check_scale(name: str, tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return a scale of a checkpoint as float32 [1] or [heads].

    Raises:
        ModelError: The tensor has another number of elements, or one is not a finite number above 0.
    """
    scales = np.asarray(tensor).astype(np.float32).reshape(-1)
    if scales.size not in (1, heads):
        raise ModelError(
            f"{name} has shape {tensor.shape}; it is one scale, or one for each of {heads} heads",
            "NKW-MODEL-WEIGHTS",
        )
    wrong = scales[~(np.isfinite(scales) & (scales > 0))]
    if wrong.size:
        raise ModelError(
            f"{name} contains {wrong[0]}; scales are finite and above 0: quantise the cache again",
            "NKW-MODEL-WEIGHTS",
        )
    return scales


@dataclass(frozen=True)
class MagnitudeRecorder(CacheRounding):
    """Format of caches that stores numbers as they are, and records the largest magnitude of each head."""

    magnitudes: dict[str, np.ndarray] = field(default_factory=dict)

    def store_heads(self, array: str, rows: np.ndarray) -> np.ndarray:
        """Return keys or values [heads, positions, head_dim] as they are; record the magnitude of each head."""
        self._record(array, np.abs(rows).max(axis=(1, 2)))
        return rows

    def store_latents(self, array: str, rows: np.ndarray, rank: int) -> np.ndarray:
        """Return rows [positions, latent | key] as they are; record the magnitudes of the latent and of the key."""
        self._record(
            array, np.array([np.abs(rows[:, :rank]).max(), np.abs(rows[:, rank:]).max()], np.float32)
        )
        return rows

    def _record(self, array: str, magnitudes: np.ndarray) -> None:
        self.magnitudes[array] = np.maximum(magnitudes, self.magnitudes.get(array, 0))


def calibrate(
    folder: Path, config: ModelConfig, checkpoint: Checkpoint, format: CacheFormat, text: Path
) -> CacheScales:
    """Return a scale for each head from the largest magnitudes of keys and values on a text.

    The reference model computes the first `CALIBRATION_TOKENS` tokens of the text. Nothing is stored.

    Raises:
        ModelError: The text cannot be read or is empty, or the model does not compute texts alone.
    """
    if config.cross_positions:
        raise ModelError(
            f"a {config.model_type} transcribes speech, and a calibration text has none: leave it out"
        )
    try:
        content = read_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{text} cannot be read as a calibration text: {error}") from None
    ids = Tokenizer(folder, config.vocab_size).encode(content)[:CALIBRATION_TOKENS]
    # A tokenizer that begins every text with a token of its own has one for an empty text too.
    if not content.strip() or not ids:
        raise ModelError(f"{text} has no text; give texts like those that the model will read")
    return calibrate_on_tokens(config, checkpoint, format, ids)


def calibrate_on_tokens(
    config: ModelConfig, checkpoint: Checkpoint, format: CacheFormat, ids: Sequence[int]
) -> CacheScales:
    """Return a scale for each head from the largest magnitudes of keys and values of tokens.

    A head whose numbers are all zero has the scale 1.
    """
    recorder = MagnitudeRecorder()
    reference = ReferenceModel(config, checkpoint, caching=recorder)
    length = min(config.context, len(ids))
    for first in range(0, len(ids), length):
        reference.prefill([ids[first : first + length]])
    scales = {
        array: np.where(magnitudes > 0, magnitudes / np.float32(format.largest), 1).astype(np.float32)
        for array, magnitudes in recorder.magnitudes.items()
    }
    return CacheScales(scales)
