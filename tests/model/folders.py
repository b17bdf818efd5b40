"""Model folders written on the spot: a tiny Llama with random weights and a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

from model.config import ModelConfig
from model.families import load_config
from model.loading.checkpoint import open_checkpoint

TINY: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=32,
    intermediate_size=48,
    max_position_embeddings=64,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    torch_dtype="float32",
    vocab_size=300,
)
"""A Llama with every documented field, small enough for a test; 300 tokens are 256 bytes, 3 special ones and room."""


Weights = dict[str, np.ndarray]


def random_weights(config: dict[str, Any], seed: int = 0) -> Weights:
    """Return weights of Hugging Face's Llama, scaled so that attention and logits are far from uniform."""
    generator = np.random.default_rng(seed)
    hidden, width, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    query, key_value = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return generator.uniform(0.5, 1.5, hidden).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": generator.standard_normal((vocabulary, hidden)).astype(np.float32)
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights[name + "input_layernorm.weight"] = norm()
        weights[name + "post_attention_layernorm.weight"] = norm()
        weights[name + "self_attn.q_proj.weight"] = matrix(query, hidden)
        weights[name + "self_attn.k_proj.weight"] = matrix(key_value, hidden)
        weights[name + "self_attn.v_proj.weight"] = matrix(key_value, hidden)
        weights[name + "self_attn.o_proj.weight"] = matrix(hidden, query)
        weights[name + "mlp.gate_proj.weight"] = matrix(width, hidden)
        weights[name + "mlp.up_proj.weight"] = matrix(width, hidden)
        weights[name + "mlp.down_proj.weight"] = matrix(hidden, width)
    weights["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocabulary, hidden)
    return weights


def byte_tokenizer(vocabulary: int = 259, add_bos: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer of 3 special tokens and 256 bytes: characters outside ASCII take several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    vocab |= {f"extra{number}": number for number in range(len(vocab), vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if add_bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def write_folder(folder: Path, seed: int = 0, dtype: Any = np.float32, **changes: Any) -> Path:
    """Write a model folder; `changes` are fields of its config.json, and a field of None is left out."""
    folder.mkdir()
    config = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    weights = {key: value.astype(dtype) for key, value in random_weights(config, seed).items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


def load(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Return the config of a model folder, and its tensors by their names in the checkpoint."""
    config = load_config(folder)
    return config, dict(open_checkpoint(folder, config))
