"""Inputs of a request other than tokens, and rules for the tokens of its text.

Transcription uses both; structured outputs are rules too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from model.errors import ModelError

MaskedLogits = Callable[[np.ndarray], None]
"""A function that sets the logits of forbidden tokens to -inf in place, where logits decide what is forbidden."""


class TokenRule(Protocol):
    """Rule that decides which tokens may follow, in structured outputs or a transcription."""

    @property
    def complete(self) -> bool:
        """Whether the text is complete, so that no token may follow."""

    @property
    def by_logits(self) -> MaskedLogits | None:
        """Function that forbids further tokens depending on the logits, on the host; None if none is needed."""

    def allowed(self) -> np.ndarray:
        """Return the mask of tokens that may come next, [vocabulary] bool; may wait for it.

        Raises:
            ModelError: The mask cannot be computed.
        """

    def accept(self, token: int) -> bool:
        """Advance the rule by a sampled token, and return whether the token was allowed."""

    def is_ready(self, now: float) -> bool:
        """Return whether `allowed` returns without waiting.

        Args:
            now: Time of the engine's clock in seconds.
        """

    def for_drafts(self) -> TokenRule:
        """Return a copy of the rule at the same token, for checking draft tokens that may be rejected."""


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Inputs that come with a prompt: an array for the encoder, and a function that returns a new rule for a text."""

    features: np.ndarray
    rule: Callable[[], TokenRule] | None = None


InputCheck = Callable[[ModelInputs | None], None]
"""A check that raises ModelError if a model does not take a prompt with these inputs, or without inputs."""


def refuse_inputs(inputs: ModelInputs | None) -> None:
    """Check that a prompt has no inputs besides tokens.

    Raises:
        ModelError: It has, and the model takes only tokens.
    """
    if inputs is not None:
        raise ModelError("this model takes the tokens of a prompt alone; leave its other inputs out")
