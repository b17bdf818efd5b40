"""What the readers of several families share: sizes of heads, grouped attention, gated MLPs, dtype and table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.config import Fields as Fields

_MOST_LAYERS = 10_000
_DTYPES = ("float32", "float16", "bfloat16")


__all__ = ["Fields", "Heads", "base", "dtype", "gated_mlp", "heads", "layer_count", "windows"]


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and their size."""

    query: int
    key_value: int
    dim: int

    @property
    def query_width(self) -> int:
        """Width of all queries."""
        return self.query * self.dim

    @property
    def kv_width(self) -> int:
        """Width of all keys."""
        return self.key_value * self.dim

    def projections(self, hidden: int, qkv_bias: bool = False, output_bias: bool = False) -> int:
        """Parameters of the four projections."""
        biases = qkv_bias * (self.query_width + 2 * self.kv_width) + output_bias * hidden
        return 2 * hidden * self.query_width + self.kv_projections(hidden) + biases

    def kv_projections(self, hidden: int) -> int:
        """Parameters of the projections of keys and values."""
        return 2 * hidden * self.kv_width

    def attention(self, hidden: int, qkv_bias: bool = False, output_bias: bool = False) -> dict[str, int]:
        """The fields of `Layers` that grouped attention decides: keys and values of every head are cached."""
        return {
            "attention": self.projections(hidden, qkv_bias, output_bias),
            "attention_shared": self.kv_projections(hidden),
            "cache_per_token": 2 * self.kv_width,
            "prefill_products": 2 * self.query_width,
            "decode_products": 2 * self.query_width,
        }


def heads(fields: Fields) -> Heads:
    """The heads of a config; ModelError where their numbers do not fit."""
    query = fields.count("num_attention_heads")
    key_value = fields.count("num_key_value_heads", default=query)
    if query % key_value:
        raise fields.error("num_key_value_heads", f"{key_value} does not divide num_attention_heads, {query}")
    hidden = fields.count("hidden_size")
    if "head_dim" not in fields and hidden % query:
        raise fields.error("hidden_size", f"{hidden} is no multiple of num_attention_heads, {query}")
    return Heads(query, key_value, fields.count("head_dim", default=max(1, hidden // query)))


def layer_count(fields: Fields, name: str = "num_hidden_layers") -> int:
    """The number of layers; ModelError for one that no model has, because some readers go through them one by one."""
    count = fields.count(name)
    if count > _MOST_LAYERS:
        raise fields.error(name, f"{count}; a plan takes at most {_MOST_LAYERS:,} layers")
    return count


def gated_mlp(hidden: int, width: int, bias: bool = False) -> int:
    """Parameters of gate, up and down projections."""
    return 3 * hidden * width + bias * (2 * width + hidden)


def base(fields: Fields, tied: bool = False) -> dict[str, Any]:
    """The fields of `Model` that every text model states alike; `tied` is the family's default."""
    vocabulary, hidden = fields.count("vocab_size"), fields.count("hidden_size")
    table = vocabulary * hidden
    return {
        "model_type": fields.get("model_type", ""),
        "dtype": dtype(fields),
        "vocabulary": vocabulary,
        "hidden": hidden,
        "embedding": table,
        "head": 0 if fields.flag("tie_word_embeddings", default=tied) else table,
    }


def dtype(fields: Fields) -> str | None:
    """The dtype that a config names, if it is one that a plan knows."""
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name, None)
        if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
            return value.removeprefix("torch.")
    return None


def windows(fields: Fields, layers: int, window: int | None, full_every: int) -> list[int | None]:
    """The window of each layer: `layer_types` where the config lists them, else full attention every so many layers."""
    kinds = fields.get("layer_types", None)
    if kinds is None:
        return [None if (layer + 1) % full_every == 0 else window for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"not a list of {layers} names, one for each layer")
    known = ("full_attention", "sliding_attention")
    for kind in kinds:
        if kind not in known:
            raise fields.error("layer_types", f"{kind!r}; known are {', '.join(known)}")
    return [window if kind == "sliding_attention" else None for kind in kinds]
