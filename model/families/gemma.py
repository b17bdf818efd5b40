"""Gemma 2 and 3: norms around every layer, scaled embeddings, layers with a window and layers without.

Norms add 1 to their weights. Gemma 2 caps scores and logits; Gemma 3 normalises queries and keys head by head, and its
layers with a window turn them by frequencies of another base.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm, Positions
from model.config.parts import Block, Encoder, ModelConfig
from model.config.reading import (
    attention,
    biases,
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
from model.formats import read_format, read_method
from model.network import Network

NAMES = names.Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_HEAD_DIM = 256
"""Where a config names no head size and no scalar of the queries, as transformers has it."""


def compose(config: ModelConfig) -> Network:
    """The layers with the tensor names of Hugging Face's Gemma."""
    return dense.compose(config, NAMES)


def gemma2(fields: Fields) -> ModelConfig:
    """Every second layer sees all positions; scores and logits are capped."""
    mixer = replace(_attention(fields), softcap=cap(fields, "attn_logit_softcapping", 50.0))
    return _gemma(fields, 2, mixer, None, 30.0)


def gemma3_text(fields: Fields) -> ModelConfig:
    """Every sixth layer sees all positions; queries and keys are normalised head by head.

    `attn_logit_softcapping` is not read: transformers caps no scores of this family.
    """
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    named = next((name for name in names if name in fields), names[0])
    mixer = _attention(fields, head_norm=HeadNorm.head, positions=None)
    rope = fields.table("rope_parameters")
    nested = "full_attention" in rope or "sliding_attention" in rope
    wide = rope.table("full_attention") if nested else fields.table("rope_scaling")
    narrow = rope.table("sliding_attention")
    field = "rope_parameters" if nested else "rope_scaling"
    everywhere = positions_of(fields, wide, field, mixer.head_dim, default_theta=1e6)
    theta = "rope_local_base_freq"
    within = positions_of(fields, narrow, field, mixer.head_dim, "rope.window", theta)
    every = fields.count(named, default=6)
    return _gemma(fields, every, replace(mixer, positions=everywhere), within, None)


def gemma3(fields: Fields) -> ModelConfig:
    """The text model of `text_config` with a vision tower, which generated tokens do not pass."""
    text, vision = fields.table("text_config"), fields.table("vision_config")
    config = gemma3_text(text)
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    patches = (vision.count("image_size") // vision.count("patch_size")) ** 2
    pixels = vision.count("num_channels", default=3) * vision.count("patch_size") ** 2
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    tower = (pixels + 1 + patches) * width + vision.count("num_hidden_layers") * layer + 2 * width
    projector = width * config.hidden_size + width
    encoder = Encoder("vision tower", tower + projector)
    return replace(
        config,
        dtype=dtype(fields) or config.dtype,
        weight_format=read_format(text),
        quant_method=read_method(text),
        encoder=encoder,
    )


def _attention(fields: Fields, **quirks: Any) -> GroupedAttention:
    if fields.flag("use_bidirectional_attention"):
        fields.unsupported("use_bidirectional_attention", "true; a layer sees earlier positions only")
    scalar = fields.number("query_pre_attn_scalar", default=_HEAD_DIM)
    quirks |= {"default_head_dim": _HEAD_DIM}
    return attention(fields, scale=scalar**-0.5, **quirks, **biases(fields))


def cap(fields: Fields, name: str, default: float | None) -> float | None:
    """A bound of scores or logits; null means that there is none."""
    if fields.is_null(name) or (name not in fields and default is None):
        return None
    return fields.number(name, default)


def _gemma(
    fields: Fields,
    full_every: int,
    mixer: GroupedAttention,
    within: Positions | None,
    logit_softcap: float | None,
) -> ModelConfig:
    """`within` are the positions of the layers with a window, where they differ from those of the others."""
    mlp = gated_mlp(fields, "hidden_activation", default="gelu_pytorch_tanh")
    window = window_of(fields, 4096)
    each = windows(fields, full_in_every(full_every, layer_count(fields), window), window)
    around = norms(fields, after=True, offset=1.0)
    narrow = replace(mixer, window=window, positions=within or mixer.positions)
    blocks = (Block(mixer if own is None else narrow, mlp, around) for own in each)
    given = common(fields, tied=True)
    return ModelConfig(
        **given,
        blocks=tuple(blocks),
        embedding_scale=given["hidden_size"] ** 0.5,
        logit_softcap=cap(fields, "final_logit_softcapping", logit_softcap),
    )
