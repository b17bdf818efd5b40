"""Tiny models of every dense family, with odd sizes, as transformers makes them from these fields of a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.deep import deep_except
from tests.model.oracle import random_model

WINDOWED = {"rope_type": "default", "rope_theta": 5000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0],
}

LATENT: dict[str, Any] = dict(
    num_key_value_heads=4,
    kv_lora_rank=20,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    moe_intermediate_size=13,
    first_k_dense_replace=1,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}

DELTA: dict[str, Any] = dict(
    num_hidden_layers=4,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=10,
    linear_value_head_dim=14,
    num_experts=9,
    num_experts_per_tok=3,
    moe_intermediate_size=13,
    shared_expert_intermediate_size=22,
)

COMMON: dict[str, Any] = dict(
    vocab_size=151,
    hidden_size=36,
    intermediate_size=50,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": (
        "Llama",
        dict(attention_bias=True, mlp_bias=True, hidden_size=48, tie_word_embeddings=True),
    ),
    "llama with longrope": (
        "Llama",
        dict(
            head_dim=12,
            rope_parameters={
                **LONGROPE,
                "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0],
                "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=14)),
    "mistral with a window": ("Mistral", dict(sliding_window=5, head_dim=12, num_key_value_heads=1)),
    "ministral": (
        "Ministral",
        dict(
            sliding_window=7,
            head_dim=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "ministral3": (
        "Ministral3",
        dict(
            head_dim=14,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
    ),
    "ministral3 with a window": (
        "Ministral3",
        dict(
            head_dim=12,
            sliding_window=5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.0,
            },
        ),
    ),
    "qwen2": ("Qwen2", dict(hidden_size=40, intermediate_size=51, tie_word_embeddings=True)),
    "qwen2 with windows": (
        "Qwen2",
        dict(hidden_size=64, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(head_dim=12, num_attention_heads=6)),
    "gemma2": (
        "Gemma2",
        dict(
            head_dim=12,
            sliding_window=5,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        ),
    ),
    "gemma2 without caps": (
        "Gemma2",
        dict(
            head_dim=20,
            num_key_value_heads=1,
            sliding_window=40,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            head_dim=14,
            sliding_window=6,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
            num_key_value_heads=1,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": WINDOWED,
            },
        ),
    ),
    "gemma4": (
        "Gemma4",
        dict(
            num_hidden_layers=6,
            head_dim=12,
            global_head_dim=20,
            num_kv_shared_layers=3,
            hidden_size_per_layer_input=10,
            vocab_size_per_layer_input=151,
            use_double_wide_mlp=True,
            sliding_window=5,
            final_logit_softcapping=5.0,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]
            + ["sliding_attention", "full_attention", "full_attention"],
        ),
    ),
    "gemma4 with keys as values": (
        "Gemma4",
        dict(
            num_hidden_layers=4,
            head_dim=14,
            global_head_dim=24,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            num_kv_shared_layers=1,
            hidden_size_per_layer_input=0,
            sliding_window=7,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    "gemma4 with one key/value head": (
        "Gemma4",
        dict(
            num_hidden_layers=3,
            head_dim=16,
            global_head_dim=18,
            num_key_value_heads=1,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=160,
            sliding_window=40,
            rope_parameters={
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.6,
                    "rope_theta": 5e4,
                },
                "sliding_attention": WINDOWED,
            },
        ),
    ),
    "phi3": ("Phi3", dict(hidden_size=48, num_key_value_heads=4)),
    "phi3 of a part of the head": (
        "Phi3",
        dict(
            hidden_size=48,
            sliding_window=9,
            original_max_position_embeddings=16,
            rope_parameters={**LONGROPE, "rope_theta": 10000.0, "partial_rotary_factor": 0.84},
        ),
    ),
    "olmo2": ("Olmo2", dict(hidden_size=56)),
    "olmo2 with one key/value head": (
        "Olmo2",
        dict(hidden_size=48, num_key_value_heads=1, attention_bias=True),
    ),
    "mixtral": ("Mixtral", dict(head_dim=14, num_local_experts=5, num_experts_per_tok=2)),
    "mixtral with a window": (
        "Mixtral",
        dict(num_local_experts=20, num_experts_per_tok=3, sliding_window=5, head_dim=12),
    ),
    "qwen3 with experts": (
        "Qwen3Moe",
        dict(
            num_experts=9,
            num_experts_per_tok=4,
            moe_intermediate_size=22,
            head_dim=12,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    ),
    "olmoe": ("Olmoe", dict(hidden_size=56, num_experts=16, num_experts_per_tok=8, intermediate_size=21)),
    "gpt-oss": (
        "GptOss",
        dict(
            hidden_size=48,
            head_dim=12,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=5,
            num_hidden_layers=4,
        ),
    ),
    "gpt-oss with yarn": (
        "GptOss",
        dict(
            head_dim=14,
            num_local_experts=9,
            num_experts_per_tok=4,
            sliding_window=40,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        ),
    ),
    "deepseek v2": (
        "DeepseekV2",
        dict(
            **LATENT,
            q_lora_rank=None,
            n_routed_experts=6,
            n_shared_experts=2,
            num_experts_per_tok=3,
            routed_scaling_factor=1.5,
            topk_method="greedy",
            norm_topk_prob=False,
        ),
    ),
    "deepseek v2 with groups": (
        "DeepseekV2",
        dict(
            **LATENT,
            q_lora_rank=18,
            n_routed_experts=24,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=3,
            topk_group=2,
            routed_scaling_factor=4.0,
            topk_method="group_limited_greedy",
            norm_topk_prob=False,
            rope_parameters=YARN,
        ),
    ),
    "deepseek v3": (
        "DeepseekV3",
        dict(
            **LATENT,
            q_lora_rank=22,
            n_routed_experts=32,
            n_shared_experts=1,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters=YARN,
        ),
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        dict(
            **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"},
            q_lora_rank=22,
            n_routed_experts=12,
            n_shared_experts=2,
            num_experts_per_tok=3,
            routed_scaling_factor=1.8,
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
    ),
    "glm4-moe": (
        "Glm4Moe",
        dict(
            head_dim=16,
            attention_bias=True,
            use_qk_norm=True,
            moe_intermediate_size=13,
            n_routed_experts=12,
            n_shared_experts=1,
            num_experts_per_tok=3,
            routed_scaling_factor=2.5,
        ),
    ),
    "glm4-moe with groups": (
        "Glm4Moe",
        dict(
            head_dim=20,
            moe_intermediate_size=22,
            n_routed_experts=32,
            n_shared_experts=2,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=2,
            norm_topk_prob=False,
            partial_rotary_factor=0.25,
            tie_word_embeddings=True,
        ),
    ),
    "afmoe": (
        "Afmoe",
        dict(
            num_hidden_layers=4,
            head_dim=12,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=13,
            num_shared_experts=1,
            num_dense_layers=1,
            route_scale=2.5,
            sliding_window=5,
            global_attn_every_n_layers=2,
            mup_enabled=True,
        ),
    ),
    "afmoe with a window in all layers": (
        "Afmoe",
        dict(
            num_hidden_layers=2,
            head_dim=16,
            num_experts=16,
            num_experts_per_tok=2,
            moe_intermediate_size=22,
            num_shared_experts=2,
            num_dense_layers=0,
            sliding_window=7,
            layer_types=["sliding_attention"] * 2,
            num_key_value_heads=1,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "solar-open": (
        "SolarOpen",
        dict(
            head_dim=12,
            moe_intermediate_size=13,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            routed_scaling_factor=1.5,
        ),
    ),
    "minimax-m2": (
        "MiniMaxM2",
        dict(head_dim=14, num_local_experts=8, num_experts_per_tok=3, intermediate_size=21),
    ),
    "minimax-m2 of a part of the head": (
        "MiniMaxM2",
        dict(
            head_dim=16,
            rotary_dim=8,
            num_key_value_heads=1,
            num_local_experts=8,
            num_experts_per_tok=2,
            intermediate_size=30,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-next": ("Qwen3Next", DELTA),
    "qwen3.5": (
        "Qwen3_5",
        dict(
            num_hidden_layers=4,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=10,
            linear_value_head_dim=14,
        ),
    ),
    "qwen3.5 with experts": (
        "Qwen3_5Moe",
        {
            **DELTA,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-next with an mlp and biases": (
        "Qwen3Next",
        {
            **DELTA,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", dict(hidden_size=64, num_hidden_layers=4)),
    "smollm3 with windows": (
        "SmolLM3",
        dict(
            hidden_size=48,
            no_rope_layers=[0, 1, 0],
            use_sliding_window=True,
            sliding_window=5,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "granite": (
        "Granite",
        dict(
            hidden_size=48,
            embedding_multiplier=11.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
            logits_scaling=3.0,
            attention_bias=True,
        ),
    ),
    "gpt2": (
        "GPT2",
        dict(n_embd=36, n_layer=3, n_head=3, n_positions=64, layer_norm_epsilon=1e-5),
    ),
    "gpt2 untied": (
        "GPT2",
        dict(
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=64,
            n_inner=70,
            activation_function="gelu",
            scale_attn_weights=False,
            tie_word_embeddings=False,
        ),
    ),
    "mamba with biases": (
        "Mamba",
        dict(hidden_size=40, use_bias=True, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=False),
    ),
    "mamba2 with biases": (
        "Mamba2",
        dict(
            num_heads=4,
            head_dim=18,
            n_groups=1,
            state_size=9,
            use_bias=True,
            use_conv_bias=False,
            tie_word_embeddings=True,
            time_step_limit=[0.3, 0.9],
        ),
    ),
    "mamba2": (
        "Mamba2",
        dict(hidden_size=48, num_heads=6, head_dim=16, n_groups=2, state_size=10, chunk_size=4),
    ),
    "mamba": ("Mamba", dict(state_size=6, expand=3, time_step_rank=5)),
}
"""What to try, as the name of a transformers class and the fields of its config; head sizes from 9 elements up."""


FEATURES = {
    "plain attention": ["mistral", "phi3", "llama with biases", "smollm3", "ministral3"],
    "one key/value head": [
        "mistral with a window",
        "gemma3",
        "olmo2 with one key/value head",
        "gemma2 without caps",
    ],
    "windows": ["ministral", "qwen2 with windows", "smollm3 with windows", "gemma3"],
    "keys normalised whole": ["olmo2", "olmoe", "minimax-m2"],
    "layers of other head sizes": [
        "gemma4 with one key/value head",
        "gemma4 with keys as values",
        "gemma4",
    ],
    "experts": [
        "mixtral with a window",
        "qwen3 with experts",
        "gpt-oss with yarn",
        "olmoe",
        "glm4-moe",
        "solar-open",
    ],
    "experts between norms": ["afmoe"],
    "latent attention": ["deepseek v3", "deepseek v2", "deepseek v2 with groups", "glm4-moe-lite"],
    "states": ["mamba", "mamba2", "qwen3-next with an mlp and biases", "qwen3.5", "qwen3.5 with experts"],
    "scaled residuals": ["granite"],
    "biases of all projections": ["gpt2 untied"],
}
"""Models by what ranks divide in another way than those of other features."""


def each_feature(*extra_models: str, without: Sequence[str] = ()) -> list[Any]:
    """Return parameters of a test: a model of every feature and some others; `make deep` takes all models."""
    quick = {*(models[0] for models in FEATURES.values()), *extra_models}
    return deep_except([name for name in TINY if name not in without], quick)


def tiny_model(name: str) -> Any:
    """Return a model of transformers with random weights, in float32."""
    family, changes = TINY[name]
    fields = {**COMMON, **changes}
    if family == "GPT2":
        fields = {
            key: value for key, value in fields.items() if not key.startswith(("num_", "hidden_", "max_"))
        }
    return random_model(family, fields, seed=len(name))


def write_tiny(folder: Path, name: str) -> Path:
    """Write such a model as a folder."""
    tiny_model(name).save_pretrained(folder)
    return folder
