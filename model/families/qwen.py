"""Qwen 2 and 3: Llamas with biases on queries, keys and values, or with an RMSNorm on every head; and sparse Qwen 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm
from model.config.parts import Block, Experts, Mlp, ModelConfig
from model.config.reading import (
    activation,
    attention,
    biases,
    chosen_experts,
    common,
    gated_mlp,
    layer_count,
    norms,
    window_of,
    windows,
)
from model.families.dense import compose as compose


def qwen2(fields: Fields) -> ModelConfig:
    """A Llama with biases on queries, keys and values."""
    return _dense(fields, attention(fields, query_bias=True, key_bias=True, value_bias=True))


def qwen3(fields: Fields) -> ModelConfig:
    """A Llama with an RMSNorm on every head of queries and keys."""
    return _dense(fields, attention(fields, head_norm=HeadNorm.head, **biases(fields)))


def _dense(fields: Fields, mixer: GroupedAttention) -> ModelConfig:
    """Blocks that differ in their windows: where `use_sliding_window` says so, from layer `max_window_layers` on."""
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    full = fields.get("max_window_layers", 28)
    if isinstance(full, bool) or not isinstance(full, int) or full < 0:
        raise fields.error("max_window_layers", f"{full!r:.60} is not a whole number")
    default = [window if layer >= full else None for layer in range(layer_count(fields))]
    mlp, around = gated_mlp(fields), norms(fields)
    each = windows(fields, default, window)
    return ModelConfig(
        **common(fields), blocks=tuple(Block(replace(mixer, window=own), mlp, around) for own in each)
    )


def qwen3_moe(fields: Fields) -> ModelConfig:
    """Small gated experts; some layers may have one MLP instead."""
    window = window_of(fields, 4096) if fields.flag("use_sliding_window") else None
    mixer = attention(fields, head_norm=HeadNorm.head, window=window, **biases(fields))
    return ModelConfig(
        **common(fields),
        blocks=tuple(
            Block(mixer, each, norms(fields))
            for each in feed_forwards(fields, renormalise=fields.flag("norm_topk_prob"))
        ),
    )


def feed_forwards(fields: Fields, **quirks: Any) -> list[Mlp | Experts]:
    """The experts of each layer, with what a family adds to them, or the MLP that it has instead."""
    # transformers 5 saves the second name.
    named = next((name for name in ("num_experts", "num_local_experts") if name in fields), "num_experts")
    count, experts = layer_count(fields), fields.count(named)
    every = fields.count("decoder_sparse_step", default=1)
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(isinstance(each, int) for each in listed):
        raise fields.error("mlp_only_layers", f"{listed!r:.60} is not a list of layers")
    routed = Experts(
        experts,
        chosen_experts(fields, experts),
        fields.count("moe_intermediate_size"),
        activation=activation(fields, "hidden_act", "silu"),
        **quirks,
    )
    dense = set(listed)
    sparse = [layer not in dense and (layer + 1) % every == 0 for layer in range(count)]
    mlp = routed if all(sparse) else gated_mlp(fields)
    return [routed if each else mlp for each in sparse]
