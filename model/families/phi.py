"""Phi-3 and Phi-4: Llamas with fused tensors of queries, keys and values and of gate and up; part of a head turns."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import ModelConfig
from model.config.reading import attention, window_of
from model.families import dense, names
from model.network import Network

_NAMES = names.Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def phi3(fields: Fields) -> ModelConfig:
    """Equal blocks, within a window where the config gives one."""
    return dense.equal_blocks(fields, attention(fields, partial=True, window=window_of(fields)), eps=1e-5)


def compose(config: ModelConfig) -> Network:
    """The layers with the tensor names of Hugging Face's Phi-3."""
    return dense.compose(config, _NAMES)
