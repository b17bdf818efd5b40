"""Mixtral: gated experts in every layer."""

from __future__ import annotations

from model.config.blocks import Experts, ModelConfig
from model.config.fields import Fields
from model.config.reading import read_activation, read_attention, read_experts_per_token, read_window
from model.families import dense, names

NAMES = names.Names(
    experts=names.ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
)


def read_mixtral(fields: Fields) -> ModelConfig:
    """Return the config of a Mixtral, whose blocks are equal and have a window only if the config names one.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    experts = fields.count("num_local_experts")
    routed = Experts(
        experts,
        read_experts_per_token(fields, experts),
        fields.count("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "silu"),
    )
    mixer = read_attention(fields, window=read_window(fields))
    return dense.read_blocks(fields, mixer, routed)
