"""The window of speech that comes with a request, and the rules by which it is transcribed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

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
class Speech:
    """A window: its log-mel spectrum `features` [bands, columns], and what `rule` makes of the rules of its text."""

    features: np.ndarray
    rule: Callable[[], TokenRule] | None = None


WITHOUT_AUDIO = "this model continues texts: a prompt comes without audio"
WITH_AUDIO = "this model transcribes speech: a prompt comes with audio"


def spectrum_error(shape: Sequence[int] | None, speech: Speech | None) -> str | None:
    """Why a model with spectra of a shape, or without speech (None), takes no prompt with such speech, or without."""
    if (shape is None) == (speech is None):
        assert speech is None or list(speech.features.shape) == list(shape or ()), f"{speech.features.shape}"
        return None
    return WITH_AUDIO if speech is None else WITHOUT_AUDIO
