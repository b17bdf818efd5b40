"""Mistral and Ministral: Llamas with a sliding window, in all layers or in those that `layer_types` names."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import ModelConfig
from model.config.reading import read_attention, read_layer_count, read_window, read_windows
from model.families.dense import read_blocks

_WINDOW = 4096
"""Window of a config without `sliding_window`: the default of transformers."""


def read_mistral(fields: Fields) -> ModelConfig:
    """Read a config of equal blocks; `sliding_window` is null in a config without a window."""
    return read_blocks(fields, read_attention(fields, window=read_window(fields, _WINDOW)))


def read_ministral(fields: Fields) -> ModelConfig:
    """Read a config with windows in the sliding layers of `layer_types`, or in all layers without that field."""
    mixer, window = read_attention(fields), read_window(fields, _WINDOW)
    layer_windows = read_windows(fields, [window] * read_layer_count(fields), window)
    return read_blocks(fields, mixer, layer_windows=layer_windows)
