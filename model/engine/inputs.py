"""Inputs of a request other than tokens, and rules for the tokens of its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from model.errors import ModelError

MaskedLogits = Callable[[np.ndarray], None]
"""A function that sets the logits of forbidden tokens to -inf in place, where logits decide what is forbidden."""


class TokenRule(Protocol):
    """The tokens that structured outputs or a transcription allow next."""

    @property
    def complete(self) -> bool:
        """Whether no token may follow."""

    @property
    def by_logits(self) -> MaskedLogits | None:
        """The function that forbids further tokens by the logits of the next token, on the host; None without one."""

    def allowed(self) -> np.ndarray:
        """Return the mask of allowed tokens, [vocabulary] bool.

        Raises:
            ModelError: The mask cannot be computed.
        """

    def accept(self, token: int) -> bool:
        """Append a sampled token, and return whether it was allowed."""

    def is_ready(self, now: float) -> bool:
        """Return whether `allowed` returns without waiting; `now` is the engine's time in seconds."""

    def for_drafts(self) -> TokenRule:
        """Return a copy at the same token, which follows draft tokens that may be rejected."""


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """An array that the model encodes with a prompt, and a function that returns the rule of a text."""

    features: np.ndarray
    rule: Callable[[], TokenRule] | None = None


InputCheck = Callable[[ModelInputs | None], None]
"""A check that raises ModelError if a model does not take a prompt with these inputs, or without inputs."""


def refuse_inputs(inputs: ModelInputs | None) -> None:
    """Check that a prompt has no inputs.

    Raises:
        ModelError: There are inputs, and the model takes tokens only.
    """
    if inputs is not None:
        raise ModelError("this model takes the tokens of a prompt alone; leave its other inputs out")
