"""OLMoE: experts in every layer, and an RMSNorm on whole queries and keys."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.mixers import HeadNorm
from model.config.parts import Block, Experts, ModelConfig
from model.config.reading import activation, attention, biases, chosen_experts, common, layer_count, norms
from model.families.dense import compose as compose


def olmoe(fields: Fields) -> ModelConfig:
    """Equal blocks."""
    if fields.get("clip_qkv", None) is not None:
        fields.unsupported("clip_qkv", "queries, keys and values are not clipped")
    experts = fields.count("num_experts")
    routed = Experts(
        experts,
        chosen_experts(fields, experts),
        fields.count("intermediate_size"),
        activation=activation(fields, "hidden_act", "silu"),
        renormalise=fields.flag("norm_topk_prob"),
    )
    mixer = attention(fields, head_norm=HeadNorm.width, **biases(fields))
    block = Block(mixer, routed, norms(fields, default=1e-5))
    return ModelConfig(**common(fields), blocks=(block,) * layer_count(fields))
