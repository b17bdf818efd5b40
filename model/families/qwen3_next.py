"""Qwen3-Next: the gated delta rule in three of four layers, gated attention in the fourth, and experts in all.

Published checkpoints hold a layer that predicts a second token, `mtp`, which nothing reads.
"""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.mixers import GatedDelta, GroupedAttention, HeadNorm
from model.config.parts import Block, ModelConfig
from model.config.reading import attention, biases, common, layer_count, norms
from model.families import dense, names
from model.families.qwen import feed_forwards
from model.layers.gated_delta import DeltaHeads, DeltaTensors
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.recurrent import Convolution
from model.layers.shard import by_query_heads
from model.network import Network

_NAMES = names.Names(experts=names.ExpertNames(shared="mlp.shared_expert"))
_SECOND_TOKEN = "mtp."

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


def compose(config: ModelConfig) -> Network:
    """The layers, with the tensors of a checkpoint."""
    return replace(dense.compose(config, _NAMES, _mixer), unread_prefixes=(_SECOND_TOKEN,))


def _mixer(config: ModelConfig, number: int, norm: Norm) -> DeltaHeads:
    """The gated delta rule of a block.

    A tensor holds queries, keys, values and gates of each key head, one head after another, and another one its
    strengths and decays.
    """
    block, hidden = config.blocks[number], config.hidden_size
    own = block.mixer
    assert isinstance(own, GatedDelta) and block.mlp is not None
    name, tensor = f"layers.{number}.mixer", f"{_NAMES.layer}.{number}.linear_attn"
    shared = own.heads // own.key_heads
    values = shared * own.value_dim

    def projections(which: str, *sizes: int) -> tuple[Projection, ...]:
        """The parts of a tensor, by the elements that each has of a key head."""
        every = sum(sizes)
        return tuple(
            Projection(
                f"{tensor}.{which}.weight",
                own.key_heads * size,
                hidden,
                first=sum(sizes[:place]),
                tensor_outputs=own.key_heads * every,
                every=every,
            )
            for place, size in enumerate(sizes)
        )

    inputs = projections("in_proj_qkvz", own.key_dim, own.key_dim, values, values)
    cut = by_query_heads(*own.divided)
    return DeltaHeads(
        name,
        hidden,
        norm,
        (*inputs, *projections("in_proj_ba", shared, shared)),
        Convolution(
            f"{name}.convolution",
            f"{tensor}.conv1d",
            own.convolution,
            tuple((each.outputs, cut) for each in inputs[:3]),
            bias=False,
            activation=block.mlp.activation,
        ),
        Projection(f"{tensor}.out_proj.weight", hidden, own.heads * own.value_dim),
        own,
        DeltaTensors(f"{tensor}.A_log", f"{tensor}.dt_bias"),
        Norm(f"{name}.inner_norm", f"{tensor}.norm.weight", own.value_dim, block.norms.eps),
    )
