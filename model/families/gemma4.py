"""Gemma 4: layers that read the keys and values of an earlier one, heads of two sizes, and inputs of every layer.

Layers that see all positions have wider heads than those with a window, perhaps fewer key/value heads, and perhaps no
projection of values. The last layers have no keys and values of their own: each reads those of the last layer of its
kind that has some. Scores are not scaled. Values are normalised without a weight, and norms add nothing to theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm, Positions
from model.config.parts import Block, Encoder, Experts, Mlp, ModelConfig, PerLayerInput
from model.config.reading import (
    MOST_HEAD_DIM,
    attention,
    biases,
    chosen_experts,
    common,
    dtype,
    full_in_every,
    gated_mlp,
    layer_count,
    norms,
    window_of,
    windows,
)
from model.config.rotary import positions_of
from model.families import dense, names
from model.families.gemma import NAMES, cap
from model.formats import read_format, read_method
from model.layers.shard import COLUMN_PARALLEL, ROW, ROW_PARALLEL, TRANSPOSED
from model.layers.uncomputed import Uncomputed
from model.layers.weight import Numbered, StackedWeight, Tensor, Weight
from model.network import Network, part_of

NAMED_INPUTS = replace(
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
_NAMES = replace(NAMED_INPUTS, scale="layer_scalar")
_ROPE: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Where a config says nothing of positions, as transformers has it."""


def compose(config: ModelConfig) -> Network:
    """The layers with the tensor names of Hugging Face's Gemma; routed experts stand beside the MLP of their block."""
    plain = (
        replace(block, mlp=Mlp(block.mlp.shared_width)) if isinstance(block.mlp, Experts) else block
        for block in config.blocks
    )
    network = dense.compose(replace(config, blocks=tuple(plain)), _NAMES)
    first, *blocks, last = network.sections
    beside = (
        (*layers, *_routed(f"{_NAMES.layer}.{number}", block.mlp, config.hidden_size))
        for number, (block, layers) in enumerate(zip(config.blocks, blocks))
    )
    return replace(network, sections=(first, *beside, last))


def _routed(tensor: str, experts: Mlp | Experts | None, hidden: int) -> Iterator[Uncomputed]:
    """The experts of a block with the norms around them and the factors of the router; none of a block without."""
    if not isinstance(experts, Experts):
        return
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
    yield Uncomputed(
        "norms inside routed experts",
        (
            *(
                Weight(f"{tensor}.{name}", (Tensor(f"{tensor}.{name}", (size,), ROW),), component="norms")
                for name, size in vectors.items()
            ),
            *(Weight(each.name, (each,)) for each in (router, scale)),
            *(
                StackedWeight(each.name, Numbered(range(experts.count), partial(_tensor, each)))
                for each in matrices
            ),
        ),
    )


def _tensor(tensor: Tensor, number: int) -> Tensor:
    """The tensor of an expert."""
    return replace(tensor, name=part_of(tensor.name, number))


def gemma4_text(fields: Fields) -> ModelConfig:
    """Every sixth layer sees all positions unless `layer_types` says another; the last one always does."""
    if fields.get("use_bidirectional_attention", None) == "all":
        fields.unsupported("use_bidirectional_attention", "all; a layer sees earlier positions only")
    if fields.flag("enable_moe_block"):
        fields.unsupported("enable_moe_block", "true; no layer computes routed experts")
    count = layer_count(fields)
    window = window_of(fields, 512)
    if window is None:
        raise fields.error("sliding_window", "null; layers of this family have a window")
    seen = [*windows(fields, full_in_every(6, count, window), window)[:-1], None]
    kinds = {
        window: _attention(fields, window, [each for each, own in enumerate(seen) if own == window])
        for window in dict.fromkeys(seen)
    }
    mixers = with_owners(fields, [kinds[own] for own in seen])
    shared = sum(mixer.cache_of is not None for mixer in mixers)
    mlp, around = (
        gated_mlp(fields, "hidden_activation", default="gelu_pytorch_tanh"),
        norms(fields, after=True),
    )
    wide = replace(mlp, width=2 * mlp.width) if fields.flag("use_double_wide_mlp") else mlp
    added = _per_layer_input(fields, mlp.activation)
    blocks = (
        Block(mixer, _feed_forward(fields, mlp if number < count - shared else wide), around, added, True)
        for number, mixer in enumerate(mixers)
    )
    given = common(fields, tied=True)
    return ModelConfig(
        **given,
        blocks=tuple(blocks),
        embedding_scale=given["hidden_size"] ** 0.5,
        logit_softcap=cap(fields, "final_logit_softcapping", None),
    )


def gemma4(fields: Fields) -> ModelConfig:
    """The text model of `text_config` with the towers that there are, which generated tokens do not pass."""
    text, vision, audio = (fields.table(f"{part}_config") for part in ("text", "vision", "audio"))
    config = gemma4_text(text)
    towers = {"vision": 0, "audio": 0}
    if "vision_config" in fields:
        towers["vision"] = _vision(vision) + vision.count("hidden_size") * config.hidden_size
    if "audio_config" in fields:
        out = audio.count("output_proj_dims", default=1536)
        towers["audio"] = _audio(audio) + out * (audio.count("hidden_size") + 1 + config.hidden_size)
    named = [name for name, parameters in towers.items() if parameters]
    what = f"{' and '.join(named)} tower{'s' if named[1:] else ''}"
    return replace(
        config,
        dtype=dtype(fields) or config.dtype,
        weight_format=read_format(text),
        quant_method=read_method(text),
        encoder=Encoder(what, sum(towers.values())) if named else None,
    )


def _vision(fields: Fields) -> int:
    """Parameters of the vision tower, whose patches have three colours."""
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    head_dim = fields.count("head_dim", default=64)
    projections = 2 * width * head_dim * (heads + kv_heads) + 3 * width * inner
    layer = projections + 2 * head_dim + 4 * width
    positions = 2 * fields.count("position_embedding_size", default=10 * 1024)
    patch = 3 * fields.count("patch_size") ** 2
    return (positions + patch) * width + fields.count("num_hidden_layers") * layer


def _audio(fields: Fields) -> int:
    """Parameters of the audio tower but for the projections of its output."""
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    channels = fields.get("subsampling_conv_channels", [128, 32])
    if (
        not isinstance(channels, list)
        or len(channels) != 2
        or not all(type(each) is int for each in channels)
    ):
        raise fields.error("subsampling_conv_channels", "not a list of two numbers")
    first, second = channels
    convolutions = 9 * first * (1 + second) + first + second
    kernel = fields.count("conv_kernel_size", default=5)
    layer = 24 * width * width + (9 + kernel) * width + width // heads
    return convolutions + first // 4 * second * width + fields.count("num_hidden_layers") * layer


def with_owners(
    fields: Fields, mixers: Sequence[GroupedAttention], default: int = 0
) -> list[GroupedAttention]:
    """Attention of every layer; the last ones name the layer whose keys and values they read."""
    shared = number_or_none(fields, "num_kv_shared_layers", default)
    owners = len(mixers) - shared
    if owners < 1:
        raise fields.error(
            "num_kv_shared_layers", f"{shared} of {len(mixers)} layers; one has to have its own"
        )
    found = list(mixers)
    for number in range(owners, len(mixers)):
        same = [each for each in range(owners) if mixers[each].window == mixers[number].window]
        if not same:
            what = f"{shared}; none of the {owners} layers before is of the kind of layer {number}"
            raise fields.error("num_kv_shared_layers", what)
        own = replace(mixers[number], cache_of=same[-1], value_norm=False, keys_as_values=False)
        found[number] = own
    return found


def _attention(fields: Fields, window: int | None, layers: list[int]) -> GroupedAttention:
    """Attention of the layers of one kind; ModelError where `per_layer_config` gives them different heads."""
    base = attention(fields, default_head_dim=256, positions=None, scale=1.0, **biases(fields))
    keys_as_values = window is None and fields.flag("attention_k_eq_v")
    changes = _changes(fields)
    if window is None and "per_layer_config" not in fields:
        head_dim = fields.count("global_head_dim", default=512, most=MOST_HEAD_DIM)
        kv_heads = fields.count("num_global_key_value_heads", default=base.kv_heads)
        sizes = {(head_dim, kv_heads if keys_as_values else base.kv_heads)}
    else:
        sizes = {_sizes(changes.get(layer, fields.table("")), base) for layer in layers}
    if len(sizes) > 1:
        raise fields.error(
            "per_layer_config", f"heads of layers {layers} differ, which are of one kind"[:200]
        )
    ((head_dim, kv_heads),) = sizes
    if head_dim % 2:
        fields.unsupported("global_head_dim", f"{head_dim} is odd; rotary embedding turns pairs")
    if base.heads % kv_heads:
        what = f"{kv_heads} does not divide num_attention_heads, {base.heads}"
        raise fields.error("num_global_key_value_heads", what)
    return replace(
        base,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_norm=HeadNorm.head,
        value_norm=True,
        keys_as_values=keys_as_values,
        positions=_positions(fields, window, head_dim),
        window=window,
    )


def _changes(fields: Fields) -> dict[int, Fields]:
    """What `per_layer_config` changes, by layer; transformers fills up the numbers of layers with zeros."""
    table = fields.table("per_layer_config")
    found: dict[int, Fields] = {}
    for name in fields.get("per_layer_config", {}):
        if not name.isdecimal() or len(name) > 5:
            raise table.error(f"{name:.20}", "is not the number of a layer")
        found[int(name)] = table.table(name)
        for field in table.get(name, {}):
            if field not in ("head_dim", "num_key_value_heads"):
                fields.unsupported("per_layer_config", f"{field:.60}; layers differ in their heads only")
    return found


def _sizes(changes: Fields, base: GroupedAttention) -> tuple[int, int]:
    """Head size and key/value heads of a layer, from its entry in `per_layer_config`."""
    head_dim = changes.count("head_dim", default=base.head_dim, most=MOST_HEAD_DIM)
    return head_dim, changes.count("num_key_value_heads", default=base.kv_heads)


def _positions(fields: Fields, window: int | None, head_dim: int) -> Positions:
    """Rotary positions of one kind of layers."""
    kind, name = ("full_attention", "rope") if window is None else ("sliding_attention", "rope.window")
    rope = fields.table("rope_parameters", default=_ROPE)
    if kind not in rope:
        raise rope.error(kind, "missing; layers of this family are rotated by their kind")
    theta = float(_ROPE[kind]["rope_theta"])
    return positions_of(fields, rope.table(kind), "rope_parameters", head_dim, name, default_theta=theta)


def _per_layer_input(fields: Fields, activation: str) -> PerLayerInput | None:
    """The inputs of every layer, where there are any."""
    width = number_or_none(fields, "hidden_size_per_layer_input", default=256)
    if not width:
        return None
    vocabulary, tokens = (
        fields.count("vocab_size_per_layer_input", default=262_144),
        fields.count("vocab_size"),
    )
    if vocabulary < tokens:
        what = f"{vocabulary}; a vocabulary of {tokens} tokens needs as many rows"
        raise fields.error("vocab_size_per_layer_input", what)
    return PerLayerInput(vocabulary, width, activation)


def _feed_forward(fields: Fields, mlp: Mlp) -> Mlp | Experts:
    """The MLP, beside routed experts where the config has them, which no layer computes."""
    if not fields.flag("enable_moe_block"):
        return mlp
    count = fields.count("num_experts")
    return Experts(
        count,
        chosen_experts(fields, count, "top_k_experts"),
        fields.count("moe_intermediate_size"),
        mlp.width,
        router_bias=True,  # a factor for each expert
        inner_norms=True,
    )


def number_or_none(fields: Fields, name: str, default: int) -> int:
    """A whole number, which may be 0."""
    return 0 if fields.get(name, default) == 0 else fields.count(name, default=default)
