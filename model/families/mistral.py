"""Mistral and Ministral: Llamas whose tokens may see a window of positions, Ministral's in some of its layers."""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.parts import Block, ModelConfig
from model.config.reading import attention, common, gated_mlp, layer_count, norms, window_of, windows
from model.families.dense import compose as compose
from model.families.dense import equal_blocks

_WINDOW = 4096
"""Where a config has no such field, as transformers has it."""


def mistral(fields: Fields) -> ModelConfig:
    """Attention within a window in every layer, where the config gives one."""
    return equal_blocks(fields, attention(fields, window=window_of(fields, _WINDOW)))


def ministral(fields: Fields) -> ModelConfig:
    """Attention within a window in the layers that `layer_types` names, in all where it names none."""
    mixer, window = attention(fields), window_of(fields, _WINDOW)
    each = windows(fields, [window] * layer_count(fields), window)
    mlp, around = gated_mlp(fields), norms(fields)
    return ModelConfig(
        **common(fields), blocks=tuple(Block(replace(mixer, window=own), mlp, around) for own in each)
    )
