"""SmolLM3: a Llama with layers that do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace

from model.config.blocks import Block, ModelConfig
from model.config.fields import Fields
from model.config.reading import (
    read_attention,
    read_biases,
    read_common,
    read_gated_mlp,
    read_layer_count,
    read_norms,
    read_window,
    read_windows,
)

_THETA = 2e6
"""Base of the rotations where the config names none: the default of transformers."""


def read_smollm3(fields: Fields) -> ModelConfig:
    """Return the config of a SmolLM3, whose layers rotate queries and keys where `no_rope_layers` has 1, not 0.

    Without that field every `no_rope_layer_interval`th layer does not rotate. If `use_sliding_window` is true, the
    layers that do not rotate have a window, or those of `layer_types`.

    Raises:
        ModelError: `no_rope_layers` is not a list of zeros and ones, at least one for each layer.
    """
    count = read_layer_count(fields)
    rotations = fields.get("no_rope_layers", None)
    if rotations is None:
        every = fields.count("no_rope_layer_interval", default=4)
        rotations = [int((layer + 1) % every != 0) for layer in range(count)]
    if (
        not isinstance(rotations, list)
        or len(rotations) < count
        or not all(rotation in (0, 1) for rotation in rotations)
    ):
        raise fields.error("no_rope_layers", f"not a list of {count} times 0 or 1, one for each layer")
    window = read_window(fields) if fields.flag("use_sliding_window") else None
    default = [None if rotation else window for rotation in rotations[:count]]
    layer_windows = read_windows(fields, default, window)
    mixer = read_attention(fields, default_theta=_THETA, **read_biases(fields))
    mlp, block_norms = read_gated_mlp(fields, bias=True), read_norms(fields)
    mixers = (
        replace(mixer, window=window, positions=mixer.positions if rotation else None)
        for window, rotation in zip(layer_windows, rotations)
    )
    blocks = tuple(Block(mixer, mlp, block_norms) for mixer in mixers)
    return ModelConfig(**read_common(fields, tied=True), blocks=blocks)
