"""What a request brings to the model beside its tokens, and the rules that its text keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from model.errors import ModelError

MaskedLogits = Callable[[np.ndarray], None]
"""Takes logits of tokens that must not follow, which the logits themselves decide, to -inf, in place."""


class TokenRule(Protocol):
    """Which tokens may follow those chosen so far: of a form that a text has to keep, or of a transcription."""

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""

    @property
    def by_logits(self) -> MaskedLogits | None:
        """What decides further by the logits of the next token, which only the host can; None for nothing."""

    def allowed(self) -> np.ndarray:
        """[vocabulary] bool; ModelError where it cannot be said."""

    def accept(self, token: int) -> bool:
        """A token was chosen; says whether it may follow."""

    def is_ready(self, now: float) -> bool:
        """Return whether `allowed` answers at once; `now` is the engine's time in seconds."""

    def for_drafts(self) -> TokenRule:
        """Return a copy that follows drafts, which may turn out wrong, from the same token on."""


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """An array that the model encodes with a prompt, as its runner takes it, and what makes the rule of the text."""

    features: np.ndarray
    rule: Callable[[], TokenRule] | None = None


InputCheck = Callable[[ModelInputs | None], None]
"""Raises ModelError where a model takes no prompt with such inputs, or none without inputs."""


def refuse_inputs(inputs: ModelInputs | None) -> None:
    """Raise ModelError for inputs: the model takes tokens alone."""
    if inputs is not None:
        raise ModelError("this model takes the tokens of a prompt alone; leave its other inputs out")
