"""The form of a text: what a request asks for, and which tokens may come next (extra `serve`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from model.engine.helpers import HelperCall, HelperThreads
from model.errors import ModelError
from model.workers.grammar import GrammarCompiler

_DRAFT_SECONDS = 0.02
"""How long a step waits for the mask behind a draft; without it the draft is not verified."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of a text, one of: a JSON schema (as a mapping or text), a regular expression, choices, a grammar.

    A `grammar` is in Lark's notation or in llama.cpp's (GBNF). `json_object` is any JSON object. Raises ModelError
    unless exactly one is given.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ModelError(
                f"structured outputs take one of {', '.join(names)}; given are {given or 'none'}"
            )
        if self.choice is not None and not all(isinstance(each, str) and each for each in self.choice):
            raise ModelError("choice is a list of texts that are not empty")
        if self.choice is not None and not self.choice:
            raise ModelError("choice is empty; no text could be written")

    @property
    def form(self) -> dict[str, Any]:
        """The one argument that is given, by its name, as JSON data."""
        ((name, value),) = (
            (each.name, value)
            for each in fields(self)
            if (value := getattr(self, each.name)) not in (None, False)
        )
        if isinstance(value, Mapping):
            value = dict(value)
        elif not isinstance(value, str | bool):
            value = list(value)
        return {name: value}


@dataclass(frozen=True)
class MaskLimits:
    """Seconds that one mask may take, from the start of its computation, before its request fails."""

    seconds: float = 1.0


class Constraint:
    """Which tokens may follow those chosen so far (a `TokenRule`).

    The mask of the next token is computed by a helper thread while other requests go on; until it `is_ready`, nothing
    else touches the matcher.
    """

    by_logits = None

    def __init__(
        self,
        compiler: GrammarCompiler,
        matcher: Any,
        first_mask: np.ndarray,
        threads: HelperThreads,
        limits: MaskLimits,
    ) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._threads = threads
        self._limits = limits
        self._mask: np.ndarray | None = first_mask
        self._call: HelperCall | None = None
        self._is_draft = False
        self.complete = False
        """Whether the text has its form and nothing may follow."""

    def is_ready(self, now: float) -> bool:
        """Return whether `allowed` returns or raises at once, by the clock of the helper threads.

        A mask that has taken too long is abandoned, and `allowed` raises.
        """
        call = self._call
        if call is None or call.is_done or call.is_abandoned:
            return True
        if call.started is None or now - call.started <= self._limits.seconds:
            return False
        self._threads.abandon(call)
        return True

    def allowed(self) -> np.ndarray:
        """Return the mask, [vocabulary] bool.

        Raises ModelError where llguidance gives up, as it does for forms that are too large, and where the mask takes
        too long: the limit of a mask, or a moment for one behind a draft.
        """
        if self._mask is None:
            assert self._call is not None, "a mask is asked for behind a complete text"
            call = self._call
            seconds = _DRAFT_SECONDS if self._is_draft else self._limits.seconds
            if call.is_abandoned or not call.wait(seconds):
                self._threads.abandon(call)
                raise ModelError(
                    f"structured outputs: a mask takes more than {self._limits.seconds:g} seconds, the limit of "
                    "mask_seconds (--mask-timeout): simplify the form"
                )
            self._mask = call.result()
            self._call = None
        return self._mask

    def accept(self, token: int) -> bool:
        """Follow a chosen token, begin to compute the mask behind it, and return whether it may be chosen.

        Raises ModelError as `allowed`, where the mask behind the token before is still being computed.
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
        """Return a copy at the same token, which follows drafts that may turn out wrong."""
        mask = self.allowed()  # before the copy: a thread that computes it has borrowed the matcher
        copy = Constraint(self._compiler, self._matcher.deep_copy(), mask, self._threads, self._limits)
        copy._is_draft = True
        return copy
