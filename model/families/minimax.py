"""MiniMax-M2: experts in every layer, weighted by sigmoids, and RMSNorms over all heads of queries and of keys."""

from __future__ import annotations

from model.config.blocks import Experts, ModelConfig
from model.config.fields import Fields
from model.config.mixers import HeadNorm
from model.config.reading import read_activation, read_attention, read_experts_per_token
from model.families import dense, names

NAMES = names.Names(
    experts=names.ExpertNames(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts",
        "w1",
        "w3",
        "w2",
        choice_bias="block_sparse_moe.e_score_correction_bias",
    )
)


def read_minimax_m2(fields: Fields) -> ModelConfig:
    """Return the config of a MiniMax-M2, whose blocks are equal; layers for multi-token prediction are not read.

    Published configs have the number of rotated elements of a head in `rotary_dim`.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    experts = fields.count("num_local_experts")
    routed = Experts(
        experts,
        read_experts_per_token(fields, experts),
        fields.count("intermediate_size"),
        activation=read_activation(fields, "hidden_act", "silu"),
        scoring="sigmoid",
        choice_bias=True,
    )
    head_dim = fields.count("head_dim", default=128)
    rotated = fields.count("rotary_dim", default=head_dim)
    mixer = read_attention(
        fields,
        partial=True,
        default_theta=5e6,
        default_head_dim=128,
        default_factor=rotated / head_dim,
        head_norm=HeadNorm.width,
    )
    return dense.read_blocks(fields, mixer, routed)
