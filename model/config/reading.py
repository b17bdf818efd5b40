"""Parts of a model from the fields of config.json, where its families spell them alike."""

from __future__ import annotations

from typing import Any

from model.config.fields import Fields
from model.config.mixers import GroupedAttention
from model.config.parts import Mlp, Norms
from model.config.rotary import rotary

_MOST_LAYERS = 10_000
MOST_HEADS = 512
"""Twice as many as the widest published models have; a plan issues instructions for every head of a rank."""
MOST_HEAD_DIM = 2**16
_DTYPES = ("bfloat16", "float16", "float32")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names of Hugging Face for the activations of the kernel `mlp`."""


def common(fields: Fields, tied: bool = False, limited: bool = True) -> dict[str, Any]:
    """The fields of `ModelConfig` that every text model states alike; `tied` is the family's default.

    A sequence has a longest where it is `limited`.
    """
    return {
        "max_position_embeddings": fields.count("max_position_embeddings") if limited else None,
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=tied),
        "dtype": dtype(fields),
    }


def attention(
    fields: Fields,
    partial: bool = False,
    default_theta: float = 10000.0,
    default_head_dim: int | None = None,
    **quirks: Any,
) -> GroupedAttention:
    """Grouped attention with what a family adds to it; ModelError where the numbers of heads do not fit.

    Every head is rotated, a part of it if the family is `partial` and its config says so. Heads divide the hidden size
    where neither the config nor the family says their size.
    """
    heads = fields.count("num_attention_heads", most=MOST_HEADS)
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads, {heads}")
    hidden = fields.count("hidden_size")
    if "head_dim" not in fields and default_head_dim is None and hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads, {heads}")
    head_dim = fields.count(
        "head_dim", default=default_head_dim or max(1, hidden // heads), most=MOST_HEAD_DIM
    )
    if head_dim % 2:
        fields.unsupported("head_dim", f"{head_dim} is odd; rotary embedding turns pairs")
    if "positions" not in quirks:
        quirks["positions"] = rotary(fields, head_dim, partial, default_theta)
    return GroupedAttention(heads, kv_heads, head_dim, **quirks)


def biases(fields: Fields, default: bool = False) -> dict[str, bool]:
    """Biases on the projections of attention where the config asks for them, or is silent and the family has them."""
    asked = fields.flag("attention_bias", default=default)
    return dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), asked)


def gated_mlp(fields: Fields, field: str = "hidden_act", default: str = "silu", bias: bool = False) -> Mlp:
    """A gated MLP; its activation stands in `field`. A family with `bias` may have biases."""
    return Mlp(
        fields.count("intermediate_size"),
        activation(fields, field, default),
        bias and fields.flag("mlp_bias"),
    )


def activation(fields: Fields, field: str, default: str) -> str:
    """The activation that a field names; another one than the known is a refusal."""
    named = fields.get(field, default)
    if isinstance(named, str) and named in _ACTIVATIONS:
        return _ACTIVATIONS[named]
    fields.unsupported(field, f"{named!r:.60}; an MLP is computed with {', '.join(_ACTIVATIONS)}")
    return str(named)


def norms(fields: Fields, name: str = "rms_norm_eps", default: float = 1e-6, **quirks: Any) -> Norms:
    """RMSNorms of a block."""
    return Norms(fields.number(name, default=default), **quirks)


def layer_count(fields: Fields, name: str = "num_hidden_layers") -> int:
    """The number of layers; ModelError for one that no model has, because a config holds them one by one."""
    return fields.count(name, most=_MOST_LAYERS)


def dtype(fields: Fields) -> str | None:
    """The dtype that a config names; another one than the known is a refusal."""
    for name in ("dtype", "torch_dtype"):  # transformers 5 writes the first, earlier versions the second
        value = fields.get(name, None)
        if value is None:
            continue
        if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
            return value.removeprefix("torch.")
        fields.unsupported(name, f"{value!r:.60}; known are {', '.join(_DTYPES)}")
    return None


def window_of(fields: Fields, default: int | None = None) -> int | None:
    """The window of the layers that have one; None where there is none: a family without a default, or null."""
    if fields.is_null("sliding_window") or (default is None and "sliding_window" not in fields):
        return None
    return fields.count("sliding_window", default=default)


def full_in_every(count: int, layers: int, window: int | None) -> list[int | None]:
    """The windows of layers of which every `count`th sees all positions."""
    return [None if (layer + 1) % count == 0 else window for layer in range(layers)]


def windows(fields: Fields, default: list[int | None], window: int | None) -> list[int | None]:
    """The window of each layer. Sliding layers by `layer_types` have `window`; without that field `default` holds."""
    if "layer_types" not in fields:
        return default
    layer_types = read_layer_types(fields, len(default), ("full_attention", "sliding_attention"))
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types]


def read_layer_types(fields: Fields, layers: int, known: tuple[str, ...]) -> list[str]:
    """Read `layer_types`, one of the `known` names for each of `layers` layers.

    Raises:
        ModelError: The field is not a list of so many names, or a name is unknown.
    """
    layer_types = fields.get("layer_types", None)
    if not isinstance(layer_types, list) or len(layer_types) != layers:
        raise fields.error("layer_types", f"not a list of {layers} names, one for each layer")
    for layer_type in layer_types:
        if layer_type not in known:
            raise fields.error("layer_types", f"{layer_type!r:.60}; known are {', '.join(known)}")
    return layer_types


def count_or_zero(fields: Fields, name: str, default: int = 0) -> int:
    """Read a whole number that may be 0; an absent field means `default`."""
    return 0 if fields.get(name, default) == 0 else fields.count(name, default=default)


def chosen_experts(fields: Fields, experts: int, name: str = "num_experts_per_tok") -> int:
    """Experts that a token passes; ModelError for more than there are."""
    number = fields.count(name)
    if number > experts:
        raise fields.error(name, f"{number} of {experts} experts")
    return number
