"""Gemma 4: layers that share keys and values, heads of two sizes, and per-layer inputs.

Layers without a window have wider heads than layers with one. They may have fewer key/value heads and no projection of
values. The last layers store no keys and values: each reads the cache of the last storing layer with the same window.
Scores are not scaled. Value heads have a norm without a weight, and norms add nothing to their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from model.config.blocks import Block, Encoder, Experts, Mlp, ModelConfig, PerLayerInput
from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm, Positions
from model.config.reading import (
    MOST_HEAD_DIM,
    alternate_windows,
    read_attention,
    read_biases,
    read_count_or_zero,
    read_experts_per_token,
    read_gated_mlp,
    read_layer_count,
    read_norms,
    read_window,
    read_windows,
)
from model.config.rotary import read_scaled_positions
from model.families import dense, names
from model.families.gemma import NAMES, build_config
from model.layers.shard import COLUMN_PARALLEL, ROW, ROW_PARALLEL, TRANSPOSED
from model.layers.uncomputed import Uncomputed
from model.layers.weight import Numbered, StackedWeight, Tensor, Weight
from model.network import Network, name_in_stack

PER_LAYER_NAMES = replace(
    NAMES,
    per_layer=names.PerLayerNames(
        table="model.embed_tokens_per_layer",
        projection="model.per_layer_model_projection",
        norm="model.per_layer_projection_norm",
        gate="per_layer_input_gate",
        output="per_layer_projection",
        after="post_per_layer_input_norm",
    ),
)
_NAMES = replace(PER_LAYER_NAMES, scale="layer_scalar")
_ROPE: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Parameters of the positions where the config has none, by layer type: the defaults of transformers."""


def compose(config: ModelConfig) -> Network:
    """Return the network; routed experts of a block are an `Uncomputed` layer after its MLP, which is computed."""
    without_experts = (
        replace(block, mlp=Mlp(block.mlp.shared_width)) if isinstance(block.mlp, Experts) else block
        for block in config.blocks
    )
    network = dense.compose(replace(config, blocks=tuple(without_experts)), _NAMES)
    first, *sections, last = network.sections
    for number, block in enumerate(config.blocks):
        if isinstance(block.mlp, Experts):
            sections[number] += (_build_experts(f"{_NAMES.layer}.{number}", block.mlp, config.hidden_size),)
    return replace(network, sections=(first, *sections, last))


def _build_experts(tensor: str, experts: Experts, hidden: int) -> Uncomputed:
    """Return the uncomputed weights of a block's experts, of the norms around them and of the router.

    `tensor` is the prefix of the block's tensors, and `hidden` the hidden size.
    """
    vectors = {
        **dict.fromkeys(("pre_feedforward_layernorm_2.weight", "router.scale"), hidden),
        **{f"post_feedforward_layernorm_{number}.weight": hidden for number in (1, 2)},
    }
    matrices = (
        Tensor(f"{tensor}.experts.gate_up_proj", (2 * experts.width, hidden), COLUMN_PARALLEL),
        Tensor(f"{tensor}.experts.down_proj", (hidden, experts.width), ROW_PARALLEL),
    )
    router = Tensor(f"{tensor}.router.proj.weight", (experts.count, hidden), TRANSPOSED)
    scale = Tensor(f"{tensor}.router.per_expert_scale", (experts.count,), ROW)
    return Uncomputed(
        "norms inside routed experts",
        (
            *(
                Weight(f"{tensor}.{name}", (Tensor(f"{tensor}.{name}", (size,), ROW),), component="norms")
                for name, size in vectors.items()
            ),
            *(Weight(tensor.name, (tensor,)) for tensor in (router, scale)),
            *(
                StackedWeight(matrix.name, Numbered(range(experts.count), partial(_select_expert, matrix)))
                for matrix in matrices
            ),
        ),
    )


def _select_expert(stack: Tensor, number: int) -> Tensor:
    return replace(stack, name=name_in_stack(stack.name, number))


def read_gemma4_text(fields: Fields) -> ModelConfig:
    """Return the config of a Gemma 4 decoder: a window in all but every sixth layer, or by `layer_types`.

    The last layer never has a window.

    Raises:
        ModelError: `sliding_window` is null, or another field is missing, has the wrong type or does not fit.
    """
    if fields.get("use_bidirectional_attention", None) == "all":
        fields.unsupported("use_bidirectional_attention", "all; a layer sees earlier positions only")
    if fields.flag("enable_moe_block"):
        fields.unsupported("enable_moe_block", "true; no layer computes routed experts")
    count = read_layer_count(fields)
    window = read_window(fields, 512)
    if window is None:
        raise fields.error("sliding_window", "null; layers of this family have a window: give its size")
    layer_windows = [*read_windows(fields, alternate_windows(6, count, window), window)[:-1], None]
    window_mixers = {
        window: _read_attention(
            fields, window, [layer for layer in range(count) if layer_windows[layer] == window]
        )
        for window in dict.fromkeys(layer_windows)
    }
    mixers = share_caches(fields, [window_mixers[window] for window in layer_windows])
    mlp = read_gated_mlp(fields, "hidden_activation", default="gelu_pytorch_tanh")
    block_norms = read_norms(fields, after=True)
    sharer_width = 2 * mlp.width if fields.flag("use_double_wide_mlp") else mlp.width
    per_layer_input = _read_per_layer_input(fields, mlp.activation)
    mlps = (mlp if mixer.cache_of is None else replace(mlp, width=sharer_width) for mixer in mixers)
    blocks = (
        Block(mixer, _add_experts(fields, mlp), block_norms, per_layer_input, scaled=True)
        for mixer, mlp in zip(mixers, mlps)
    )
    return build_config(fields, blocks, None)


def read_gemma4(fields: Fields) -> ModelConfig:
    """Return the config of the text model in `text_config`, with the parameters of all towers as its encoder.

    Towers are those of vision and of audio, if the config has them.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    text, vision, audio = map(fields.table, ("text_config", "vision_config", "audio_config"))
    config = read_gemma4_text(text)
    towers = {}
    if "vision_config" in fields:
        towers["vision"] = _count_vision(vision) + vision.count("hidden_size") * config.hidden_size
    if "audio_config" in fields:
        out = audio.count("output_proj_dims", default=1536)
        towers["audio"] = _count_audio(audio) + out * (audio.count("hidden_size") + 1 + config.hidden_size)
    name = f"{' and '.join(towers)} tower{'s' if len(towers) > 1 else ''}"
    return dense.with_tower(fields, text, config, Encoder(name, sum(towers.values())) if towers else None)


def _count_vision(fields: Fields) -> int:
    """Return the number of parameters of the vision tower, whose patches have three colours."""
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    head_dim = fields.count("head_dim", default=64)
    projections = 2 * width * head_dim * (heads + kv_heads) + 3 * width * inner
    layer = projections + 2 * head_dim + 4 * width
    positions = 2 * fields.count("position_embedding_size", default=10 * 1024)
    patch = 3 * fields.count("patch_size") ** 2
    return (positions + patch) * width + fields.count("num_hidden_layers") * layer


def _count_audio(fields: Fields) -> int:
    """Return the number of parameters of the audio tower without the projections of its output.

    Raises:
        ModelError: `subsampling_conv_channels` is not a list of two numbers.
    """
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    channels = fields.get("subsampling_conv_channels", [128, 32])
    if (
        not isinstance(channels, list)
        or len(channels) != 2
        or not all(type(channel) is int for channel in channels)
    ):
        raise fields.error("subsampling_conv_channels", "not a list of two numbers")
    first, second = channels
    convolutions = 9 * first * (1 + second) + first + second
    kernel = fields.count("conv_kernel_size", default=5)
    layer = 24 * width * width + (9 + kernel) * width + width // heads
    return convolutions + first // 4 * second * width + fields.count("num_hidden_layers") * layer


def share_caches(
    fields: Fields, mixers: Sequence[GroupedAttention], default: int = 0
) -> list[GroupedAttention]:
    """Return the attention of every layer, with `cache_of` set for the last `num_kv_shared_layers` layers.

    These read the cache of the last layer before them that has a cache and the same window. They compute no keys and
    values, so `value_norm` and `keys_as_values` are False.

    Args:
        fields: The fields of config.json.
        mixers: Attention of every layer with a cache.
        default: Number of layers without a cache where the config names none.

    Raises:
        ModelError: No layer has a cache, or none with the window of a layer that needs one.
    """
    shared = read_count_or_zero(fields, "num_kv_shared_layers", default)
    owners = len(mixers) - shared
    if owners < 1:
        raise fields.error(
            "num_kv_shared_layers",
            f"{shared} of {len(mixers)} layers read another layer's cache; at least one needs its own",
        )
    last_owners = {mixer.window: number for number, mixer in enumerate(mixers[:owners])}
    for number in range(owners, len(mixers)):
        if mixers[number].window not in last_owners:
            raise fields.error(
                "num_kv_shared_layers",
                f"{shared}; none of the {owners} layers with a cache has the window of layer {number}, so it has no "
                "cache to read",
            )
    sharers = (
        replace(mixer, cache_of=last_owners[mixer.window], value_norm=False, keys_as_values=False)
        for mixer in mixers[owners:]
    )
    return [*mixers[:owners], *sharers]


def _read_attention(fields: Fields, window: int | None, layers: list[int]) -> GroupedAttention:
    """Return the attention of the layers with this window, whose numbers are `layers`; None for no window.

    Raises:
        ModelError: `per_layer_config` gives these layers different heads, or key/value heads do not divide heads.
    """
    base = read_attention(fields, default_head_dim=256, positions=None, scale=1.0, **read_biases(fields))
    keys_as_values = window is None and fields.flag("attention_k_eq_v")
    changes = _read_layer_changes(fields)
    if window is None and "per_layer_config" not in fields:
        head_dim = fields.count("global_head_dim", default=512, most=MOST_HEAD_DIM)
        kv_heads = fields.count("num_global_key_value_heads", default=base.kv_heads)
        sizes = {(head_dim, kv_heads if keys_as_values else base.kv_heads)}
    else:
        sizes = {_read_head_sizes(changes.get(layer, fields.table("")), base) for layer in layers}
    if len(sizes) > 1:
        raise fields.error(
            "per_layer_config",
            f"layers with the same window must have equal heads; they differ in {layers}"[:200],
        )
    ((head_dim, kv_heads),) = sizes
    if head_dim % 2:
        fields.unsupported("global_head_dim", f"{head_dim} is odd; rotary embedding turns pairs")
    if base.heads % kv_heads:
        raise fields.error(
            "num_global_key_value_heads", f"{kv_heads} does not divide num_attention_heads, {base.heads}"
        )
    return replace(
        base,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_norm=HeadNorm.head,
        value_norm=True,
        keys_as_values=keys_as_values,
        positions=_read_positions(fields, window, head_dim),
        window=window,
    )


def _read_layer_changes(fields: Fields) -> dict[int, Fields]:
    """Return the fields of each entry of `per_layer_config` by the layer's number, which may be padded with zeros.

    Fields other than sizes of heads are added to the refusals.

    Raises:
        ModelError: A key is not the number of a layer.
    """
    table = fields.table("per_layer_config")
    layer_fields: dict[int, Fields] = {}
    for name in fields.get("per_layer_config", {}):
        if not name.isdecimal() or len(name) > 5:
            raise table.error(f"{name:.20}", "is not the number of a layer, such as 00017")
        layer_fields[int(name)] = table.table(name)
        for field in table.get(name, {}):
            if field not in ("head_dim", "num_key_value_heads"):
                fields.unsupported("per_layer_config", f"{field:.60}; layers differ in their heads only")
    return layer_fields


def _read_head_sizes(changes: Fields, base: GroupedAttention) -> tuple[int, int]:
    """Return (head size, key/value heads) of a layer by its entry in `per_layer_config`, else those of `base`."""
    head_dim = changes.count("head_dim", default=base.head_dim, most=MOST_HEAD_DIM)
    return head_dim, changes.count("num_key_value_heads", default=base.kv_heads)


def _read_positions(fields: Fields, window: int | None, head_dim: int) -> Positions:
    """Return the rotary positions of the layers with this window, for heads of `head_dim` elements.

    Raises:
        ModelError: `rope_parameters` lacks the type of these layers.
    """
    layer_type, name = ("full_attention", "rope") if window is None else ("sliding_attention", "rope.window")
    rope = fields.table("rope_parameters", default=_ROPE)
    if layer_type not in rope:
        raise rope.error(layer_type, "missing; rope_parameters has one object for each type of layer")
    theta = float(_ROPE[layer_type]["rope_theta"])
    return read_scaled_positions(
        fields, rope.table(layer_type), "rope_parameters", head_dim, name, default_theta=theta
    )


def _read_per_layer_input(fields: Fields, activation: str) -> PerLayerInput | None:
    """Return the sizes of the per-layer inputs; None for a model without them.

    Raises:
        ModelError: The table of the inputs has fewer rows than the vocabulary.
    """
    width = read_count_or_zero(fields, "hidden_size_per_layer_input", default=256)
    if not width:
        return None
    rows = fields.count("vocab_size_per_layer_input", default=262_144)
    tokens = fields.count("vocab_size")
    if rows < tokens:
        raise fields.error(
            "vocab_size_per_layer_input", f"{rows}; a vocabulary of {tokens} tokens needs as many rows"
        )
    return PerLayerInput(rows, width, activation)


def _add_experts(fields: Fields, mlp: Mlp) -> Mlp | Experts:
    """Return the MLP, or with `enable_moe_block` routed experts with the MLP as their shared expert."""
    if not fields.flag("enable_moe_block"):
        return mlp
    count = fields.count("num_experts")
    return Experts(
        count,
        read_experts_per_token(fields, count, "top_k_experts"),
        fields.count("moe_intermediate_size"),
        mlp.width,
        router_bias=True,  # a factor for each expert
        inner_norms=True,
    )
