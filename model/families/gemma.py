"""Gemma 2 and 3: norms before and after every layer, scaled embeddings, layers with and without a window.

Norms add 1 to their weights. Gemma 2 caps scores and logits. Gemma 3 has norms on the heads of queries and keys, and
layers with a window rotate by another base.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from model.config.blocks import Block, Encoder, ModelConfig
from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm, Positions
from model.config.reading import (
    alternate_windows,
    read_attention,
    read_biases,
    read_common,
    read_gated_mlp,
    read_layer_count,
    read_norms,
    read_window,
    read_windows,
)
from model.config.rotary import read_scaled_positions
from model.families import names
from model.families.dense import with_tower

NAMES = names.Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_HEAD_DIM = 256
"""Head size and scalar of the queries where the config names none: the defaults of transformers."""


def read_gemma2(fields: Fields) -> ModelConfig:
    """Return the config of a Gemma 2: a window in all but every second layer, and capped scores and logits.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    mixer = replace(_read_attention(fields), softcap=read_softcap(fields, "attn_logit_softcapping", 50.0))
    return _read(fields, 2, mixer, mixer.positions, 30.0)


def read_gemma3_text(fields: Fields) -> ModelConfig:
    """Return the config of a Gemma 3 decoder: a window in all but every sixth layer, norms on queries and keys.

    Layers with a window rotate by positions of their own.
    `attn_logit_softcapping` is not read: transformers caps no scores of this family.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    patterns = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next((name for name in patterns if name in fields), patterns[0])
    mixer = _read_attention(fields, head_norm=HeadNorm.head, positions=None)
    rope = fields.table("rope_parameters")
    is_nested = "full_attention" in rope or "sliding_attention" in rope
    field = "rope_parameters" if is_nested else "rope_scaling"
    full = rope.table("full_attention") if is_nested else fields.table("rope_scaling")
    sliding = rope.table("sliding_attention")
    full_positions = read_scaled_positions(fields, full, field, mixer.head_dim, default_theta=1e6)
    theta = "rope_local_base_freq"
    sliding_positions = read_scaled_positions(fields, sliding, field, mixer.head_dim, "rope.window", theta)
    every = fields.count(pattern, default=6)
    return _read(fields, every, replace(mixer, positions=full_positions), sliding_positions, None)


def read_gemma3(fields: Fields) -> ModelConfig:
    """Return the config of the text model in `text_config`, with the vision tower's parameters as its encoder.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    text, vision = fields.table("text_config"), fields.table("vision_config")
    config = read_gemma3_text(text)
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    patches = (vision.count("image_size") // vision.count("patch_size")) ** 2
    pixels = vision.count("num_channels", default=3) * vision.count("patch_size") ** 2
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    tower = (pixels + 1 + patches) * width + vision.count("num_hidden_layers") * layer + 2 * width
    projector = width * config.hidden_size + width
    return with_tower(fields, text, config, Encoder("vision tower", tower + projector))


def _read_attention(fields: Fields, **quirks: Any) -> GroupedAttention:
    if fields.flag("use_bidirectional_attention"):
        fields.unsupported("use_bidirectional_attention", "true; a layer sees earlier positions only")
    scalar = fields.number("query_pre_attn_scalar", default=_HEAD_DIM)
    return read_attention(
        fields, scale=scalar**-0.5, default_head_dim=_HEAD_DIM, **quirks, **read_biases(fields)
    )


def read_softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """Return the softcap in the field `name`, or `default` if it is absent; None, which means no cap, for null.

    Raises:
        ModelError: The field is not a positive number.
    """
    if fields.is_null(name) or (name not in fields and default is None):
        return None
    return fields.number(name, default)


def _read(
    fields: Fields,
    full_every: int,
    mixer: GroupedAttention,
    sliding_positions: Positions | None,
    logit_softcap: float | None,
) -> ModelConfig:
    """Return a config of layers with and without a window.

    Args:
        fields: The fields of config.json.
        full_every: Without `layer_types`, every `full_every`-th layer has no window.
        mixer: Attention of the layers without a window.
        sliding_positions: Rotary positions of the layers with a window.
        logit_softcap: Softcap of the logits if the config names none.
    """
    mlp = read_gated_mlp(fields, "hidden_activation", default="gelu_pytorch_tanh")
    window = read_window(fields, 4096)
    layer_windows = read_windows(
        fields, alternate_windows(full_every, read_layer_count(fields), window), window
    )
    full = Block(mixer, mlp, read_norms(fields, after=True, offset=1.0))
    sliding = replace(full, mixer=replace(mixer, window=window, positions=sliding_positions))
    blocks = [full if window is None else sliding for window in layer_windows]
    return build_config(fields, blocks, logit_softcap)


def build_config(fields: Fields, blocks: Iterable[Block], logit_softcap: float | None) -> ModelConfig:
    """Return a config of these blocks, which multiplies embeddings by the square root of the hidden size.

    Sizes are read from `fields`. `logit_softcap` is the softcap of the logits if the config names none.
    """
    shared = read_common(fields, tied=True)
    return ModelConfig(
        **shared,
        blocks=tuple(blocks),
        embedding_scale=shared["hidden_size"] ** 0.5,
        logit_softcap=read_softcap(fields, "final_logit_softcapping", logit_softcap),
    )
