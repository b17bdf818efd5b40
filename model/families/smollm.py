"""SmolLM3: a Llama some of whose layers turn no queries and keys."""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.parts import Block, ModelConfig
from model.config.reading import (
    attention,
    biases,
    common,
    gated_mlp,
    layer_count,
    norms,
    window_of,
    windows,
)
from model.families.dense import compose as compose

_THETA = 2e6


def smollm3(fields: Fields) -> ModelConfig:
    """`no_rope_layers` marks layers without rotary positions by 0; without that field each fourth layer has none."""
    count = layer_count(fields)
    turned = fields.get("no_rope_layers", None)
    if turned is None:
        every = fields.count("no_rope_layer_interval", default=4)
        turned = [int((layer + 1) % every != 0) for layer in range(count)]
    if not isinstance(turned, list) or len(turned) < count or not all(each in (0, 1) for each in turned):
        raise fields.error("no_rope_layers", f"not a list of {count} times 0 or 1, one for each layer")
    window = window_of(fields) if fields.flag("use_sliding_window") else None
    each_window = windows(fields, [None if each else window for each in turned[:count]], window)
    mixer = attention(fields, default_theta=_THETA, **biases(fields))
    mlp, around = gated_mlp(fields, bias=True), norms(fields)
    blocks = (
        Block(
            replace(mixer, window=own, positions=mixer.positions if rotated else None),
            mlp,
            around,
        )
        for own, rotated in zip(each_window, turned)
    )
    return ModelConfig(**common(fields, tied=True), blocks=tuple(blocks))
