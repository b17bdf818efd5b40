"""Rotary position embedding: inverse frequencies and the cos/sin tables that the rope kernel gathers from.

Pair i of a head is its dimensions i and i + head_dim/2 (the half-split order of Hugging Face checkpoints), turned by
position * inverse_frequency[i]. Where a model turns the first elements of a head only, they stand for the head here.
The scaling variants and their formulas are those of Hugging Face transformers. Frequencies are worked out in float64
and rounded once to float32; angles are float32 products, as there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np


class RopeType(Enum):
    """How frequencies are stretched beyond the context a model was first trained on."""

    default = "default"
    linear = "linear"
    dynamic = "dynamic"
    llama3 = "llama3"
    yarn = "yarn"
    longrope = "longrope"
    proportional = "proportional"


@dataclass(frozen=True)
class RopeParameters:
    """Parameters of the frequencies; fields that a type does not use keep their neutral value.

    `short_factors` and `long_factors` divide the frequencies of longrope, one each for every pair. Of a proportional
    rope the first `pairs` pairs are rotated, with the frequencies of as many pairs of the whole head.
    """

    theta: float
    rope_type: RopeType = RopeType.default
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    pairs: int = 0

    @property
    def longest_short(self) -> int | None:
        """The longest sequence that longrope turns by its short factors; None where frequencies never change.

        A longer sequence takes the long factors at all of its positions, also at those cached before.
        """
        changes = self.rope_type is RopeType.longrope and self.short_factors != self.long_factors
        return self.original_positions if changes else None

    def of_length(self, length: int) -> RopeParameters:
        """Frequencies that never change: those of a sequence of `length` tokens, for sequences of any length."""
        if self.longest_short is None:
            return self
        factors = self.long_factors if length > self.longest_short else self.short_factors
        return replace(self, short_factors=factors, long_factors=factors)


def inverse_frequencies(
    rope: RopeParameters, head_dim: int, max_positions: int, length: int | None = None
) -> np.ndarray:
    """Radians per position of each rotated pair: float32 [head_dim / 2].

    `length` is the number of positions in use: `dynamic` looks at it beyond `max_positions`, longrope beyond the
    positions that a model was first trained on.
    """
    theta = rope.theta
    if rope.rope_type is RopeType.dynamic and length is not None and length > max_positions and head_dim > 2:
        stretch = rope.factor * length / max_positions - (rope.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    inverse = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type is RopeType.linear:
        inverse /= rope.factor
    elif rope.rope_type is RopeType.proportional:
        inverse[rope.pairs :] = 0.0
        inverse /= rope.factor
    elif rope.rope_type is RopeType.llama3:
        inverse = _llama3(rope, inverse)
    elif rope.rope_type is RopeType.yarn:
        inverse = _yarn(rope, inverse, head_dim)
    elif rope.rope_type is RopeType.longrope:
        stretched = length is not None and length > rope.original_positions
        inverse /= np.array(rope.long_factors if stretched else rope.short_factors)
    return inverse.astype(np.float32)


def check_finite(rope: RopeParameters, head_dim: int, max_positions: int) -> None:
    """Raise ArithmeticError or ValueError where these numbers lead out of float64, or the tables out of float32."""
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        inverse = inverse_frequencies(rope, head_dim, max_positions, max_positions)
        last = np.abs(inverse).max() * np.float32(max_positions)
        np.float64(rope.attention_factor).astype(np.float32)
        if not np.isfinite(last * np.float32(rope.attention_factor)):
            raise FloatingPointError("an angle is not finite")


def tables(
    rope: RopeParameters, head_dim: int, max_positions: int, positions: int, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions 0 .. positions - 1: two float32 arrays [positions, head_dim / 2].

    `length` is that of the sequence, `positions` where it is not given.
    """
    inverse = inverse_frequencies(rope, head_dim, max_positions, positions if length is None else length)
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse
    wide = angles.astype(np.float64)
    scale = rope.attention_factor
    return (np.cos(wide) * scale).astype(np.float32), (np.sin(wide) * scale).astype(np.float32)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The factor of cosines and sines in YaRN, for a config without attention_factor."""

    def logarithmic(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return logarithmic(mscale) / logarithmic(mscale_all_dim)
    return logarithmic(1.0)


def yarn_score_factor(factor: float, mscale_all_dim: float) -> float:
    """The factor of every score in YaRN, for latent attention: the square of what it is for rotated elements."""
    return (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2 if mscale_all_dim and factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_positions: int) -> float:
    """The factor of cosines and sines in longrope, for a config without attention_factor."""
    return math.sqrt(1 + math.log(factor) / math.log(original_positions)) if factor > 1 else 1.0


def _llama3(rope: RopeParameters, inverse: np.ndarray) -> np.ndarray:
    """Short wavelengths stay, long ones are divided by the factor, those between are blended."""
    turns = rope.original_positions * inverse / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)
    return (1 - share) * inverse / rope.factor + share * inverse


def _yarn(rope: RopeParameters, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    """Pairs that turn often keep their frequency, pairs that turn seldom are divided by the factor."""

    def pair_that_turns(times: float) -> float:
        return (
            head_dim * math.log(rope.original_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001  # transformers' guard against a division by zero
    divided = np.clip((np.arange(head_dim // 2) - first) / span, 0.0, 1.0)
    return inverse / rope.factor * divided + inverse * (1 - divided)
