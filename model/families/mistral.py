"""Mistral and Ministral: Llamas with a sliding window, in all layers or in those that `layer_types` names.

Ministral 3 scales queries beyond its first context; Mistral 3 is a Mistral or a Ministral 3 with a vision tower.
"""

from __future__ import annotations

from model.config.blocks import Encoder, ModelConfig
from model.config.fields import Fields
from model.config.reading import read_attention, read_layer_count, read_window, read_windows
from model.families.dense import read_blocks, with_tower

_WINDOW = 4096
"""Window of a config without `sliding_window`: the default of transformers."""


def read_mistral(fields: Fields) -> ModelConfig:
    """Return the config of a Mistral, whose blocks are equal; a null `sliding_window` means no window.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    return read_blocks(fields, read_attention(fields, window=read_window(fields, _WINDOW)))


def read_ministral(fields: Fields) -> ModelConfig:
    """Return the config of a Ministral: a window in the sliding layers of `layer_types`, by default in all layers.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    mixer, window = read_attention(fields), read_window(fields, _WINDOW)
    layer_windows = read_windows(fields, [window] * read_layer_count(fields), window)
    return read_blocks(fields, mixer, layer_windows=layer_windows)


def read_ministral3(fields: Fields) -> ModelConfig:
    """Return the config of a Ministral 3, whose blocks are equal and have a window only if the config names one.

    `llama_4_scaling_beta` scales the queries at positions from `original_max_position_embeddings` on, which no layer
    does: such a factor is refused unless the context ends before.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    rope = fields.table("rope_parameters")
    beta = rope.number("llama_4_scaling_beta", default=0.0, positive=False)
    if beta and fields.count("max_position_embeddings") > rope.count("original_max_position_embeddings"):
        rope.unsupported("llama_4_scaling_beta", f"{beta}; queries are not scaled by their position")
    return read_blocks(fields, read_attention(fields, window=read_window(fields)))


def read_mistral3(fields: Fields) -> ModelConfig:
    """Return the config of the text model in `text_config`, with the vision tower's parameters as its encoder.

    The text model is a Mistral or a Ministral 3.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    text, vision = fields.table("text_config"), fields.table("vision_config")
    is_ministral = text.get("model_type", "mistral") == "ministral3"
    config = read_ministral3(text) if is_ministral else read_mistral(text)
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    pixels = vision.count("num_channels", default=3) * vision.count("patch_size") ** 2
    layer = 4 * width * width + 3 * width * inner + 2 * width
    tower = pixels * width + width + vision.count("num_hidden_layers") * layer
    merged = fields.count("spatial_merge_size", default=2) ** 2
    layers = fields.get("vision_feature_layer", -1)
    features = width * (len(layers) if isinstance(layers, list) else 1)
    hidden, biases = config.hidden_size, 2 * fields.flag("multimodal_projector_bias")
    projector = width + merged * width * width + features * hidden + hidden * hidden + biases * hidden
    return with_tower(fields, text, config, Encoder("vision tower", tower + projector))
