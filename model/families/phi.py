"""Phi-3 and Phi-4: Llamas with fused tensors, which may rotate the first elements of a head only."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import ModelConfig
from model.config.reading import attention, norms, window_of
from model.families import dense, names

NAMES = names.Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def read_phi3(fields: Fields) -> ModelConfig:
    """Read a config of equal blocks, with a window where the config names one."""
    mixer = attention(fields, partial=True, window=window_of(fields))
    return dense.read_blocks(fields, mixer, block_norms=norms(fields, default=1e-5))
