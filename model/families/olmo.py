"""OLMo 2: norms after attention and after the MLP, and on whole queries and keys."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, HeadNorm, ModelConfig
from model.config.reading import attention, biases, common, gated_mlp, layer_count, norms, rotary


def olmo2(fields: Fields) -> ModelConfig:
    """Equal blocks."""
    mixer = attention(fields, head_norm=HeadNorm.width, **biases(fields))
    block = Block(mixer, gated_mlp(fields), norms(fields, before=False, after=True))
    return ModelConfig(
        **common(fields), **rotary(fields, mixer.head_dim), blocks=(block,) * layer_count(fields)
    )
