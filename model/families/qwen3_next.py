"""Qwen3-Next: gated delta rule in three of four layers, gated attention in the fourth, experts in every layer.

Qwen3.5 stores the projections of the gated delta rule as four tensors and has an MLP in every layer, or experts. Its
vision model is a tower that generated tokens do not pass.

Published checkpoints contain a layer for multi-token prediction, `mtp`, which is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from model.config.blocks import Block, Encoder, Experts, Mlp, ModelConfig
from model.config.fields import Fields
from model.config.mixers import GatedDelta, GroupedAttention, HeadNorm
from model.config.reading import (
    read_attention,
    read_biases,
    read_common,
    read_gated_mlp,
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

NAMES = names.Names(experts=names.ExpertNames(shared="mlp.shared_expert"))
_LAYER_TYPES = ("linear_attention", "full_attention")


def read_qwen3_next(fields: Fields) -> ModelConfig:
    """Return the config of a Qwen3-Next, whose layers have experts or, as `read_mlps` decides, an MLP.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return _read(fields, _read_mlps(fields, fields.flag("norm_topk_prob", default=True)))


def read_qwen3_5_text(fields: Fields) -> ModelConfig:
    """Return the config of a Qwen3.5 text model with an MLP in every layer.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return _read(fields, [read_gated_mlp(fields)] * read_layer_count(fields))


def read_qwen3_5_moe_text(fields: Fields) -> ModelConfig:
    """Return the config of a Qwen3.5 text model with experts.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return _read(fields, _read_mlps(fields, True))


def read_qwen3_5(fields: Fields) -> ModelConfig:
    """Return the config of the text model in `text_config`, with the vision tower's parameters as its encoder.

    The text model has experts if its config has `num_experts`.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    text = fields.table("text_config")
    has_experts = "num_experts" in text
    config = read_qwen3_5_moe_text(text) if has_experts else read_qwen3_5_text(text)
    return dense.with_tower(
        fields, text, config, Encoder("vision tower", _count_vision(fields.table("vision_config")))
    )


def _count_vision(fields: Fields) -> int:
    """Return the number of parameters of the vision tower and of the layers that merge its patches."""
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    pixels = fields.count("in_channels", default=3) * fields.count("patch_size") ** 2
    patch = pixels * fields.count("temporal_patch_size", default=2) * width + width
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    merged = width * fields.count("spatial_merge_size", default=2) ** 2
    merger = 2 * width + merged * merged + merged + (merged + 1) * fields.count("out_hidden_size")
    positions = fields.count("num_position_embeddings") * width
    return patch + positions + fields.count("depth") * layer + merger


def _read_mlps(fields: Fields, renormalise: bool) -> list[Mlp | Experts]:
    """Return the experts, with a shared one and its gate, or the MLP of every layer, in order."""
    shared_width = fields.count("shared_expert_intermediate_size", default=512)
    return read_mlps(fields, renormalise=renormalise, shared_width=shared_width, shared_gate=True)


def _read(fields: Fields, mlps: Sequence[Mlp | Experts]) -> ModelConfig:
    """Return a config with gated attention or the gated delta rule in each layer, by `layer_types`.

    Without that field every `full_attention_interval`th layer has attention. Norms add 1 to their weights. `mlps` are
    the MLP or the experts of every layer.
    """
    if not fields.flag("attn_output_gate", default=True):
        fields.unsupported("attn_output_gate", "false; attention of this family has a gate")
    block_norms = read_norms(fields, offset=1.0)
    gated = read_attention(
        fields,
        partial=True,
        default_head_dim=256,
        default_factor=0.25,
        head_norm=HeadNorm.head,
        output_gate=True,
        **read_biases(fields),
    )
    mixers: dict[str, GatedDelta | GroupedAttention] = dict(zip(_LAYER_TYPES, (_read_delta(fields), gated)))
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
    """Return the network of a Qwen3-Next or Qwen3.5; a checkpoint may have tensors `mtp.…`, which nothing reads."""
    is_fused = config.model_type == "qwen3_next"
    return replace(dense.compose(config, NAMES, partial(_build_mixer, is_fused)), unread_prefixes=("mtp.",))


def _build_mixer(is_fused: bool, config: ModelConfig, number: int, norm: Norm) -> DeltaHeads:
    """Return the gated delta layer of block `number`, with the norm `norm` before it.

    If `is_fused`, `in_proj_qkvz` holds queries, keys, values and gates of one key head after another, and `in_proj_ba`
    their strengths and decays. Otherwise `in_proj_qkv` holds queries, keys and values of all heads, and gates,
    strengths and decays have tensors of their own.
    """
    block, hidden = config.blocks[number], config.hidden_size
    mixer = block.mixer
    assert isinstance(mixer, GatedDelta) and block.mlp is not None
    name, tensor = f"layers.{number}.mixer", f"{NAMES.layer}.{number}.linear_attn"
    if is_fused:
        values = mixer.heads // mixer.key_heads * mixer.value_dim
        sizes = (mixer.key_dim, mixer.key_dim, values, values)
        qkvz = Projection(f"{tensor}.in_proj_qkvz.weight", mixer.key_heads * sum(sizes), hidden)
        ba = Projection(f"{tensor}.in_proj_ba.weight", 2 * mixer.heads, hidden)
        inputs = (
            *qkvz.split(sizes, mixer.key_heads),
            *ba.split((mixer.heads // mixer.key_heads,) * 2, mixer.key_heads),
        )
    else:
        keys, values = mixer.key_heads * mixer.key_dim, mixer.heads * mixer.value_dim
        qkv = Projection(f"{tensor}.in_proj_qkv.weight", mixer.convolved, hidden)
        inputs = (
            *qkv.split((keys, keys, values)),
            *(
                Projection(f"{tensor}.in_proj_{letter}.weight", outputs, hidden)
                for letter, outputs in (("z", values), ("b", mixer.heads), ("a", mixer.heads))
            ),
        )
    cut = by_query_heads(*mixer.divided)
    return DeltaHeads(
        name,
        hidden,
        norm,
        inputs,
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
