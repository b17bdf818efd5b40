"""Models whose speed is compared with transformers.

There is one of about 100 million parameters per kind of layer, and two real shapes. Each is the name of a family of
transformers and the fields of its config. Small models have float32 weights, the real shapes bfloat16 weights, as
they are published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WINDOW = 48
"""Shorter than the prompt, so that windows cut it."""

_SMALL: dict[str, Any] = dict(
    vocab_size=32768,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


@dataclass(frozen=True)
class ModelShape:
    """A family of transformers, the fields of its config in addition to `common`, and the dtype of its weights."""

    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=lambda: _SMALL)
    weights: str = "float32"


_ALTERNATING = ["sliding_attention", "full_attention"] * 6

KINDS: dict[str, ModelShape] = {
    "Llama: plain": ModelShape("Llama"),
    "Mistral: windows": ModelShape("Mistral", dict(sliding_window=_WINDOW)),
    "Qwen2: biases": ModelShape("Qwen2"),
    "Qwen3: norms of heads": ModelShape("Qwen3"),
    "Gemma 2: norms after, soft caps": ModelShape(
        "Gemma2", dict(sliding_window=_WINDOW, query_pre_attn_scalar=64, layer_types=_ALTERNATING)
    ),
    "Gemma 3: two rope bases": ModelShape(
        "Gemma3Text",
        dict(
            sliding_window=_WINDOW,
            query_pre_attn_scalar=64,
            layer_types=_ALTERNATING,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "Phi-3: fused tensors, longrope of a part": ModelShape(
        "Phi3",
        dict(
            original_max_position_embeddings=1024,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.05 * index for index in range(24)],
                "long_factor": [1.0 + 0.5 * index for index in range(24)],
            },
        ),
    ),
    "OLMo 2: norms after, of whole queries": ModelShape("Olmo2", dict(tie_word_embeddings=False)),
    "GPT-2: LayerNorm, learned positions": ModelShape("GPT2", common={}),
    "SmolLM3: layers without rope": ModelShape("SmolLM3"),
    "Granite: multipliers": ModelShape(
        "Granite",
        dict(
            embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=8.0
        ),
    ),
}

REAL: dict[str, ModelShape] = {  # the published configs, but for what does not change their work
    "Llama-3.2-1B": ModelShape(
        "Llama",
        dict(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=True,
        ),
        {},
        "bfloat16",
    ),
    "Qwen3-0.6B": ModelShape(
        "Qwen3",
        dict(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
        ),
        {},
        "bfloat16",
    ),
}

MODELS = {**KINDS, **REAL}
