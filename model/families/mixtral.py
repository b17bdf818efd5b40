"""Mixtral: gated experts in every layer, two of eight for a token."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, Experts, ModelConfig
from model.config.reading import attention, chosen_experts, common, layer_count, norms, window_of


def mixtral(fields: Fields) -> ModelConfig:
    """Equal blocks, within a window where the config gives one."""
    experts = fields.count("num_local_experts")
    routed = Experts(experts, chosen_experts(fields, experts), fields.count("intermediate_size"))
    mixer = attention(fields, window=window_of(fields))
    block = Block(mixer, routed, norms(fields))
    return ModelConfig(**common(fields), blocks=(block,) * layer_count(fields))
