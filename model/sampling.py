"""Choosing the next token: greedy, or by temperature, top-k and top-p in Hugging Face's order.

Randomness is numpy's Philox, a counter-based generator whose numbers for a seed are the same on every machine. Each
token takes exactly one number, and the candidates are laid out by token id, not by probability: a rounding difference
between two backends then moves the boundaries a little instead of reordering them, so two samplers with one seed
nearly always choose alike and never fall out of step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.errors import ModelError


@dataclass(frozen=True, eq=False)
class SampleRow:
    """How one token is drawn: one row of the arguments of the kernel `sample`, by the same names, without the logits.

    A `top_k` of 0 is the whole vocabulary. `bias` [vocabulary] float32 is added to the logits; NaN excludes a token,
    which then ranks below every other one. Penalties need both `prompt_counts` and `output_counts` [vocabulary]
    float32. `logprobs` is the number of likeliest tokens whose log-probabilities are wanted beside the drawn token's,
    from the unchanged logits. `by_logits`, where there is one, takes more logits to -inf, in place, by what they are;
    only the host does that.
    """

    uniform: float
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: np.ndarray | None = None
    prompt_counts: np.ndarray | None = None
    output_counts: np.ndarray | None = None
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    logprobs: int | None = None
    by_logits: Callable[[np.ndarray], None] | None = None

    @property
    def adjusts(self) -> bool:
        """Whether logits change before the draw."""
        return self.bias is not None or self.output_counts is not None


@dataclass(frozen=True)
class Drawn:
    """What the device drew in a row: the token, its log-probability, and those of the likeliest `ids`, best first.

    Log-probabilities are those of all tokens where the row asked for them.
    """

    token: int
    logprob: float
    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class StepOutput:
    """The output of one step: scores of the next token, or the token that the device drew.

    `logits` [vocabulary] float32, and the best candidates as `values` and `ids`, best first, where the device picked
    them out; either may be absent, not both.
    """

    logits: np.ndarray | None = None
    values: np.ndarray | None = None
    ids: np.ndarray | None = None
    drawn: Drawn | None = None

    @property
    def largest(self) -> float:
        """The largest score; not finite where one of the scores that are known is no number."""
        known = self.values if self.logits is None else self.logits
        assert known is not None, "neither logits nor candidates"
        return float(known.max())

    @property
    def likeliest(self) -> int:
        """The token with the largest score; of equal ones the lowest."""
        return int(_candidates(self, 1)[1][0])

    def score(self, token: int) -> float | None:
        """The score of a token; None if it is none of the candidates and the logits are absent."""
        if self.logits is not None:
            return float(self.logits[token])
        assert self.values is not None and self.ids is not None
        found = np.flatnonzero(self.ids == token)
        return float(self.values[found[0]]) if len(found) else None

    def apart(self, token: int, other: int) -> float | None:
        """How far the scores of two tokens lie apart; None if one of them is not known, or not finite."""
        one, two = self.score(token), self.score(other)
        if one is None or two is None or not np.isfinite([one, two]).all():
            return None
        return abs(one - two)


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose; a temperature of 0 takes the most likely token whatever top_k and top_p say."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ModelError(f"temperature {self.temperature}; must be 0 or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ModelError(f"top-k {self.top_k}; must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ModelError(f"top-p {self.top_p}; must be above 0 and at most 1")
        if self.seed < 0:
            raise ModelError(f"seed {self.seed}; must not be negative")

    @property
    def candidates_needed(self) -> int | None:
        """How many of the best candidates suffice to choose; None if the whole vocabulary is needed."""
        return 1 if self.temperature == 0 else self.top_k


class Sampler:
    """Chooses one token after the other, reproducibly for a seed."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._generator = np.random.Generator(np.random.Philox(options.seed))

    def choose(self, step: StepOutput) -> int:
        """The next token's id."""
        options = self._options
        values, ids = _candidates(step, options.candidates_needed)
        if options.temperature == 0:
            return int(ids[0])
        if options.top_k is not None:
            values, ids = values[: options.top_k], ids[: options.top_k]
        with np.errstate(over="ignore"):  # a quotient of minus infinity is a weight of 0
            weights = np.exp((values - values[0]) / options.temperature)
        weights /= weights.sum()
        if options.top_p < 1:
            kept = (
                np.cumsum(weights) - weights < options.top_p
            )  # the mass ahead of a token; the first one's is 0
            values, ids, weights = values[kept], ids[kept], weights[kept]
        by_id = np.argsort(ids)
        bounds = np.cumsum(weights[by_id])
        drawn = self._generator.random() * bounds[-1]
        return int(ids[by_id[np.searchsorted(bounds, drawn, side="right").clip(max=len(ids) - 1)]])


def _candidates(step: StepOutput, needed: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Values in float64 and their ids, best first, equal ones in the order of their ids."""
    if needed is not None and step.values is not None and step.ids is not None and len(step.values) >= needed:
        values, ids = step.values, step.ids
    else:
        assert step.logits is not None, "neither logits nor enough candidates"
        values, ids = step.logits, np.arange(len(step.logits))
    wide = values.astype(np.float64)
    if not np.isfinite(wide.max()):
        raise ModelError(
            f"the model's largest logit is {wide.max()}; its weights are too large or not finite"
        )
    if needed == 1:
        best = np.flatnonzero(wide == wide.max())
        winner = best[np.argmin(ids[best])]
        return wide[winner : winner + 1], ids[winner : winner + 1]
    order = np.lexsort((ids, -wide))
    return wide[order], ids[order]
