"""GLM-4.5 and Solar Open: grouped attention, and the routed and shared experts of DeepSeek-V3.

GLM-4.5 rotates half of each head and may have an RMSNorm on every head; its first layers have an MLP. Solar Open
rotates whole heads and has experts in every layer. Layers for multi-token prediction are not read.
"""

from __future__ import annotations

from typing import Any

from model.config.blocks import ModelConfig
from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm
from model.config.reading import read_attention, read_count_or_zero
from model.families.deepseek import compose, read_first_dense, read_sigmoid_experts

__all__ = ["compose", "read_glm4_moe", "read_solar_open"]


def read_glm4_moe(fields: Fields) -> ModelConfig:
    """Return the config of a GLM-4.5: `first_k_dense_replace` layers with an MLP, by default one, then experts.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    mixer = _read_attention(
        fields,
        partial=True,
        default_factor=0.5,
        head_norm=HeadNorm.head if fields.flag("use_qk_norm") else None,
    )
    return read_first_dense(
        fields, mixer, read_sigmoid_experts(fields), read_count_or_zero(fields, "first_k_dense_replace", 1)
    )


def read_solar_open(fields: Fields) -> ModelConfig:
    """Return the config of a Solar Open, which has experts in every layer.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    mixer = _read_attention(fields, default_theta=1e6, default_head_dim=128)
    return read_first_dense(fields, mixer, read_sigmoid_experts(fields), 0)


def _read_attention(fields: Fields, **quirks: Any) -> GroupedAttention:
    """Return attention with biases of queries, keys and values by `attention_bias`, and none of the output.

    `quirks` are further arguments of `read_attention`.
    """
    bias = fields.flag("attention_bias")
    return read_attention(fields, query_bias=bias, key_bias=bias, value_bias=bias, **quirks)
