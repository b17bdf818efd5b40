"""DeepSeek V2 and V3: routed experts, and multi-head latent attention, which caches one latent vector per token.

Kimi K2 is a DeepSeek-V3 with another model type. GLM-4.7 Flash differs in the defaults of its config. Layers for
multi-token prediction are not read: a checkpoint may contain them after the other layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config.blocks import Block, Experts, ModelConfig
from model.config.fields import Fields
from model.config.mixers import GroupedAttention, LatentAttention
from model.config.reading import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    read_activation,
    read_common,
    read_count_or_zero,
    read_experts_per_token,
    read_gated_mlp,
    read_layer_count,
    read_layer_types,
    read_norms,
)
from model.config.rope import RopeType, compute_yarn_score_factor
from model.config.rotary import read_positions
from model.families import dense, names
from model.network import Network

_NAMES = names.Names(
    experts=names.ExpertNames(shared="mlp.shared_experts", choice_bias="mlp.gate.e_score_correction_bias")
)


def read_deepseek_v2(fields: Fields) -> ModelConfig:
    """Return the config of a DeepSeek-V2, whose experts are weighted by a softmax over all experts.

    With the method `group_limited_greedy` a token selects experts in the groups with the best single experts.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    if fields.flag("norm_topk_prob"):
        fields.unsupported("norm_topk_prob", "weights of experts are parts of a softmax over all of them")
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.unsupported("topk_method", f"{method!r:.60}; known are greedy, group_limited_greedy")
    is_grouped = method == "group_limited_greedy"
    return _read(fields, is_grouped, 1.0, scoring="softmax", renormalise=False)


def read_deepseek_v3(fields: Fields) -> ModelConfig:
    """Return the config of a DeepSeek-V3, whose experts are weighted by sigmoids and selected with a bias.

    A token selects experts in the best groups, ranked by the sum of their two best experts.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return _read(fields, True, 2.5, **_read_sigmoid_routing(fields))


def read_glm4_moe_lite(fields: Fields) -> ModelConfig:
    """Return the config of a GLM-4.7 Flash, whose layers have an MLP or experts.

    `mlp_layer_types` has "dense" or "sparse" for each layer. Without this field the first layer alone is dense.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    _refuse_biases(fields)
    count = read_layer_count(fields)
    layer_types = ["dense"] + ["sparse"] * (count - 1)
    if "mlp_layer_types" in fields:
        layer_types = read_layer_types(fields, count, ("dense", "sparse"), "mlp_layer_types")
    sparse = Block(
        _read_latent_attention(fields), read_sigmoid_experts(fields, 1.8), read_norms(fields, default=1e-5)
    )
    mlp = read_gated_mlp(fields) if "dense" in layer_types else None
    blocks = tuple(
        replace(sparse, mlp=mlp) if layer_type == "dense" else sparse for layer_type in layer_types
    )
    mtp_layers = read_count_or_zero(fields, "num_nextn_predict_layers")
    return ModelConfig(**read_common(fields), blocks=blocks, mtp_layers=mtp_layers)


def read_sigmoid_experts(fields: Fields, default_scale: float = 1.0) -> Experts:
    """Return routed and shared experts that are weighted by sigmoids and selected with a bias.

    `default_scale` is the factor of the weights if the config has no `routed_scaling_factor`. Without `n_group` there
    is one group of experts.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return _read_experts(fields, True, default_scale, _read_sigmoid_routing(fields), (1, 1))


def _read_sigmoid_routing(fields: Fields) -> dict[str, Any]:
    """Return arguments of `Experts` for a router with sigmoids and a bias of the selection, without its sizes."""
    return {
        "scoring": "sigmoid",
        "choice_bias": True,
        "renormalise": fields.flag("norm_topk_prob", default=True),
    }


def _refuse_biases(fields: Fields) -> None:
    """Add `attention_bias` and `mlp_bias` to the refusals if they are true: such layers have no biases."""
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name):
            fields.unsupported(name, "projections of latent attention and of experts have no biases")


def _read(fields: Fields, is_grouped: bool, default_scale: float, **routing: Any) -> ModelConfig:
    """Return a config with `first_k_dense_replace` layers with an MLP, followed by layers with experts.

    Args:
        fields: The fields of config.json.
        is_grouped: Whether tokens select experts inside the best groups only.
        default_scale: The factor of the experts' weights where the config names none.
        **routing: Fields of `Experts` that the family decides.
    """
    _refuse_biases(fields)
    experts = _read_experts(fields, is_grouped, default_scale, routing)
    dense_layers = read_count_or_zero(fields, "first_k_dense_replace")
    return read_first_dense(fields, _read_latent_attention(fields), experts, dense_layers)


def read_first_dense(
    fields: Fields, mixer: GroupedAttention | LatentAttention, experts: Experts, dense_layers: int
) -> ModelConfig:
    """Return a config whose first `dense_layers` layers have an MLP and whose other layers have `experts`.

    All layers have the attention `mixer`. Everything else is read from `fields`.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    count = read_layer_count(fields)
    dense_layers = min(dense_layers, count)
    sparse = Block(mixer, experts, read_norms(fields))
    blocks = (sparse,) * (count - dense_layers)
    if dense_layers:
        blocks = (replace(sparse, mlp=read_gated_mlp(fields)),) * dense_layers + blocks
    mtp_layers = read_count_or_zero(fields, "num_nextn_predict_layers")
    return ModelConfig(**read_common(fields), blocks=blocks, mtp_layers=mtp_layers)


def compose(config: ModelConfig) -> Network:
    """Return the network of a model. A checkpoint may have layers for multi-token prediction, which nothing reads."""
    first_mtp = len(config.blocks)
    mtp_layers = range(first_mtp, first_mtp + config.mtp_layers)
    prefixes = tuple(f"{_NAMES.layer}.{layer}." for layer in mtp_layers)
    return replace(dense.compose(config, _NAMES), unread_prefixes=prefixes)


def _read_latent_attention(fields: Fields) -> LatentAttention:
    """Return the latent attention of every layer; YaRN with `mscale_all_dim` also scales the scores."""
    rope_dim = fields.count("qk_rope_head_dim", most=MOST_HEAD_DIM)
    if rope_dim % 2:
        fields.unsupported("qk_rope_head_dim", f"{rope_dim} is odd; rotary embedding turns pairs")
    positions = read_positions(fields, rope_dim)
    plain_dim = fields.count("qk_nope_head_dim")
    scaling = fields.table("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    scale = (plain_dim + rope_dim) ** -0.5
    if positions.rope.rope_type is not RopeType.default and "mscale_all_dim" in scaling:
        weight = scaling.number("mscale_all_dim", positive=False)
        scale *= compute_yarn_score_factor(positions.rope.factor, weight)
    return LatentAttention(
        heads=fields.count("num_attention_heads", most=MOST_HEADS),
        query_rank=read_count_or_zero(fields, "q_lora_rank"),
        latent_rank=fields.count("kv_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=fields.count("v_head_dim"),
        positions=positions,
        scale=scale,
        interleaved=fields.flag("rope_interleave", default=True),
    )


def _read_experts(
    fields: Fields,
    is_grouped: bool,
    default_scale: float,
    routing: dict[str, Any],
    default_groups: tuple[int, int] = (8, 4),
) -> Experts:
    """Return the routed and the shared experts.

    Args:
        fields: The fields of config.json.
        is_grouped: Whether tokens select experts inside the best groups only; otherwise there is one group.
        default_scale: The factor of the experts' weights if the config names none.
        routing: Arguments of `Experts` that the family decides.
        default_groups: (groups, best groups of a token) if the config names none.

    Raises:
        ModelError: The groups do not divide the experts, or a token takes more groups than there are.
    """
    experts, width = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    groups = top_groups = 1
    if is_grouped:
        groups = fields.count("n_group", default=default_groups[0])
        top_groups = fields.count("topk_group", default=default_groups[1])
        if experts % groups or top_groups > groups:
            raise fields.error(
                "n_group",
                f"{top_groups} of {groups} groups of {experts} experts; groups divide the experts evenly, and "
                "topk_group is at most their number",
            )
    return Experts(
        experts,
        read_experts_per_token(fields, experts),
        width,
        shared_width=read_count_or_zero(fields, "n_shared_experts") * width,
        activation=read_activation(fields, "hidden_act", "silu"),
        groups=groups,
        top_groups=top_groups,
        scale=fields.number("routed_scaling_factor", default=default_scale),
        **routing,
    )
