"""Which models take pages of four bits."""

from __future__ import annotations

from model.config import ModelConfig
from model.errors import ModelError
from model.families import compose
from model.layers.attention import Attention
from model.layers.cache_formats import CACHE_FORMATS

MOST_HEAD_DIM = 128
"""Most elements of a head in pages of four bits."""


def check_packed_pages(config: ModelConfig, cache_dtype: str) -> None:
    """Check that a model takes the cache format `cache_dtype` if full pages of this format have four bits.

    Raises:
        ModelError: A layer with a cache does not attend to all positions of the text, or its heads do not have 8, 16,
            24 … 128 elements.
    """
    if not CACHE_FORMATS[cache_dtype].packs_pages:
        return
    network = compose(config)
    for layer in network.all_layers:
        if layer.component not in ("attention", "mixer"):
            continue
        name = getattr(layer, "name", type(layer).__name__)
        if not isinstance(layer, Attention) or layer.heads.window is not None or layer.owner is not None:
            raise ModelError(
                f"kv_cache_dtype is '{cache_dtype}', which is for attention with a cache of its own and without a "
                f"window; {name} is not: use int8 or fp8",
                "NKW-MODEL-OPTION",
            )
        if layer.heads.head_dim % 8 or layer.heads.head_dim > MOST_HEAD_DIM:
            raise ModelError(
                f"kv_cache_dtype is '{cache_dtype}', which is for heads of 8, 16, 24 … {MOST_HEAD_DIM} elements; "
                f"{name} has {layer.heads.head_dim}: use int8 or fp8",
                "NKW-MODEL-OPTION",
            )
    if network.before:
        raise ModelError(
            f"kv_cache_dtype is '{cache_dtype}', which is for decoders of texts; {config.model_type} has an encoder: "
            "use int8 or fp8",
            "NKW-MODEL-OPTION",
        )
