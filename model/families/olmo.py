"""OLMo 2: norms after attention and after the MLP only, and one norm over the heads of queries, one over keys."""

from __future__ import annotations

from model.config.blocks import ModelConfig
from model.config.fields import Fields
from model.config.mixers import HeadNorm
from model.config.reading import read_attention, read_biases, read_norms
from model.families import dense, names

NAMES = names.Names(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


def read_olmo2(fields: Fields) -> ModelConfig:
    """Return the config of an OLMo 2, whose blocks are equal.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    mixer = read_attention(fields, head_norm=HeadNorm.width, **read_biases(fields))
    block_norms = read_norms(fields, default=1e-5, before=False, after=True)
    return dense.read_blocks(fields, mixer, block_norms=block_norms)
