"""How the next token is drawn, row by row, and the output of a step for each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.errors import ModelError


@dataclass(frozen=True, eq=False)
class RowSampling:
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
        """The token with the largest score; of equal ones the lowest. Raises ModelError for one that is not finite."""
        if not np.isfinite(self.largest):
            raise ModelError(
                f"the model's largest logit is {self.largest}; its weights are too large or not finite"
            )
        if self.logits is not None:
            return int(self.logits.argmax())
        assert self.values is not None and self.ids is not None
        return int(self.ids[self.values == self.values.max()].min())

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
