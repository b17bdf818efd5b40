"""Llama: an RMSNorm before attention and before a gated MLP, with biases where the config enables them."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import ModelConfig
from model.config.reading import attention, biases, gated_mlp
from model.families.dense import read_blocks


def read_llama(fields: Fields) -> ModelConfig:
    """Read a config of equal blocks."""
    return read_blocks(fields, attention(fields, **biases(fields)), gated_mlp(fields, bias=True))
