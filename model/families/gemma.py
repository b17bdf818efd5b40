"""Gemma 2 and 3: four norms a layer, tied tables, and layers that see a window between layers that see everything."""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.parts import Block, Encoder, HeadNorm, ModelConfig
from model.config.reading import (
    attention,
    biases,
    common,
    dtype,
    gated_mlp,
    layer_count,
    norms,
    quantisation,
    rotary,
    windows,
)


def gemma2(fields: Fields) -> ModelConfig:
    """Every second layer sees all positions."""
    return _gemma(fields, full_every=2, head_norm=None)


def gemma3_text(fields: Fields) -> ModelConfig:
    """Every sixth layer sees all positions; queries and keys are normalised head by head."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    named = next((name for name in names if name in fields), names[0])
    return _gemma(fields, full_every=fields.count(named, default=6), head_norm=HeadNorm.head)


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
        config, dtype=dtype(fields) or config.dtype, quantisation=quantisation(text), encoder=encoder
    )


def _gemma(fields: Fields, full_every: int, head_norm: HeadNorm | None) -> ModelConfig:
    mixer = attention(fields, head_norm=head_norm, **biases(fields))
    mlp = gated_mlp(fields, "hidden_activation", default="gelu_pytorch_tanh")
    each = windows(fields, layer_count(fields), fields.count("sliding_window"), full_every)
    return ModelConfig(
        **common(fields, tied=True),
        **rotary(fields, mixer.head_dim),
        blocks=tuple(Block(replace(mixer, window=window), mlp, norms(fields, after=True)) for window in each),
    )
