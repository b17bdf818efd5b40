"""Random configurations of every dense family, as transformers takes them: odd sizes, every variant that is read."""

from __future__ import annotations

import random
from typing import Any

FAMILIES = (
    "Llama Mistral Ministral Ministral3 Qwen2 Qwen3 Gemma2 Gemma3 Phi3 Olmo2 GPT2 SmolLM3 Granite".split()
)
POSITIONS = 64
ORIGINAL = 12
"""Positions that scaled rotations were first trained on, fewer than the tokens of a prompt may be."""
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
_ROPES = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OWN_HEAD_SIZE = {
    "Llama",
    "Mistral",
    "Ministral",
    "Ministral3",
    "Qwen3",
    "Gemma2",
    "Gemma3",
    "SmolLM3",
    "Granite",
}
_NAMED_HEAD_SIZE = {"Ministral", "Ministral3", "Gemma2", "Gemma3"}
_BIASED_ATTENTION = {"Llama", "Qwen3", "Gemma2", "Gemma3", "Olmo2", "SmolLM3", "Granite"}
_BIASED_MLP = {"Llama", "SmolLM3", "Granite"}


def drawn(family: str, seed: int) -> dict[str, Any]:
    """Return the fields of a config of a transformers family; equal seeds give equal fields."""
    draw = random.Random(f"{family} {seed}")
    if family == "GPT2":
        return _gpt2(draw)
    kv_heads = draw.choice((1, 1, 2, 3, 4))
    heads = kv_heads * draw.choice((1, 2, 3))
    head_dim = draw.choice((12, 14, 16, 18, 20, 30, 32, 66))
    layers = draw.randint(1, 4)
    fields: dict[str, Any] = dict(
        vocab_size=draw.randint(80, 200),
        hidden_size=heads * head_dim,
        intermediate_size=draw.randint(17, 140),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=draw.random() < 0.5,
        rms_norm_eps=draw.choice((1e-6, 1e-5, 1e-3)),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    if family in _NAMED_HEAD_SIZE or (family in _OWN_HEAD_SIZE and draw.random() < 0.7):
        fields |= dict(head_dim=head_dim, hidden_size=heads * draw.randint(20 // heads + 1, 150 // heads))
    activation = "hidden_activation" if family.startswith("Gemma") else "hidden_act"
    fields[activation] = draw.choice(_ACTIVATIONS)
    if family in _BIASED_ATTENTION:
        fields["attention_bias"] = draw.random() < 0.4
    if family in _BIASED_MLP:
        fields["mlp_bias"] = draw.random() < 0.4
    if family == "Qwen3":
        fields["head_dim"] = head_dim
    if family == "Phi3":
        partial = draw.choice((1.0, 0.75, 0.5))
        width = int(head_dim * partial)
        rope = _rope(draw, width, ("default",) if width % 2 else ("default", "longrope"))
        fields |= dict(original_max_position_embeddings=ORIGINAL)
        fields["rope_parameters"] = rope | {"partial_rotary_factor": partial}
    else:
        # transformers knows no types whose frequencies change where a model has several rotations.
        rope_types = tuple(
            rope_type
            for rope_type in _ROPES
            if family != "Gemma3" or rope_type not in ("dynamic", "longrope")
        )
        fields["rope_parameters"] = rope = _rope(draw, head_dim, rope_types)
    if (
        family == "Ministral3"
    ):  # queries are scaled beyond the original context, so the model has no such positions
        scaled = draw.random() < 0.5
        rope |= {"llama_4_scaling_beta": 0.1 * scaled}
        rope |= {"original_max_position_embeddings": POSITIONS if scaled else ORIGINAL}
    fields |= _windows(draw, family, layers)
    if family == "Gemma3":
        narrow = {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4))}
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": narrow}
    if family.startswith("Gemma"):
        fields |= dict(
            query_pre_attn_scalar=draw.choice((8, 20, 256)),
            attn_logit_softcapping=draw.choice((None, 2.0, 50.0)),
            final_logit_softcapping=draw.choice((None, 3.0, 30.0)),
        )
    if family == "SmolLM3":
        fields["no_rope_layers"] = [draw.randint(0, 1) for _ in range(layers)]
    if family == "Granite":
        fields |= dict(
            embedding_multiplier=draw.choice((1.0, 12.0)),
            residual_multiplier=draw.choice((1.0, 0.22)),
            attention_multiplier=draw.choice((0.02, 0.3)),
            logits_scaling=draw.choice((1.0, 8.0)),
        )
    return fields


def drawn_ids(fields: dict[str, Any], seed: int) -> tuple[list[int], int]:
    """Return tokens for a drawn config, and how many of them are the prompt."""
    draw = random.Random(seed)
    ids = [draw.randrange(3, fields["vocab_size"]) for _ in range(draw.randint(4, 48))]
    return ids, len(ids) - 3


def _gpt2(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((1, 2, 3, 5))
    return dict(
        vocab_size=draw.randint(80, 200),
        n_embd=heads * draw.choice((12, 14, 20, 32, 66)),
        n_layer=draw.randint(1, 4),
        n_head=heads,
        n_positions=POSITIONS,
        n_inner=draw.choice((None, draw.randint(17, 140))),
        activation_function=draw.choice(_ACTIVATIONS),
        layer_norm_epsilon=draw.choice((1e-6, 1e-5, 1e-3)),
        scale_attn_weights=draw.random() < 0.7,
        tie_word_embeddings=draw.random() < 0.5,
        bos_token_id=1,
        eos_token_id=2,
    )


def _rope(draw: random.Random, width: int, rope_types: tuple[str, ...] = _ROPES) -> dict[str, Any]:
    """Return fields of rotations of the first `width` elements of a head."""
    rope_type = draw.choice(rope_types)
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": draw.choice((100.0, 1e4, 1e6))}
    if rope_type != "default":
        rope["factor"] = draw.choice((2.0, 4.0, 8.0))
    if rope_type in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = ORIGINAL
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            rope[name] = [draw.uniform(1.0, 4.0) for _ in range(-(-width // 2))]
    return rope


def _windows(draw: random.Random, family: str, layers: int) -> dict[str, Any]:
    """Return the fields of a window, often shorter than the prompt, in some or all layers."""
    window = draw.choice((1, 2, 5, 9, 40))
    layer_types = [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    if family in ("Mistral", "Ministral3", "Phi3"):
        return {"sliding_window": draw.choice((None, window))}
    if family in ("Ministral", "Gemma2", "Gemma3"):
        return {"sliding_window": window, "layer_types": layer_types}
    if family in ("Qwen2", "Qwen3", "SmolLM3") and draw.random() < 0.6:
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": layer_types}
    return {}
