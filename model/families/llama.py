"""Llama: an RMSNorm before attention and before a gated MLP, with biases where the config enables them."""

from __future__ import annotations

from model.config.blocks import ModelConfig
from model.config.fields import Fields
from model.config.reading import read_attention, read_biases, read_gated_mlp
from model.families.dense import read_blocks


def read_llama(fields: Fields) -> ModelConfig:
    """Return the config of a Llama, whose blocks are equal.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return read_blocks(
        fields, read_attention(fields, **read_biases(fields)), read_gated_mlp(fields, bias=True)
    )
