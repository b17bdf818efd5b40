"""The Llama family: an RMSNorm before attention and before a gated MLP, biases where the config asks for them."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import ModelConfig
from model.config.reading import attention, biases, gated_mlp
from model.families.dense import compose as compose
from model.families.dense import equal_blocks


def llama(fields: Fields) -> ModelConfig:
    """Equal blocks."""
    return equal_blocks(fields, attention(fields, **biases(fields)), gated_mlp(fields, bias=True))
