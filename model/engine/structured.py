"""Texts of a given form: a mask of the tokens that may come next, made by llguidance (extra `serve`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from model.errors import ModelError


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


class Constraint:
    """Which tokens may follow those chosen so far (a `TokenRule`)."""

    by_logits = None

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size

    @property
    def complete(self) -> bool:
        """Whether the text has its form and nothing may follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def allowed(self) -> np.ndarray:
        """[vocabulary] bool; ModelError where llguidance gives up, as it does for forms that are too large."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            said = self._matcher.get_error().splitlines()[0]
            raise ModelError(f"structured outputs: the form cannot be kept: {said}")
        mask = np.zeros(self._size, bool)
        known = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        mask[: len(known)] = known
        return mask

    def accept(self, token: int) -> bool:
        """A token was chosen; says whether it may follow."""
        return bool(self._matcher.consume_token(token))

    def take_back(self, count: int) -> None:
        """The last tokens were not chosen."""
        self._matcher.rollback(count)


class Grammars:
    """Constraints for one tokenizer, whose texts end with one of `end_tokens`."""

    def __init__(self, tokenizer_json: Callable[[], str], size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._size = size
        self._end_tokens = list(end_tokens)

    def constraint(self, params: StructuredOutputsParams) -> Constraint:
        """A constraint at the start of a text; ModelError for a form that cannot be, or where llguidance is missing."""
        matchers = _llguidance().LLMatcher
        try:
            if params.regex is not None:
                grammar = matchers.grammar_from_regex(params.regex)
            elif params.grammar is not None:
                grammar = matchers.grammar_from_lark(_as_lark(params.grammar))
            elif params.choice is not None:
                choices = " | ".join(json.dumps(each) for each in params.choice)
                grammar = matchers.grammar_from_lark(f"start: {choices}")
            else:
                schema = {"type": "object"} if params.json is None else params.json
                text = schema if isinstance(schema, str) else json.dumps(schema)
                grammar = matchers.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        except ValueError as error:
            raise ModelError(f"structured outputs: {error}") from None
        matcher = matchers(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ModelError(f"structured outputs: {matcher.get_error()}")
        return Constraint(matcher, self._size)

    @cached_property
    def _tokenizer(self) -> Any:
        module = _llguidance()
        try:
            return module.LLTokenizer(self._tokenizer_json(), n_vocab=self._size, eos_token=self._end_tokens)
        except ValueError as error:
            raise ModelError(f"structured outputs: this tokenizer cannot be constrained: {error}") from None


def _as_lark(grammar: str) -> str:
    """A grammar in Lark's notation, or in that of llama.cpp (GBNF), in Lark's."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(grammar) if "::=" in grammar else grammar
    except GbnfToLarkError as error:
        raise ModelError(f"structured outputs: {error}") from None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ModelError(
            "structured outputs need the extra serve: pip install 'nki-workbench[serve]'"
        ) from None
    return llguidance
