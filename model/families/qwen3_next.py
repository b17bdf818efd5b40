"""Qwen3-Next: the gated delta rule in three of four layers, gated attention in the fourth, and experts in all."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, GatedDelta, GroupedAttention, HeadNorm, ModelConfig
from model.config.reading import attention, biases, common, layer_count, norms
from model.families.qwen import feed_forwards

KINDS = ("linear_attention", "full_attention")


def qwen3_next(fields: Fields) -> ModelConfig:
    """Blocks by `layer_types`; norms add 1 to their weights, and heads are rotated in part."""
    around = norms(fields, offset=1.0)
    gated = attention(
        fields,
        partial=True,
        default_head_dim=256,
        head_norm=HeadNorm.head,
        output_gate=True,
        **biases(fields),
    )
    mixers: dict[str, GatedDelta | GroupedAttention] = dict(zip(KINDS, (_delta(fields), gated)))
    mlps = feed_forwards(
        fields,
        renormalise=fields.flag("norm_topk_prob", default=True),
        shared_width=fields.count("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )
    return ModelConfig(
        **common(fields),
        blocks=tuple(Block(mixers[kind], mlp, around) for kind, mlp in zip(_kinds(fields), mlps)),
    )


def _delta(fields: Fields) -> GatedDelta:
    key_heads = fields.count("linear_num_key_heads", default=16)
    heads = fields.count("linear_num_value_heads", default=32)
    if heads % key_heads:
        raise fields.error(
            "linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads, {key_heads}"
        )
    return GatedDelta(
        key_heads,
        heads,
        fields.count("linear_key_head_dim", default=128),
        fields.count("linear_value_head_dim", default=128),
        fields.count("linear_conv_kernel_dim", default=4),
    )


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer: every fourth one attends unless `layer_types` or `full_attention_interval` says else."""
    layers = layer_count(fields)
    every = fields.count("full_attention_interval", default=4)
    kinds = fields.get("layer_types", None)
    if kinds is None:
        return [KINDS[(layer + 1) % every == 0] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"not a list of {layers} names, one for each layer")
    for kind in kinds:
        if kind not in KINDS:
            raise fields.error("layer_types", f"{kind!r:.60}; known are {', '.join(KINDS)}")
    return kinds
