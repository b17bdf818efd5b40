"""Scheme of quantised caches in `quantization_config` of a config.json (compressed-tensors)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.formats.format import ConfigFields


@dataclass(frozen=True)
class CacheScheme:
    """Element type of the caches for which a checkpoint has scales.

    largest  largest element: 448 of float8_e4m3fn, 127 of int8
    problem  why the checkpoint's scales cannot be used; empty if they can
    """

    largest: float = 448.0
    problem: str = ""

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> CacheScheme:
        """Return the scheme in the field `kv_cache_scheme`; without it, that of float8_e4m3fn.

        Raises:
            ModelError: The field is no object.
        """
        if quantization_config.get("kv_cache_scheme", None) is None:
            return cls()
        scheme = quantization_config.table("kv_cache_scheme")
        is_integer = scheme.get("type", "float") == "int"
        required: dict[str, tuple[Any, ...]] = {
            "num_bits": (8,),
            "type": ("float", "int"),
            "symmetric": (True,),
            "dynamic": (False,),
            "strategy": ("tensor", "attn_head"),
        }
        for name, known in required.items():
            actual = scheme.get(name, known[0])
            if actual not in known:
                expected = " or ".join(map(repr, known))
                return cls(problem=f"kv_cache_scheme has {name} {actual!r:.40}, not {expected}")
        return cls(127.0 if is_integer else 448.0)


FP8_CACHES = CacheScheme()
"""Scheme of float8_e4m3fn, which checkpoints without `kv_cache_scheme` follow."""
