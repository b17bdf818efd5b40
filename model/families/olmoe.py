"""OLMoE: experts in every layer, one RMSNorm over the heads of queries and one over those of keys."""

from __future__ import annotations

from model.config.blocks import Experts, ModelConfig
from model.config.fields import Fields
from model.config.mixers import HeadNorm
from model.config.reading import (
    read_activation,
    read_attention,
    read_biases,
    read_experts_per_token,
    read_norms,
)
from model.families.dense import read_blocks


def read_olmoe(fields: Fields) -> ModelConfig:
    """Return the config of an OLMoE, whose blocks are equal; `clip_qkv` is refused.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    if fields.get("clip_qkv", None) is not None:
        fields.unsupported("clip_qkv", "queries, keys and values are not clipped")
    experts = fields.count("num_experts")
    routed = Experts(
        experts,
        read_experts_per_token(fields, experts),
        fields.count("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "silu"),
        renormalise=fields.flag("norm_topk_prob"),
    )
    mixer = read_attention(fields, head_norm=HeadNorm.width, **read_biases(fields))
    return read_blocks(fields, mixer, routed, read_norms(fields, default=1e-5))
