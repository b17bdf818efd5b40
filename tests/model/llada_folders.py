"""LLaDA folders written on the spot: tiny random weights under LLaDA's names, and the same weights as a Llama's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.model.folders import TINY, Weights, byte_tokenizer, random_weights

FIELDS: dict[str, Any] = dict(
    architectures=["LLaDAModelLM"],
    model_type="llada",
    activation_type="silu",
    alibi=False,
    attention_layer_norm=False,
    block_group_size=1,
    block_type="llama",
    d_model=32,
    embedding_size=300,
    eos_token_id=2,
    include_bias=False,
    include_qkv_bias=False,
    layer_norm_type="rms",
    mask_token_id=299,
    max_sequence_length=64,
    mlp_hidden_size=48,
    mlp_ratio=4,
    n_heads=4,
    n_kv_heads=2,
    n_layers=2,
    rms_norm_eps=1e-5,
    rope=True,
    rope_theta=10000.0,
    vocab_size=300,
    weight_tying=False,
)
"""Fields of GSAI-ML/LLaDA-8B-Base that decide on its layers, with the sizes of `folders.TINY`."""

_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def name_in_llada(name: str) -> str:
    """Return the name in a LLaDA of a tensor of a Llama."""
    for llama, llada in _NAMES.items():
        name = name.replace(llama, llada)
    return name


def write_tensors(folder: Path, weights: Weights) -> None:
    """Write the weights of a Llama to a folder under LLaDA's names."""
    tensors = {name_in_llada(name): array for name, array in weights.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def write_llada(folder: Path, seed: int = 0, dtype: Any = np.float32, **changes: Any) -> Path:
    """Write a LLaDA with the weights of `folders.random_weights`; a change of None leaves a field out."""
    folder.mkdir()
    config = {name: field for name, field in {**FIELDS, **changes}.items() if field is not None}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tied = {"tie_word_embeddings": config["weight_tying"]}
    weights = random_weights(TINY | tied, seed)
    write_tensors(folder, {name: array.astype(dtype) for name, array in weights.items()})
    return folder
