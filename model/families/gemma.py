"""Gemma 2 and 3: four norms a layer, tied tables, and layers that see a window between layers that see everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from model.plan.families.blocks import Fields, base, dtype, gated_mlp, heads, layer_count, windows
from model.plan.families.transformer import shared
from model.plan.parameters import Aside, Layers, Model

_MISSING = "norms after the blocks, an MLP with gelu or windows"


def gemma2(fields: Fields) -> Model:
    """Every second layer sees all positions."""
    return _gemma(fields, full_every=2, head_norms=False)


def gemma3_text(fields: Fields) -> Model:
    """Every sixth layer sees all positions; queries and keys are normalised head by head."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    named = next((name for name in names if name in fields), names[0])
    return _gemma(fields, full_every=fields.count(named, default=6), head_norms=True)


def gemma3(fields: Fields) -> Model:
    """The text model of `text_config` with a vision tower, which generated tokens do not pass."""
    text, vision = fields.table("text_config"), fields.table("vision_config")
    model = gemma3_text(text)
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    patches = (vision.count("image_size") // vision.count("patch_size")) ** 2
    pixels = vision.count("num_channels", default=3) * vision.count("patch_size") ** 2
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    tower = (pixels + 1 + patches) * width + vision.count("num_hidden_layers") * layer + 2 * width
    projector = width * model.hidden + width
    aside = Aside("vision tower", tower + projector)
    return replace(model, model_type="gemma3", dtype=dtype(fields) or model.dtype, aside=aside)


def _gemma(fields: Fields, full_every: int, head_norms: bool) -> Model:
    own, hidden = heads(fields), fields.count("hidden_size")
    bias = fields.flag("attention_bias")
    mlp = gated_mlp(hidden, fields.count("intermediate_size"))
    norms = 4 * hidden + (2 * own.dim if head_norms else 0)
    counts = Counter(windows(fields, layer_count(fields), fields.count("sliding_window"), full_every))
    attention = own.attention(hidden, bias, bias)
    return Model(
        **base(fields, tied=True),
        **shared(fields, own),
        final_norms=hidden,
        layers=tuple(
            Layers(count=count, mlp=mlp, norms=norms, window=window, **attention)
            for window, count in counts.items()
        ),
        missing=_MISSING,
    )
