"""gpt-oss: biases everywhere, a sink per head, experts in every layer, windows in every second layer."""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.parts import Block, Experts, ModelConfig
from model.config.reading import (
    attention,
    chosen_experts,
    common,
    full_in_every,
    layer_count,
    norms,
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
    window = fields.count("sliding_window")
    each = windows(fields, full_in_every(2, layer_count(fields), window), window)
    return ModelConfig(
        **common(fields),
        blocks=tuple(Block(replace(mixer, window=window), routed, norms(fields)) for window in each),
    )
