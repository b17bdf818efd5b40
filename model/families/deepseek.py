"""DeepSeek V2 and V3: multi-head latent attention, whose cache is one latent vector a token, and routed experts.

V3's extra layer for predicting a second token is no part of the model that generates: a checkpoint may hold it behind
the others, and it is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config.fields import Fields
from model.config.mixers import LatentAttention
from model.config.parts import Block, Experts, ModelConfig
from model.config.reading import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    activation,
    chosen_experts,
    common,
    gated_mlp,
    layer_count,
    norms,
)
from model.config.rope import RopeType, yarn_score_factor
from model.config.rotary import rotary
from model.families import dense, names
from model.network import Network

_NAMES = names.Names(
    experts=names.ExpertNames(shared="mlp.shared_experts", choice_bias="e_score_correction_bias")
)


def deepseek_v2(fields: Fields) -> ModelConfig:
    """Experts by a softmax over all, in groups that count as their best expert."""
    if fields.flag("norm_topk_prob"):
        fields.unsupported("norm_topk_prob", "weights of experts are parts of a softmax over all of them")
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.unsupported("topk_method", f"{method!r:.60}; known are greedy, group_limited_greedy")
    grouped = method == "group_limited_greedy"
    return _model(fields, grouped, {"scoring": "softmax", "renormalise": False}, scaled=1.0)


def deepseek_v3(fields: Fields) -> ModelConfig:
    """Experts by sigmoids, chosen with a bias, in groups that count as their two best."""
    given = {
        "scoring": "sigmoid",
        "choice_bias": True,
        "renormalise": fields.flag("norm_topk_prob", default=True),
    }
    return _model(fields, True, given, scaled=2.5)


def _model(fields: Fields, grouped: bool, routing: dict[str, Any], scaled: float) -> ModelConfig:
    """Some dense layers, then layers with routed and shared experts."""
    count = layer_count(fields)
    dense_layers = min(_whole(fields, "first_k_dense_replace"), count)
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name):
            fields.unsupported(name, "projections of latent attention and of experts have no biases")
    around = norms(fields)
    sparse = Block(_latent(fields), _experts(fields, grouped, routing, scaled), around)
    blocks = (sparse,) * (count - dense_layers)
    if dense_layers:
        blocks = (Block(sparse.mixer, gated_mlp(fields), around),) * dense_layers + blocks
    mtp = _whole(fields, "num_nextn_predict_layers")
    return ModelConfig(**common(fields), blocks=blocks, mtp_layers=mtp)


def compose(config: ModelConfig) -> Network:
    """The layers, with the checkpoint's names."""
    count = len(config.blocks)
    mtp = tuple(f"{_NAMES.layer}.{count + each}." for each in range(config.mtp_layers))
    return replace(dense.compose(config, _NAMES), unread_prefixes=mtp)


def _latent(fields: Fields) -> LatentAttention:
    """The attention of every layer; YaRN scales scores besides rotations."""
    rope_dim = fields.count("qk_rope_head_dim", most=MOST_HEAD_DIM)
    if rope_dim % 2:
        fields.unsupported("qk_rope_head_dim", f"{rope_dim} is odd; rotary embedding turns pairs")
    positions = rotary(fields, rope_dim)
    plain_dim = fields.count("qk_nope_head_dim")
    scaling = fields.table("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    scale = (plain_dim + rope_dim) ** -0.5
    if positions.rope.rope_type is not RopeType.default and "mscale_all_dim" in scaling:
        weight = scaling.number("mscale_all_dim", positive=False)
        scale *= yarn_score_factor(positions.rope.factor, weight)
    return LatentAttention(
        heads=fields.count("num_attention_heads", most=MOST_HEADS),
        query_rank=_whole(fields, "q_lora_rank"),
        latent_rank=fields.count("kv_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=fields.count("v_head_dim"),
        positions=positions,
        scale=scale,
        interleaved=fields.flag("rope_interleave", default=True),
    )


def _experts(fields: Fields, grouped: bool, routing: dict[str, Any], scaled: float) -> Experts:
    """Routed experts beside shared ones; groups by the names of both families."""
    experts, width = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    groups = top_groups = 1
    if grouped:
        groups, top_groups = fields.count("n_group", default=8), fields.count("topk_group", default=4)
        if experts % groups or top_groups > groups:
            raise fields.error("n_group", f"{top_groups} of {groups} groups of {experts} experts")
    return Experts(
        experts,
        chosen_experts(fields, experts),
        width,
        shared_width=_whole(fields, "n_shared_experts") * width,
        activation=activation(fields, "hidden_act", "silu"),
        groups=groups,
        top_groups=top_groups,
        scale=fields.number("routed_scaling_factor", default=scaled),
        **routing,
    )


def _whole(fields: Fields, name: str) -> int:
    """A whole number that may be 0, which is also what an absent one means."""
    return 0 if fields.get(name, 0) == 0 else fields.count(name)
