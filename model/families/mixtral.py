"""Mixtral: gated experts in every layer, two of eight for a token."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, Experts, ModelConfig
from model.config.reading import activation, attention, chosen_experts, common, layer_count, norms, window_of
from model.families import dense, names
from model.network import Network

_NAMES = names.Names(
    experts=names.ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
)


def mixtral(fields: Fields) -> ModelConfig:
    """Equal blocks, within a window where the config gives one."""
    experts = fields.count("num_local_experts")
    routed = Experts(
        experts,
        chosen_experts(fields, experts),
        fields.count("intermediate_size"),
        activation=activation(fields, "hidden_act", "silu"),
    )
    mixer = attention(fields, window=window_of(fields))
    block = Block(mixer, routed, norms(fields))
    return ModelConfig(**common(fields), blocks=(block,) * layer_count(fields))


def compose(config: ModelConfig) -> Network:
    """The layers with the tensor names of Hugging Face's Mixtral."""
    return dense.compose(config, _NAMES)
