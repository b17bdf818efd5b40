"""Parts of a model from the fields of config.json, where its families spell them alike."""

from __future__ import annotations

from typing import Any

from model.config.fields import Fields
from model.config.parts import GroupedAttention, Mlp, Norms, Positions
from model.errors import ModelError
from model.rope import RopeParameters, RopeType, check_finite, yarn_attention_factor
from simulate.errors import shown

_MOST_LAYERS = 10_000
MOST_HEADS = 512
"""Twice as many as the widest published models have; a plan issues instructions for every head of a rank."""
MOST_HEAD_DIM = 2**16
_DTYPES = ("bfloat16", "float16", "float32")


def common(fields: Fields, tied: bool = False) -> dict[str, Any]:
    """The fields of `ModelConfig` that every text model states alike; `tied` is the family's default."""
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=tied),
        "dtype": dtype(fields),
    }


def rotary(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The fields of `ModelConfig` that rotary positions decide.

    A type without frequencies here is a refusal, and so are numbers that lead to none.
    """
    limit = fields.count("max_position_embeddings")
    positions = Positions(RopeParameters(10000.0), limit)
    try:
        positions = Positions(rope_parameters(fields, limit), limit)
        check_finite(positions.rope, head_dim, limit)
    except ModelError as error:
        fields.refusals.append(str(error))
    except (ArithmeticError, ValueError):
        name = _rope_field(fields) if _rope_field(fields) in fields else "rope_theta"
        fields.unsupported(name, "these numbers lead to rotations that are not finite")
    return {"max_position_embeddings": limit, "positions": positions}


def attention(fields: Fields, **quirks: Any) -> GroupedAttention:
    """Grouped attention with what a family adds to it; ModelError where the numbers of heads do not fit."""
    heads = fields.count("num_attention_heads", most=MOST_HEADS)
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads, {heads}")
    hidden = fields.count("hidden_size")
    if "head_dim" not in fields and hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads, {heads}")
    head_dim = fields.count("head_dim", default=max(1, hidden // heads), most=MOST_HEAD_DIM)
    if head_dim % 2:
        fields.unsupported("head_dim", f"{head_dim} is odd; rotary embedding turns pairs")
    return GroupedAttention(heads, kv_heads, head_dim, **quirks)


def biases(fields: Fields) -> dict[str, bool]:
    """Biases on all four projections of attention where the config asks for them."""
    asked = fields.flag("attention_bias")
    if asked:
        fields.unsupported("attention_bias", "true; the projection kernels add no bias")
    return dict.fromkeys(("query_bias", "key_bias", "value_bias", "output_bias"), asked)


def gated_mlp(fields: Fields, activation: str = "hidden_act", default: str = "silu") -> Mlp:
    """A gated MLP; its activation stands in the field `activation`."""
    named = fields.get(activation, default)
    if named != "silu":
        fields.unsupported(activation, f"{named!r:.60}; an MLP is computed with silu only")
    biased = fields.flag("mlp_bias")
    if biased:
        fields.unsupported("mlp_bias", "true; the projection kernels add no bias")
    return Mlp(fields.count("intermediate_size"), str(named), biased)


def norms(fields: Fields, name: str = "rms_norm_eps", **quirks: bool) -> Norms:
    """RMSNorms of a block."""
    return Norms(fields.number(name, default=1e-6), **quirks)


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


def quantisation(fields: Fields) -> str | None:
    """The method that `quantization_config` names; a refusal, because no kernel dequantises weights."""
    if "quantization_config" not in fields:
        return None
    method = shown(str(fields.table("quantization_config").get("quant_method", "unnamed")), 40)
    fields.unsupported(
        "quantization_config", f"weights quantised by {method}; the kernels take unquantised weights only"
    )
    return method


def windows(fields: Fields, layers: int, window: int | None, full_every: int) -> list[int | None]:
    """The window of each layer: from `layer_types`, else full attention in every `full_every`th layer."""
    kinds = fields.get("layer_types", None)
    if kinds is None:
        return [None if (layer + 1) % full_every == 0 else window for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"not a list of {layers} names, one for each layer")
    known = ("full_attention", "sliding_attention")
    for kind in kinds:
        if kind not in known:
            raise fields.error("layer_types", f"{kind!r:.60}; known are {', '.join(known)}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def chosen_experts(fields: Fields, experts: int) -> int:
    """Experts that a token passes; ModelError for more than there are."""
    number = fields.count("num_experts_per_tok")
    if number > experts:
        raise fields.error("num_experts_per_tok", f"{number} of {experts} experts")
    return number


def _rope_field(fields: Fields) -> str:
    return "rope_parameters" if "rope_parameters" in fields else "rope_scaling"


def rope_parameters(fields: Fields, positions: int) -> RopeParameters:
    """Rotary parameters from `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it."""
    scaling = fields.table(_rope_field(fields))
    theta = (scaling if "rope_theta" in scaling else fields).number("rope_theta", default=10000.0)
    kind_field = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.get(kind_field, "default")
    known = [each.value for each in RopeType]
    if not isinstance(kind, str) or kind not in known:
        raise scaling.error(kind_field, f"{kind!r:.60} is not supported; known are {', '.join(known)}")
    rope_type = RopeType(kind)
    for owner in (fields, scaling):
        if owner.number("partial_rotary_factor", default=1.0) != 1:
            raise owner.error("partial_rotary_factor", "not 1; the rope kernel turns whole heads")
    if theta <= 1:
        raise fields.error("rope_theta", f"{theta}; must be greater than 1")
    if rope_type is RopeType.default:
        return RopeParameters(theta)
    if rope_type is RopeType.yarn and scaling.get("factor", None) is None:
        # transformers takes the ratio of the two contexts where YaRN gives no factor of its own.
        factor = positions / scaling.count("original_max_position_embeddings")
    else:
        factor = scaling.number("factor")
    if rope_type in (RopeType.linear, RopeType.dynamic):
        return RopeParameters(theta, rope_type, factor)
    original_owner = fields if "original_max_position_embeddings" in fields else scaling
    original = original_owner.count("original_max_position_embeddings", default=positions)
    if rope_type is RopeType.llama3:
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"{high}; must be greater than low_freq_factor, {low}")
        return RopeParameters(theta, rope_type, factor, original, low, high)
    mscale = scaling.number("mscale", default=0.0, positive=False)
    mscale_all_dim = scaling.number("mscale_all_dim", default=0.0, positive=False)
    return RopeParameters(
        theta,
        rope_type,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        truncate=scaling.flag("truncate", default=True),
        attention_factor=scaling.number(
            "attention_factor", default=yarn_attention_factor(factor, mscale, mscale_all_dim)
        ),
    )
