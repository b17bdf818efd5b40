"""OLMo 2: norms after attention and after the MLP, none before, and on whole queries and keys."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.mixers import HeadNorm
from model.config.parts import Block, ModelConfig
from model.config.reading import attention, biases, common, gated_mlp, layer_count, norms
from model.families import dense, names
from model.network import Network

_NAMES = names.Names(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


def olmo2(fields: Fields) -> ModelConfig:
    """Equal blocks."""
    mixer = attention(fields, head_norm=HeadNorm.width, **biases(fields))
    around = norms(fields, default=1e-5, before=False, after=True)
    block = Block(mixer, gated_mlp(fields), around)
    return ModelConfig(**common(fields), blocks=(block,) * layer_count(fields))


def compose(config: ModelConfig) -> Network:
    """The layers with the tensor names of Hugging Face's OLMo 2."""
    return dense.compose(config, _NAMES)
