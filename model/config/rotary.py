"""Readers of rotary positions in config.json."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.mixers import Positions
from model.config.rope import (
    RopeParameters,
    RopeType,
    check_finite,
    compute_longrope_attention_factor,
    compute_yarn_attention_factor,
)
from model.errors import ModelError


def read_positions(
    fields: Fields,
    head_dim: int,
    partial: bool = False,
    default_theta: float = 10000.0,
    default_factor: float = 1.0,
) -> Positions:
    """Return the rotary positions of heads of `head_dim` elements that a config.json describes.

    They are read from rope_parameters (transformers 5), or else from rope_scaling and rope_theta. The arguments are
    those of `read_scaled_positions`, which also says what is refused.
    """
    field = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    return read_scaled_positions(
        fields,
        fields.table(field),
        field,
        head_dim,
        default_theta=default_theta,
        partial=partial,
        default_factor=default_factor,
    )


def read_scaled_positions(
    fields: Fields,
    scaling: Fields,
    field: str,
    head_dim: int,
    name: str = "rope",
    theta: str = "rope_theta",
    default_theta: float = 10000.0,
    partial: bool = False,
    default_factor: float = 1.0,
) -> Positions:
    """Return the rotary positions that an object of config.json describes, for heads of `head_dim` elements.

    An unknown type, a field of the type that is missing or out of range, and numbers without finite frequencies are
    added to the refusals; the returned positions only serve plans then.

    Args:
        fields: the fields of config.json.
        scaling: the fields of the object, which may have rope_theta.
        field: the name of the object's field.
        head_dim: the elements of a head, rotated or not.
        name: the name of the tables of cosines and sines.
        theta: the field of config.json with the base, which is read if the object has none.
        default_theta: the base if neither has it.
        partial: the family allows a partial_rotary_factor below 1.
        default_factor: partial_rotary_factor where neither has it.

    Raises:
        ModelError: max_position_embeddings is missing or has the wrong type.
    """
    limit = fields.count("max_position_embeddings")
    positions = Positions(RopeParameters(10000.0), limit, head_dim, name)
    try:
        width = _read_rotated_width(fields, scaling, head_dim, partial, default_factor)
        base = (
            scaling.number("rope_theta") if "rope_theta" in scaling else fields.number(theta, default_theta)
        )
        if base <= 1:
            raise fields.error(theta, f"{base}; must be greater than 1")
        positions = Positions(_read_parameters(fields, scaling, base, limit, width), limit, width, name)
        check_finite(positions.rope, width, limit)
    except ModelError as error:
        fields.refusals.append(str(error))
    except (ArithmeticError, ValueError):
        fields.unsupported(
            field if field in fields else theta, "these numbers lead to rotations that are not finite"
        )
    return positions


def _read_rotated_width(
    fields: Fields, scaling: Fields, head_dim: int, partial: bool, default_factor: float
) -> int:
    """Return the number of rotated elements of a head of `head_dim` elements, by partial_rotary_factor.

    A proportional rope counts as rotating the whole head.

    Raises:
        ModelError: The factor is not 1 in a family without `partial`, or does not leave a part of the head.
    """
    if _read_type(scaling)[1] == RopeType.proportional.value:
        return head_dim
    for owner, default in (
        (scaling, 1.0),
        (fields, 1.0 if "partial_rotary_factor" in scaling else default_factor),
    ):
        factor = owner.number("partial_rotary_factor", default=default)
        if factor == 1:
            continue
        if not partial:
            raise owner.error("partial_rotary_factor", f"{factor} is not 1; this family turns whole heads")
        width = int(head_dim * factor)
        if factor > 1 or width < 1:
            raise owner.error("partial_rotary_factor", f"{factor} of heads of {head_dim} is no part of them")
        return width
    return head_dim


def _read_parameters(fields: Fields, scaling: Fields, theta: float, limit: int, width: int) -> RopeParameters:
    """Return the rope parameters of the type that the object `scaling` names.

    Args:
        fields: the fields of config.json.
        scaling: the fields of the object.
        theta: base of the frequencies.
        limit: most positions of a sequence.
        width: rotated elements of a head.

    Raises:
        ModelError: the type is unknown, or a field of the type is missing or out of its range.
    """
    field, type_name = _read_type(scaling)
    known = [rope_type.value for rope_type in RopeType]
    if type_name not in known:
        raise scaling.error(field, f"{type_name!r:.60} is not supported; known are {', '.join(known)}")
    rope_type = RopeType(type_name)
    if rope_type is RopeType.default:
        return RopeParameters(theta)
    if rope_type is RopeType.proportional:
        return _read_proportional(scaling, theta, width)
    original_owner = fields if "original_max_position_embeddings" in fields else scaling
    if rope_type is RopeType.yarn and scaling.get("factor", None) is None:
        # transformers takes the ratio of the two contexts where YaRN has no factor.
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
        return RopeParameters(
            theta,
            rope_type,
            factor,
            original,
            attention_factor=scaling.number(
                "attention_factor", default=compute_longrope_attention_factor(factor, original)
            ),
            short_factors=_read_factors(scaling, "short_factor", width),
            long_factors=_read_factors(scaling, "long_factor", width),
        )
    return _read_yarn(scaling, theta, factor, original)


def _read_type(scaling: Fields) -> tuple[str, object]:
    """Return the name of the field with the type, rope_type or type, and its value; "default" if both are absent.

    The old name "su" of longrope is returned as "longrope".
    """
    field = "rope_type" if "rope_type" in scaling else "type"
    rope_type = scaling.get(field, "default")
    return field, "longrope" if rope_type == "su" else rope_type  # its name in early configs of Phi-3


def _read_proportional(scaling: Fields, theta: float, head_dim: int) -> RopeParameters:
    """Return the parameters of a rope that rotates the first pairs of a head of `head_dim` elements.

    Raises:
        ModelError: partial_rotary_factor, their share of all pairs, is above 1.
    """
    share = scaling.number("partial_rotary_factor", default=1.0)
    if share > 1:
        raise scaling.error("partial_rotary_factor", f"{share} of a head is more than the head")
    factor = scaling.number("factor", default=1.0)
    return RopeParameters(theta, RopeType.proportional, factor, pairs=int(share * head_dim // 2))


def _read_yarn(scaling: Fields, theta: float, factor: float, original: int) -> RopeParameters:
    """Return the parameters of YaRN; fields that are absent take YaRN's defaults.

    `factor` is the scaling factor, and `original` the context of the first training in positions.

    Raises:
        ModelError: A field has the wrong type.
    """
    mscale = scaling.number("mscale", default=0.0, positive=False)
    mscale_all_dim = scaling.number("mscale_all_dim", default=0.0, positive=False)
    standard = compute_yarn_attention_factor(factor, mscale, mscale_all_dim)
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


def _read_factors(scaling: Fields, name: str, width: int) -> tuple[float, ...]:
    """Return the factors in the field `name`, one for each pair of `width` rotated elements.

    Raises:
        ModelError: The field is not a list of so many positive numbers.
    """
    pairs, factors = -(-width // 2), scaling.get(name, None)
    is_complete = isinstance(factors, list) and len(factors) == pairs
    if not is_complete or not all(isinstance(factor, (int, float)) and factor > 0 for factor in factors):
        raise scaling.error(name, f"not a list of {pairs} positive numbers, one for each pair of a head")
    return tuple(map(float, factors))
