"""Readers of the fields of config.json that several model families share.

A reader raises ModelError for a field that is missing or has the wrong type. A field that describes a computation that
no layer has is added to `fields.refusals` instead, so that the model can be planned.
"""

from __future__ import annotations

from typing import Any

from model.config.blocks import Mlp, Norms
from model.config.fields import Fields
from model.config.mixers import GroupedAttention
from model.config.rotary import read_positions

_MOST_LAYERS = 10_000
"""A config has one object for each layer, so their number is bounded."""
MOST_HEADS = 512
"""Twice the heads of the widest published models; a plan issues instructions for every head of a rank."""
MOST_HEAD_DIM = 2**16
_DTYPES = ("bfloat16", "float16", "float32")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
}
"""Activations of the kernel `mlp` by their Hugging Face names."""


def read_common(fields: Fields, tied: bool = False, limited: bool = True) -> dict[str, Any]:
    """Return the arguments of `ModelConfig` that every text model has: limit of positions, sizes, tying, and dtype.

    Args:
        fields: the fields of config.json.
        tied: the family's default of tie_word_embeddings.
        limited: whether max_position_embeddings limits sequences; it is required then, and otherwise not read.

    Raises:
        ModelError: a field is missing or has the wrong type.
    """
    return {
        "max_position_embeddings": fields.count("max_position_embeddings") if limited else None,
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=tied),
        "dtype": read_dtype(fields),
    }


def read_attention(
    fields: Fields,
    partial: bool = False,
    default_theta: float = 10000.0,
    default_head_dim: int | None = None,
    default_factor: float = 1.0,
    **quirks: Any,
) -> GroupedAttention:
    """Return grouped attention with rotary positions.

    Args:
        fields: the fields of config.json.
        partial: the family allows a partial_rotary_factor below 1.
        default_theta: base of the frequencies where the config has none.
        default_head_dim: size of a head where the config has none; None for hidden_size / num_attention_heads.
        default_factor: partial_rotary_factor where the config has none.
        quirks: further fields of `GroupedAttention`, which replace the rotary positions too.

    Raises:
        ModelError: num_key_value_heads does not divide the heads, no size of a head follows, or a field is missing or
            has the wrong type.
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
        quirks["positions"] = read_positions(fields, head_dim, partial, default_theta, default_factor)
    return GroupedAttention(heads, kv_heads, head_dim, **quirks)


def read_biases(fields: Fields, default: bool = False) -> dict[str, bool]:
    """Return the four bias arguments of `GroupedAttention`, all equal to attention_bias, `default` if it is absent."""
    names = ("query_bias", "key_bias", "value_bias", "output_bias")
    return dict.fromkeys(names, fields.flag("attention_bias", default=default))


def read_gated_mlp(
    fields: Fields, field: str = "hidden_act", default: str = "silu", bias: bool = False
) -> Mlp:
    """Return a gated MLP with the width intermediate_size.

    Args:
        fields: The fields of config.json.
        field: The field with the name of the activation.
        default: The activation if the field is absent.
        bias: Whether the family has mlp_bias, which decides on biases; without it there are none.
    """
    return Mlp(
        fields.count("intermediate_size"),
        read_activation(fields, field, default),
        bias and fields.flag("mlp_bias"),
    )


def read_activation(fields: Fields, field: str, default: str) -> str:
    """Return the name that the kernel `mlp` has for the activation in a field, or for `default` if it is absent.

    An unknown activation is returned as it is and added to the refusals.
    """
    named = fields.get(field, default)
    if isinstance(named, str) and named in _ACTIVATIONS:
        return _ACTIVATIONS[named]
    fields.unsupported(field, f"{named!r:.60}; an MLP is computed with {', '.join(_ACTIVATIONS)}")
    return str(named)


def read_norms(fields: Fields, name: str = "rms_norm_eps", default: float = 1e-6, **quirks: Any) -> Norms:
    """Return the norms of a block with the eps of field `name`; `quirks` are further fields of `Norms`."""
    return Norms(fields.number(name, default=default), **quirks)


def read_layer_count(fields: Fields, name: str = "num_hidden_layers") -> int:
    """Return the number of layers in the field `name`, 1 to 10,000. Raises ModelError for anything else."""
    return fields.count(name, most=_MOST_LAYERS)


def read_dtype(fields: Fields) -> str | None:
    """Return the dtype in the field dtype or torch_dtype, such as "bfloat16"; None if both are absent.

    An unknown dtype is added to the refusals.
    """
    for name in ("dtype", "torch_dtype"):  # transformers 5 writes the first, earlier versions the second
        value = fields.get(name, None)
        if value is None:
            continue
        if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
            return value.removeprefix("torch.")
        fields.unsupported(name, f"{value!r:.60}; known are {', '.join(_DTYPES)}")
    return None


def read_window(fields: Fields, default: int | None = None) -> int | None:
    """Return sliding_window in positions: None if it is null; `default`, which may be None, if it is absent."""
    if fields.is_null("sliding_window") or (default is None and "sliding_window" not in fields):
        return None
    return fields.count("sliding_window", default=default)


def alternate_windows(count: int, layers: int, window: int | None) -> list[int | None]:
    """Return the window of each of `layers` layers: None for every `count`-th layer, `window` for all others."""
    return [None if (layer + 1) % count == 0 else window for layer in range(layers)]


def read_windows(fields: Fields, default: list[int | None], window: int | None) -> list[int | None]:
    """Return the window of each layer, None for layers that see all positions, by the field `layer_types`.

    Layers of the type sliding_attention have the window `window`. Without the field the result is `default`, which
    always gives the number of layers.

    Raises:
        ModelError: `layer_types` is not a list of full_attention or sliding_attention for each layer.
    """
    if "layer_types" not in fields:
        return default
    layer_types = read_layer_types(fields, len(default), ("full_attention", "sliding_attention"))
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types]


def read_layer_types(
    fields: Fields, layers: int, known: tuple[str, ...], name: str = "layer_types"
) -> list[str]:
    """Return the list in the field `name`, which has one of the `known` names for each of `layers` layers.

    Raises:
        ModelError: The field is not a list of so many names, or a name is unknown.
    """
    layer_types = fields.get(name, None)
    if not isinstance(layer_types, list) or len(layer_types) != layers:
        raise fields.error(name, f"not a list of {layers} names, one for each layer")
    for layer_type in layer_types:
        if layer_type not in known:
            raise fields.error(name, f"{layer_type!r:.60}; known are {', '.join(known)}")
    return layer_types


def read_count_or_zero(fields: Fields, name: str, default: int = 0) -> int:
    """Return the whole number in a field, 0 included; `default` if the field is absent or null.

    Raises:
        ModelError: The value is anything else.
    """
    return 0 if fields.get(name, default) == 0 else fields.count(name, default=default)


def read_experts_per_token(fields: Fields, experts: int, name: str = "num_experts_per_tok") -> int:
    """Return the number in the field `name` of experts that a token passes, of `experts` experts.

    Raises:
        ModelError: The field is absent, not a positive whole number, or above `experts`.
    """
    number = fields.count(name)
    if number > experts:
        raise fields.error(name, f"{number} of {experts} experts; a token passes at most all of them")
    return number
