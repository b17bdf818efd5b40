"""Qwen 2 and 3: Llamas with biases on queries, keys and values, or with an RMSNorm on every head; and sparse Qwen 3."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, Experts, HeadNorm, Mlp, ModelConfig
from model.config.reading import (
    attention,
    biases,
    chosen_experts,
    common,
    layer_count,
    norms,
    rotary,
)
from model.families.llama import compose as compose
from model.families.llama import dense


def qwen2(fields: Fields) -> ModelConfig:
    """A Llama with biases on queries, keys and values."""
    return dense(fields, attention(fields, query_bias=True, key_bias=True, value_bias=True))


def qwen3(fields: Fields) -> ModelConfig:
    """A Llama with an RMSNorm on every head of queries and keys."""
    return dense(fields, attention(fields, head_norm=HeadNorm.head, **biases(fields)))


def qwen3_moe(fields: Fields) -> ModelConfig:
    """Small gated experts; some layers may have one MLP instead."""
    # transformers 5 saves the second name.
    named = next((name for name in ("num_experts", "num_local_experts") if name in fields), "num_experts")
    count, experts = layer_count(fields), fields.count(named)
    every = fields.count("decoder_sparse_step", default=1)
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(isinstance(each, int) for each in listed):
        raise fields.error("mlp_only_layers", f"{listed!r:.60} is not a list of layers")
    routed = Experts(experts, chosen_experts(fields, experts), fields.count("moe_intermediate_size"))
    mixer = attention(fields, head_norm=HeadNorm.head, **biases(fields))
    dense_layers = set(listed)
    sparse = [layer not in dense_layers and (layer + 1) % every == 0 for layer in range(count)]
    dense_mlp = Mlp(fields.count("intermediate_size")) if not all(sparse) else None
    return ModelConfig(
        **common(fields),
        **rotary(fields, mixer.head_dim),
        blocks=tuple(Block(mixer, routed if each else dense_mlp, norms(fields)) for each in sparse),
    )
