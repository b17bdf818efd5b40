"""gpt-oss: biases everywhere, a sink per head, experts in every layer, windows in every second layer."""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.parts import Block, Experts, ModelConfig
from model.config.reading import (
    attention,
    chosen_experts,
    common,
    layer_count,
    norms,
    rotary,
    windows,
)


def gpt_oss(fields: Fields) -> ModelConfig:
    """Blocks that differ in their windows."""
    experts = fields.count("num_local_experts")
    mixer = attention(fields, query_bias=True, key_bias=True, value_bias=True, output_bias=True, sinks=True)
    routed = Experts(
        experts,
        chosen_experts(fields, experts),
        fields.count("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    each = windows(fields, layer_count(fields), fields.count("sliding_window"), full_every=2)
    return ModelConfig(
        **common(fields),
        **rotary(fields, mixer.head_dim),
        blocks=tuple(Block(replace(mixer, window=window), routed, norms(fields)) for window in each),
    )
