"""Qwen3-Next: gated delta rule in three of four layers, gated attention in the fourth, experts in every layer.

Published checkpoints contain a layer for multi-token prediction, `mtp`, which is not read.
"""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.mixers import GatedDelta, GroupedAttention, HeadNorm
from model.config.parts import Block, ModelConfig
from model.config.reading import (
    read_attention,
    read_biases,
    read_common,
    read_layer_count,
    read_layer_types,
    read_norms,
)
from model.families import dense, names
from model.families.qwen import read_mlps
from model.layers.gated_delta import DeltaHeads
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.recurrent import Convolution
from model.layers.shard import by_query_heads
from model.network import Network

_NAMES = names.Names(experts=names.ExpertNames(shared="mlp.shared_expert"))
_LAYER_TYPES = ("linear_attention", "full_attention")


def read_qwen3_next(fields: Fields) -> ModelConfig:
    """Read a config whose blocks follow `layer_types`, else have attention in every `full_attention_interval`th layer.

    Norms add 1 to their weights.
    """
    block_norms = read_norms(fields, offset=1.0)
    gated = read_attention(
        fields,
        partial=True,
        default_head_dim=256,
        head_norm=HeadNorm.head,
        output_gate=True,
        **read_biases(fields),
    )
    mixers: dict[str, GatedDelta | GroupedAttention] = dict(zip(_LAYER_TYPES, (_read_delta(fields), gated)))
    mlps = read_mlps(
        fields,
        renormalise=fields.flag("norm_topk_prob", default=True),
        shared_width=fields.count("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )
    layers, every = read_layer_count(fields), fields.count("full_attention_interval", default=4)
    if "layer_types" in fields:
        layer_types = read_layer_types(fields, layers, _LAYER_TYPES)
    else:
        layer_types = [_LAYER_TYPES[(layer + 1) % every == 0] for layer in range(layers)]
    blocks = (Block(mixers[layer_type], mlp, block_norms) for layer_type, mlp in zip(layer_types, mlps))
    return ModelConfig(**read_common(fields), blocks=tuple(blocks))


def _read_delta(fields: Fields) -> GatedDelta:
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


def compose(config: ModelConfig) -> Network:
    """Build the network and name the tensors of its checkpoint."""
    return replace(dense.compose(config, _NAMES, _build_mixer), unread_prefixes=("mtp.",))


def _build_mixer(config: ModelConfig, number: int, norm: Norm) -> DeltaHeads:
    """Return the gated delta rule of a block.

    `in_proj_qkvz` holds queries, keys, values and gates of one key head after another, `in_proj_ba` their strengths and
    decays.
    """
    block, hidden = config.blocks[number], config.hidden_size
    mixer = block.mixer
    assert isinstance(mixer, GatedDelta) and block.mlp is not None
    name, tensor = f"layers.{number}.mixer", f"{_NAMES.layer}.{number}.linear_attn"
    values = mixer.heads // mixer.key_heads * mixer.value_dim
    sizes = (mixer.key_dim, mixer.key_dim, values, values)
    qkvz = Projection(f"{tensor}.in_proj_qkvz.weight", mixer.key_heads * sum(sizes), hidden)
    ba = Projection(f"{tensor}.in_proj_ba.weight", 2 * mixer.heads, hidden)
    inputs = qkvz.split(sizes, mixer.key_heads)
    cut = by_query_heads(*mixer.divided)
    return DeltaHeads(
        name,
        hidden,
        norm,
        (*inputs, *ba.split((mixer.heads // mixer.key_heads,) * 2, mixer.key_heads)),
        Convolution(
            f"{name}.convolution",
            f"{tensor}.conv1d",
            mixer.convolution,
            tuple((projection.outputs, cut) for projection in inputs[:3]),
            bias=False,
            activation=block.mlp.activation,
        ),
        Projection(f"{tensor}.out_proj.weight", hidden, mixer.heads * mixer.value_dim),
        mixer,
        f"{tensor}.A_log",
        f"{tensor}.dt_bias",
        Norm(f"{name}.inner_norm", f"{tensor}.norm.weight", mixer.value_dim, block.norms.eps),
    )
