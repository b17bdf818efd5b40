"""DeepSeek V2 and V3: multi-head latent attention, whose cache is one latent vector a token, and routed experts.

V3's extra layer for predicting a second token is no part of the model that generates, and is not read.
"""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, Experts, LatentAttention, Mlp, ModelConfig
from model.config.reading import MOST_HEAD_DIM, MOST_HEADS, chosen_experts, common, layer_count, norms
from model.config.rotary import rotary


def deepseek(fields: Fields) -> ModelConfig:
    """Some dense layers, then layers with routed and shared experts."""
    count = layer_count(fields)
    dense = min(_whole(fields, "first_k_dense_replace"), count)
    mixer = LatentAttention(
        heads=fields.count("num_attention_heads", most=MOST_HEADS),
        query_rank=_whole(fields, "q_lora_rank"),
        latent_rank=fields.count("kv_lora_rank"),
        plain_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim", most=MOST_HEAD_DIM),
        value_dim=fields.count("v_head_dim"),
    )
    rotary(fields, mixer.rope_dim)  # what cannot be turned is a refusal
    experts, width = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    shared = _whole(fields, "n_shared_experts") * width
    routed = Experts(experts, chosen_experts(fields, experts), width, shared)
    blocks = (Block(mixer, routed, norms(fields)),) * (count - dense)
    if dense:
        blocks = (Block(mixer, Mlp(fields.count("intermediate_size")), norms(fields)),) * dense + blocks
    return ModelConfig(**common(fields), blocks=blocks)


def _whole(fields: Fields, name: str) -> int:
    """A whole number that may be 0, which is also what an absent one means."""
    return 0 if fields.get(name, 0) == 0 else fields.count(name)
