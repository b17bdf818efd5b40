"""Phi-3 and Phi-4: Llamas with fused tensors, which may rotate the first elements of a head only."""

from __future__ import annotations

from model.config.blocks import ModelConfig
from model.config.fields import Fields
from model.config.reading import read_attention, read_norms, read_window
from model.families import dense, names

NAMES = names.Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def read_phi3(fields: Fields) -> ModelConfig:
    """Return the config of a Phi-3 or Phi-4, whose blocks are equal and have a window only if the config names one.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    mixer = read_attention(fields, partial=True, window=read_window(fields))
    return dense.read_blocks(fields, mixer, block_norms=read_norms(fields, default=1e-5))
