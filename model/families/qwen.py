"""Qwen 2 and 3: Llamas with biases of queries, keys and values, or with an RMSNorm on every head; Qwen 3 MoE."""

from __future__ import annotations

from typing import Any

from model.config.blocks import Block, Experts, Mlp, ModelConfig
from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm
from model.config.reading import (
    read_activation,
    read_attention,
    read_biases,
    read_common,
    read_experts_per_token,
    read_gated_mlp,
    read_layer_count,
    read_norms,
    read_window,
    read_windows,
)
from model.families.dense import read_blocks


def read_qwen2(fields: Fields) -> ModelConfig:
    """Return the config of a Qwen 2: a Llama with biases of queries, keys and values.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return _read_dense(fields, read_attention(fields, query_bias=True, key_bias=True, value_bias=True))


def read_qwen3(fields: Fields) -> ModelConfig:
    """Return the config of a Qwen 3: a Llama with an RMSNorm on every head of queries and keys.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return _read_dense(fields, read_attention(fields, head_norm=HeadNorm.head, **read_biases(fields)))


def _read_dense(fields: Fields, mixer: GroupedAttention) -> ModelConfig:
    """Return a config of blocks with the attention `mixer` and an MLP, which may differ in their windows.

    If `use_sliding_window` is true, layers from number `max_window_layers` on have a window, or those of `layer_types`.

    Raises:
        ModelError: `max_window_layers` is not a whole number of at least 0.
    """
    window = read_window(fields, 4096) if fields.flag("use_sliding_window") else None
    full = fields.get("max_window_layers", 28)
    if isinstance(full, bool) or not isinstance(full, int) or full < 0:
        raise fields.error("max_window_layers", f"{full!r:.60} is not a whole number")
    default = [window if layer >= full else None for layer in range(read_layer_count(fields))]
    return read_blocks(fields, mixer, layer_windows=read_windows(fields, default, window))


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    """Return the config of a Qwen 3 MoE, whose layers have experts or, as `read_mlps` decides, an MLP.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    window = read_window(fields, 4096) if fields.flag("use_sliding_window") else None
    mixer = read_attention(fields, head_norm=HeadNorm.head, window=window, **read_biases(fields))
    mlps = read_mlps(fields, renormalise=fields.flag("norm_topk_prob"))
    return ModelConfig(
        **read_common(fields), blocks=tuple(Block(mixer, mlp, read_norms(fields)) for mlp in mlps)
    )


def read_mlps(fields: Fields, **quirks: Any) -> list[Mlp | Experts]:
    """Return the experts or the MLP of every layer, in order.

    Every `decoder_sparse_step`-th layer has experts, except for `mlp_only_layers`. `quirks` are arguments of `Experts`
    that the family decides.

    Raises:
        ModelError: `mlp_only_layers` is not a list of layer numbers.
    """
    # transformers 5 saves the second name.
    named = next((name for name in ("num_experts", "num_local_experts") if name in fields), "num_experts")
    count, experts = read_layer_count(fields), fields.count(named)
    every = fields.count("decoder_sparse_step", default=1)
    mlp_only = fields.get("mlp_only_layers", [])
    if not isinstance(mlp_only, list) or not all(isinstance(layer, int) for layer in mlp_only):
        raise fields.error(
            "mlp_only_layers", f"{mlp_only!r:.60} is not a list of layers; give their numbers from 0"
        )
    routed = Experts(
        experts,
        read_experts_per_token(fields, experts),
        fields.count("moe_intermediate_size"),
        activation=read_activation(fields, "hidden_act", "silu"),
        **quirks,
    )
    sparse = set(range(every - 1, count, every)) - set(mlp_only)
    mlp = routed if len(sparse) == count else read_gated_mlp(fields)
    return [routed if layer in sparse else mlp for layer in range(count)]
