"""AFMoE (Trinity): gated attention with norms of heads, and experts with norms before and after them.

Layers with a window rotate queries and keys, those without one do not. The first layers have an MLP.
"""

from __future__ import annotations

from dataclasses import replace

from model.config.blocks import Block, Experts, ModelConfig
from model.config.fields import Fields
from model.config.mixers import HeadNorm
from model.config.reading import (
    alternate_windows,
    read_activation,
    read_attention,
    read_biases,
    read_common,
    read_count_or_zero,
    read_experts_per_token,
    read_gated_mlp,
    read_layer_count,
    read_norms,
    read_window,
    read_windows,
)
from model.families import names

NAMES = names.Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_mlp_layernorm",
    after_mlp="post_mlp_layernorm",
    output_gate="self_attn.gate_proj",
    experts=names.ExpertNames(
        router="mlp.router.gate", shared="mlp.shared_experts", choice_bias="mlp.expert_bias"
    ),
)


def read_afmoe(fields: Fields) -> ModelConfig:
    """Return the config of an AFMoE; layers with a window rotate, and the first `num_dense_layers` have an MLP.

    Windows follow `layer_types`. Without this field every `global_attn_every_n_layers`th layer has no window.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    rotated = read_attention(
        fields, default_head_dim=128, head_norm=HeadNorm.head, output_gate=True, **read_biases(fields)
    )
    unrotated = replace(rotated, positions=None)
    count, window = read_layer_count(fields), read_window(fields, 1024)
    every = fields.count("global_attn_every_n_layers", default=4)
    is_full = [window is None for window in read_windows(fields, alternate_windows(every, count, 1), 1)]
    norms, dense_layers = (
        read_norms(fields, default=1e-5, after=True),
        read_count_or_zero(fields, "num_dense_layers", 1),
    )
    mlp, experts = read_gated_mlp(fields), _read_experts(fields)
    shared = read_common(fields)
    return ModelConfig(
        **shared,
        blocks=tuple(
            Block(
                unrotated if full else replace(rotated, window=window),
                mlp if layer < dense_layers else experts,
                norms,
            )
            for layer, full in enumerate(is_full)
        ),
        embedding_scale=shared["hidden_size"] ** 0.5 if fields.flag("mup_enabled") else 1.0,
    )


def _read_experts(fields: Fields) -> Experts:
    """Return the routed experts, which are weighted by sigmoids and selected with a bias, and the shared ones."""
    experts, width = (
        fields.count("num_experts", default=64),
        fields.count("moe_intermediate_size", default=1408),
    )
    return Experts(
        experts,
        read_experts_per_token(fields, experts),
        width,
        shared_width=read_count_or_zero(fields, "num_shared_experts", 2) * width,
        activation=read_activation(fields, "hidden_act", "silu"),
        scoring="sigmoid",
        choice_bias=True,
        scale=fields.number("route_scale", default=1.0),
    )
