"""Sampling parameters of a row, and the output of a step for a row.

A row is one position of one sequence whose next token is sampled. The engine makes a `RowSampling` for each row, and
model runners return a `StepOutput` for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.errors import ModelError


@dataclass(frozen=True, eq=False)
class RowSampling:
    """Sampling parameters of a row, with the names of the kernel `sample`.

    top_k          candidates; 0 for the whole vocabulary
    bias           [vocabulary] float32, added to the logits; NaN excludes a token, which ranks below all others
    prompt_counts  [vocabulary] float32, occurrences in the prompt; penalties need both counts
    output_counts  [vocabulary] float32, occurrences in the output
    logprobs       number of likeliest tokens whose log-probabilities are returned, from the unchanged logits
    by_logits      sets more logits to -inf in place, depending on the logits; on the host only
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
        """Whether a bias or penalties change the logits."""
        return self.bias is not None or self.output_counts is not None


@dataclass(frozen=True)
class Drawn:
    """Token that the device drew, its log-probability, and the likeliest `ids` with theirs, best first.

    Log-probabilities are normalised over all tokens if the row has `logprobs`.
    """

    token: int
    logprob: float
    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class StepOutput:
    """Output of a step for a row. `logits` or the candidates may be absent, but not both.

    logits  [vocabulary] float32
    values  logits of the best candidates, best first
    ids     token ids of the best candidates
    drawn   the token that the device drew, or None
    """

    logits: np.ndarray | None = None
    values: np.ndarray | None = None
    ids: np.ndarray | None = None
    drawn: Drawn | None = None

    @property
    def largest(self) -> float:
        """Largest of `logits`, or without them of the candidates' `values`; NaN if one of them is NaN."""
        known = self.values if self.logits is None else self.logits
        assert known is not None, "neither logits nor candidates"
        return float(known.max())

    @property
    def likeliest(self) -> int:
        """Id of the token with the largest known logit; ties take the lowest id.

        Raises:
            ModelError: The largest logit is not finite.
        """
        if not np.isfinite(self.largest):
            raise ModelError(
                f"the model's largest logit is {self.largest}, not a finite number; check the weights of the "
                "checkpoint, which are too large or not finite"
            )
        if self.logits is not None:
            return int(self.logits.argmax())
        assert self.values is not None and self.ids is not None
        return int(self.ids[self.values == self.values.max()].min())

    def find_logit(self, token: int) -> float | None:
        """Return the logit of a token; None if the logits are absent and the token is no candidate."""
        if self.logits is not None:
            return float(self.logits[token])
        assert self.values is not None and self.ids is not None
        indices = np.flatnonzero(self.ids == token)
        return float(self.values[indices[0]]) if len(indices) else None

    def compute_logit_gap(self, first: int, second: int) -> float | None:
        """Return the absolute difference of two tokens' logits; None if a logit is unknown or not finite."""
        logit, second_logit = self.find_logit(first), self.find_logit(second)
        if logit is None or second_logit is None or not np.isfinite([logit, second_logit]).all():
            return None
        return abs(logit - second_logit)
