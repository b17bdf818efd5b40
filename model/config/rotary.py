"""Rotary positions from the fields of config.json."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.mixers import Positions
from model.config.rope import (
    RopeParameters,
    RopeType,
    check_finite,
    longrope_attention_factor,
    yarn_attention_factor,
)
from model.errors import ModelError


def rotary(fields: Fields, head_dim: int, partial: bool = False, default_theta: float = 10000.0) -> Positions:
    """The positions of heads, from `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it."""
    named = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    scaling = fields.table(named)
    return positions_of(fields, scaling, named, head_dim, default_theta=default_theta, partial=partial)


def positions_of(
    fields: Fields,
    scaling: Fields,
    named: str,
    head_dim: int,
    name: str = "rope",
    theta: str = "rope_theta",
    default_theta: float = 10000.0,
    partial: bool = False,
) -> Positions:
    """The positions that the table `scaling` of field `named` describes, with the base in field `theta` beside it.

    A type without frequencies here is a refusal, and so are numbers that lead to none.
    """
    limit = fields.count("max_position_embeddings")
    positions = Positions(RopeParameters(10000.0), limit, head_dim, name)
    try:
        width = _rotated_width(fields, scaling, head_dim, partial)
        base = (
            scaling.number("rope_theta") if "rope_theta" in scaling else fields.number(theta, default_theta)
        )
        if base <= 1:
            raise fields.error(theta, f"{base}; must be greater than 1")
        positions = Positions(_parameters(fields, scaling, base, limit, width), limit, width, name)
        check_finite(positions.rope, width, limit)
    except ModelError as error:
        fields.refusals.append(str(error))
    except (ArithmeticError, ValueError):
        about = named if named in fields else theta
        fields.unsupported(about, "these numbers lead to rotations that are not finite")
    return positions


def _rotated_width(fields: Fields, scaling: Fields, head_dim: int, partial: bool) -> int:
    """Elements of a head that the tables cover."""
    if _named_type(scaling)[1] == RopeType.proportional.value:
        return head_dim
    for owner in (scaling, fields):
        factor = owner.number("partial_rotary_factor", default=1.0)
        if factor == 1:
            continue
        if not partial:
            raise owner.error("partial_rotary_factor", "not 1; this family turns whole heads")
        width = int(head_dim * factor)
        if factor > 1 or width < 1:
            raise owner.error("partial_rotary_factor", f"{factor} of heads of {head_dim} is no part of them")
        return width
    return head_dim


def _parameters(fields: Fields, scaling: Fields, theta: float, limit: int, width: int) -> RopeParameters:
    kind_field, kind = _named_type(scaling)
    known = [each.value for each in RopeType]
    if not isinstance(kind, str) or kind not in known:
        raise scaling.error(kind_field, f"{kind!r:.60} is not supported; known are {', '.join(known)}")
    rope_type = RopeType(kind)
    if rope_type is RopeType.default:
        return RopeParameters(theta)
    if rope_type is RopeType.proportional:
        return _proportional(scaling, theta, width)
    original_owner = fields if "original_max_position_embeddings" in fields else scaling
    if rope_type is RopeType.yarn and scaling.get("factor", None) is None:
        # transformers takes the ratio of the two contexts where YaRN gives no factor of its own.
        factor = limit / scaling.count("original_max_position_embeddings")
    elif rope_type is RopeType.longrope and scaling.get("factor", None) is None:
        factor = limit / original_owner.count("original_max_position_embeddings", default=limit)
    else:
        factor = scaling.number("factor")
    if rope_type in (RopeType.linear, RopeType.dynamic):
        return RopeParameters(theta, rope_type, factor)
    original = original_owner.count("original_max_position_embeddings", default=limit)
    if rope_type is RopeType.llama3:
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"{high}; must be greater than low_freq_factor, {low}")
        return RopeParameters(theta, rope_type, factor, original, low, high)
    if rope_type is RopeType.longrope:
        standard = longrope_attention_factor(factor, original)
        return RopeParameters(
            theta,
            rope_type,
            factor,
            original,
            attention_factor=scaling.number("attention_factor", default=standard),
            short_factors=_factors(scaling, "short_factor", width),
            long_factors=_factors(scaling, "long_factor", width),
        )
    return _yarn(scaling, theta, factor, original)


def _named_type(scaling: Fields) -> tuple[str, object]:
    """The field that names the type, and what it names."""
    field = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.get(field, "default")
    return field, "longrope" if kind == "su" else kind  # its name in early configs of Phi-3


def _proportional(scaling: Fields, theta: float, head_dim: int) -> RopeParameters:
    """A share of the pairs of a head is rotated."""
    share = scaling.number("partial_rotary_factor", default=1.0)
    if share > 1:
        raise scaling.error("partial_rotary_factor", f"{share} of a head is more than the head")
    pairs = int(share * head_dim // 2)
    factor = scaling.number("factor", default=1.0)
    return RopeParameters(theta, RopeType.proportional, factor, pairs=pairs)


def _yarn(scaling: Fields, theta: float, factor: float, original: int) -> RopeParameters:
    mscale = scaling.number("mscale", default=0.0, positive=False)
    mscale_all_dim = scaling.number("mscale_all_dim", default=0.0, positive=False)
    standard = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return RopeParameters(
        theta,
        RopeType.yarn,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        truncate=scaling.flag("truncate", default=True),
        attention_factor=scaling.number("attention_factor", default=standard),
    )


def _factors(scaling: Fields, name: str, width: int) -> tuple[float, ...]:
    """One factor for each pair of a head."""
    pairs = -(-width // 2)
    given = scaling.get(name, None)
    good = isinstance(given, list) and len(given) == pairs
    if not good or not all(isinstance(each, (int, float)) and each > 0 for each in given):
        raise scaling.error(name, f"not a list of {pairs} positive numbers, one for each pair of a head")
    return tuple(float(each) for each in given)
