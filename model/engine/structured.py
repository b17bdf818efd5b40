"""Structured outputs: the form that a request's text must have, and the tokens that the form allows next.

The form is compiled to a grammar by llguidance (extra `serve`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from model.engine.helpers import HelperCall, HelperThreads
from model.errors import ModelError
from model.workers.grammar import GrammarCompiler

_DRAFT_SECONDS = 0.02
"""The longest wait of a step for the mask after a draft token; without the mask the draft token is not verified."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Form that a text must have; exactly one field is set.

    | field | meaning |
    |---|---|
    | `json` | a JSON schema, as a mapping or a text |
    | `regex` | a regular expression |
    | `choice` | texts, of which one is written |
    | `grammar` | a grammar in the notation of Lark or of llama.cpp (GBNF) |
    | `json_object` | True for any JSON object |

    Raises:
        ModelError: Not exactly one form is given, or `choice` is empty or has an empty text.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        forms = [name for name in names if getattr(self, name) not in (None, False)]
        if len(forms) != 1:
            raise ModelError(
                f"structured outputs take one of {', '.join(names)}; given are {forms or 'none'}"
            )
        if self.choice is not None and not all(isinstance(text, str) and text for text in self.choice):
            raise ModelError("choice is a list of texts that are not empty")
        if self.choice is not None and not self.choice:
            raise ModelError("choice is empty; no text could be written: give at least one text")

    @property
    def form(self) -> dict[str, Any]:
        """Form as JSON data: an object with the name of the field that is set."""
        name = next(field.name for field in fields(self) if getattr(self, field.name) not in (None, False))
        form = getattr(self, name)
        if isinstance(form, Mapping):
            form = dict(form)
        elif not isinstance(form, str | bool):
            form = list(form)
        return {name: form}


class Constraint:
    """Rule for the tokens that a grammar allows next, for one text; implements `TokenRule`.

    A helper thread computes the mask of the next token while other requests continue. Until the mask `is_ready`, no
    other thread uses the matcher. `complete` tells whether the text has its form and no token may follow.
    """

    by_logits = None

    def __init__(
        self,
        compiler: GrammarCompiler,
        matcher: Any,
        first_mask: np.ndarray,
        threads: HelperThreads,
        mask_seconds: float,
    ) -> None:
        """Create the constraint at the beginning of a text.

        Args:
            compiler: Computes masks.
            matcher: The state of the grammar, which the constraint changes.
            first_mask: The mask of the first token, [vocabulary] bool.
            threads: Compute the masks of later tokens.
            mask_seconds: The longest time of one mask before its request fails.
        """
        self._compiler = compiler
        self._matcher = matcher
        self._threads = threads
        self._mask_seconds = mask_seconds
        self._mask: np.ndarray | None = first_mask
        self._call: HelperCall | None = None
        self._is_draft = False
        self.complete = False
        """Whether the text has its form and no token may follow."""

    def is_ready(self, now: float) -> bool:
        """Return whether `allowed` returns or raises without waiting.

        Abandons a mask that has taken longer than its limit; then `allowed` raises.

        Args:
            now: Time of the helper threads' clock in seconds.
        """
        call = self._call
        if call is None or call.done() or call.is_abandoned:
            return True
        if call.started is None or now - call.started <= self._mask_seconds:
            return False
        self._threads.abandon(call)
        return True

    def allowed(self) -> np.ndarray:
        """Return the mask of the next token, [vocabulary] bool; waits until it is computed.

        Raises:
            ModelError: llguidance gives up, as it does for large forms, or the mask takes longer than its limit, which
                is short after a draft token.
        """
        if self._mask is None:
            assert self._call is not None, "a complete text has no next token"
            call = self._call
            seconds = _DRAFT_SECONDS if self._is_draft else self._mask_seconds
            if call.is_abandoned or not wait([call], seconds).done:
                self._threads.abandon(call)
                raise ModelError(
                    f"structured outputs: a mask takes more than {self._mask_seconds:g} seconds, the limit of "
                    "mask_seconds (--mask-timeout): simplify the form"
                )
            self._mask = call.result()
            self._call = None
        return self._mask

    def accept(self, token: int) -> bool:
        """Append a token, start to compute the mask of the next one, and return whether the token was allowed.

        Raises:
            ModelError: The mask of this token is still being computed, and fails or takes too long.
        """
        if self._call is not None:
            self.allowed()
        matcher, compiler = self._matcher, self._compiler
        allowed = bool(matcher.consume_token(token))
        self.complete = bool(matcher.is_stopped() and not matcher.is_error())
        self._mask = None
        self._call = None
        if not self.complete:
            self._call = self._threads.submit(lambda: compiler.mask(matcher))
        return allowed

    def for_drafts(self) -> Constraint:
        """Return a copy at the same token, for checking draft tokens that may be rejected; waits for the mask.

        Raises:
            ModelError: The mask fails or takes too long.
        """
        mask = self.allowed()  # before the copy: a thread that computes it has borrowed the matcher
        copy = Constraint(self._compiler, self._matcher.deep_copy(), mask, self._threads, self._mask_seconds)
        copy._is_draft = True
        return copy
