"""Rotary position embedding: inverse frequencies, and the cos/sin tables that the rope kernel gathers from.

Pair i of a head is its dimensions i and i + head_dim/2 (the half-split order of Hugging Face checkpoints). It is
rotated by position * inverse_frequency[i]. Where a model rotates only the first elements of a head, `head_dim` is their
number. The scaling variants and their formulas follow Hugging Face transformers: frequencies are computed in float64
and rounded once to float32; angles are float32 products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np


class RopeType(Enum):
    """Scaling of frequencies beyond the context of the first training."""

    default = "default"
    linear = "linear"
    dynamic = "dynamic"
    llama3 = "llama3"
    yarn = "yarn"
    longrope = "longrope"
    proportional = "proportional"


@dataclass(frozen=True)
class RopeParameters:
    """Parameters of the frequencies; a field that a type does not use keeps its neutral value.

    original_positions            context of the first training, in positions
    attention_factor              factor of cosines and sines
    short_factors, long_factors   divisors of the frequencies of longrope, one for each pair
    pairs                         rotated pairs of a proportional rope, the first ones of the whole head
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
        """Most tokens of a sequence with the short factors of longrope; None where frequencies never change.

        A longer sequence has the long factors at all of its positions, also at positions that are cached already.
        """
        changes = self.rope_type is RopeType.longrope and self.short_factors != self.long_factors
        return self.original_positions if changes else None

    def fix_length(self, length: int) -> RopeParameters:
        """Return parameters that give sequences of all lengths the frequencies of a sequence of `length` tokens.

        Only longrope with differing factors changes; other parameters are returned as they are.
        """
        if self.longest_short is None:
            return self
        factors = self.long_factors if length > self.longest_short else self.short_factors
        return replace(self, short_factors=factors, long_factors=factors)


def compute_inverse_frequencies(
    rope: RopeParameters, head_dim: int, max_positions: int, length: int | None = None
) -> np.ndarray:
    """Return the radians per position of each rotated pair: float32 [head_dim / 2].

    Args:
        rope: the parameters.
        head_dim: rotated elements of a head.
        max_positions: most positions of a sequence, which `dynamic` compares with `length`.
        length: tokens of the sequence. It changes `dynamic` frequencies above `max_positions`, and frequencies of
            longrope above `original_positions`.
    """
    theta = rope.theta
    if rope.rope_type is RopeType.dynamic and length is not None and length > max_positions and head_dim > 2:
        stretch = rope.factor * length / max_positions - (rope.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    inverse = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type is RopeType.proportional:
        inverse[rope.pairs :] = 0.0
    if rope.rope_type in (RopeType.linear, RopeType.proportional):
        inverse /= rope.factor
    elif rope.rope_type is RopeType.llama3:
        inverse = _scale_llama3(rope, inverse)
    elif rope.rope_type is RopeType.yarn:
        inverse = _scale_yarn(rope, inverse, head_dim)
    elif rope.rope_type is RopeType.longrope:
        stretched = length is not None and length > rope.original_positions
        inverse /= np.array(rope.long_factors if stretched else rope.short_factors)
    return inverse.astype(np.float32)


def check_finite(rope: RopeParameters, head_dim: int, max_positions: int) -> None:
    """Raise ArithmeticError or ValueError if a frequency is not finite in float64, or a table or an angle in float32.

    The largest angle is that of position `max_positions`; `head_dim` counts the rotated elements of a head.
    """
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        inverse = compute_inverse_frequencies(rope, head_dim, max_positions, max_positions)
        last = np.abs(inverse).max() * np.float32(max_positions)
        np.float64(rope.attention_factor).astype(np.float32)
        if not np.isfinite(last * np.float32(rope.attention_factor)):
            raise FloatingPointError("an angle is not finite")


def compute_tables(
    rope: RopeParameters, head_dim: int, max_positions: int, positions: int, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and the sines of positions 0 to `positions` - 1: float32 [positions, head_dim / 2] each.

    Both are multiplied by the attention factor.

    Args:
        rope: the parameters.
        head_dim: rotated elements of a head.
        max_positions: most positions of a sequence.
        positions: rows of the tables.
        length: tokens of the sequence, as in `compute_inverse_frequencies`; None for `positions`.
    """
    inverse = compute_inverse_frequencies(
        rope, head_dim, max_positions, positions if length is None else length
    )
    angles = (np.arange(positions, dtype=np.float32)[:, None] * inverse).astype(np.float64)
    cosines, sines = (rope.attention_factor * waves for waves in (np.cos(angles), np.sin(angles)))
    return cosines.astype(np.float32), sines.astype(np.float32)


def compute_yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor of cosines and sines in YaRN, for a config without attention_factor.

    `factor` is the scaling factor of the context. `mscale` and `mscale_all_dim` count only if neither is None or 0.
    """
    if mscale and mscale_all_dim:
        return _compute_yarn_magnitude(factor, mscale) / _compute_yarn_magnitude(factor, mscale_all_dim)
    return _compute_yarn_magnitude(factor, 1.0)


def compute_yarn_score_factor(factor: float, mscale_all_dim: float) -> float:
    """Return the factor of scores in YaRN for latent attention: the square of YaRN's magnitude for `mscale_all_dim`."""
    return _compute_yarn_magnitude(factor, mscale_all_dim) ** 2


def _compute_yarn_magnitude(factor: float, weight: float) -> float:
    """Return YaRN's magnitude of rotated elements, 0.1 * weight * ln(factor) + 1; 1 for a factor of at most 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def compute_longrope_attention_factor(factor: float, original_positions: int) -> float:
    """Return the factor of cosines and sines in longrope, for a config without attention_factor; at least 1."""
    return math.sqrt(1 + math.log(factor) / math.log(original_positions)) if factor > 1 else 1.0


def _scale_llama3(rope: RopeParameters, inverse: np.ndarray) -> np.ndarray:
    """Return Llama 3's frequencies [pairs]: `inverse` / factor for long wavelengths, `inverse` for short ones.

    In between they are blended, by the number of turns of a pair within the original context.
    """
    turns = rope.original_positions * inverse / (2 * math.pi)
    share = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return (1 - share) * inverse / rope.factor + share * inverse


def _scale_yarn(rope: RopeParameters, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    """Return YaRN's frequencies [pairs]: `inverse` for pairs that turn often, `inverse` / factor for those that do not.

    In between they are blended. What counts is how often a pair turns within the original context.
    """

    def find_pair(turns: float) -> float:
        """Return the index, not rounded, of the pair that turns `turns` times within the original context."""
        return (
            head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = find_pair(rope.beta_fast), find_pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001  # transformers' guard against a division by zero
    divided = np.clip((np.arange(head_dim // 2) - first) / span, 0.0, 1.0)
    return inverse / rope.factor * divided + inverse * (1 - divided)
