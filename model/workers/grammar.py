"""Compilation of grammars by llguidance (extra `serve`), as a trial in a job process and again in the engine.

A form is what structured outputs require of a text, such as a JSON schema. A matcher follows a text token by token and
knows which tokens may come next.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from model.errors import ModelError
from model.workers.gbnf import convert_gbnf_to_lark
from nkw.process import measure_resident_bytes

_TRIED_MASKS = 4
"""Masks that a trial computes, along a few allowed tokens."""
_TRIAL_STACK_BYTES, STACK_BYTES = 2**22, 2**24
"""Stack sizes of a trial, and of the engine's threads, where a compilation that passed its trial cannot overflow."""

_SCHEMA_MAPS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords of JSON schemas whose objects have schemas by name."""
_SUBSCHEMAS = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "propertyNames"),
        *(
            "additionalProperties",
            "unevaluatedProperties",
            "allOf",
            "anyOf",
            "oneOf",
            "not",
            "if",
            "then",
            "else",
        ),
    )
)
"""Keywords whose values are a schema or a list of schemas."""
_DESCRIBING = (
    *("properties", "patternProperties", "$ref", "anyOf", "oneOf", "not", "if", "then", "else"),
    "dependentSchemas",
)
"""Keywords beside `allOf`, each of which describes the properties of an object."""


class GrammarCompiler:
    """Compiler of matchers for one tokenizer.

    Args:
        tokenizer_json: Returns the JSON of the tokenizer.
        size: Size of the model's vocabulary.
        end_tokens: Tokens that end a text.
    """

    def __init__(self, tokenizer_json: Callable[[], str], size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._size = size
        self._end_tokens = list(end_tokens)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer as an object of llguidance.

        Raises:
            ModelError: llguidance does not take the tokenizer, or is not installed.
        """
        module = load_llguidance()
        try:
            return module.LLTokenizer(self._tokenizer_json(), n_vocab=self._size, eos_token=self._end_tokens)
        except ValueError as error:
            raise ModelError(f"structured outputs: this tokenizer cannot be constrained: {error}") from None

    def try_out(self, form: Mapping[str, Any]) -> tuple[str, int]:
        """Compile a form and compute its first masks, in a thread with a small stack.

        The stack is smaller than those of the engine's threads, so a grammar that passes cannot overflow theirs.

        Args:
            form: As for `convert_form`.

        Returns:
            The grammar in llguidance's notation, and the growth of this process's resident memory in bytes.

        Raises:
            ModelError: The form cannot be compiled, or its masks cannot be computed.
            MemoryError: The job's memory does not suffice.
        """
        before = threading.stack_size(_TRIAL_STACK_BYTES)
        results: list[str | BaseException] = []
        resident = measure_resident_bytes()

        def attempt() -> None:
            try:
                grammar = convert_form(form)
                matcher = self.compile(grammar)
                self._follow(matcher)
                results.append(grammar)
            except BaseException as error:  # a panic of llguidance is no Exception
                results.append(error)

        try:
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()
        finally:
            threading.stack_size(before)
        (result,) = results
        if isinstance(result, str):
            return result, max(0, measure_resident_bytes() - resident)
        if isinstance(result, ModelError | MemoryError):
            raise result
        raise ModelError(f"structured outputs: the grammar compiler fails: {result}") from None

    def compile(self, grammar: str) -> Any:
        """Return a new matcher, at the start of a text.

        Args:
            grammar: The grammar in llguidance's notation.

        Raises:
            ModelError: The grammar cannot be compiled.
        """
        matcher = load_llguidance().LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ModelError(f"structured outputs: {take_first_line(matcher.get_error())}")
        return matcher

    def mask(self, matcher: Any) -> np.ndarray:
        """Return the mask of the tokens that a matcher allows next, [vocabulary] bool.

        Raises:
            ModelError: llguidance fails to compute the mask.
        """
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ModelError(
                f"structured outputs: the form cannot be kept: {take_first_line(matcher.get_error())}"
            )
        mask = np.zeros(self._size, bool)
        known = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        mask[: len(known)] = known
        return mask

    def _follow(self, matcher: Any) -> None:
        """Compute up to `_TRIED_MASKS` masks along a text, and raise what computing a mask raises.

        After each mask, appends the allowed token with the highest id, because such tokens are long texts in most
        vocabularies.
        """
        for _ in range(_TRIED_MASKS):
            allowed = np.flatnonzero(self.mask(matcher))
            allowed = allowed[~np.isin(allowed, self._end_tokens)]
            if not len(allowed) or not matcher.consume_token(int(allowed[-1])) or matcher.is_stopped():
                return


def convert_form(form: Mapping[str, Any]) -> str:
    """Return a form such as {"regex": "a+"} as a grammar in llguidance's notation.

    Args:
        form: One key with its value: json, regex, choice, grammar (Lark's notation, or llama.cpp's), or json_object.

    Raises:
        ModelError: The schema or the grammar cannot be parsed.
    """
    matchers = load_llguidance().LLMatcher
    ((name, value),) = form.items()
    try:
        if name == "regex":
            text = matchers.grammar_from_regex(value)
        elif name == "grammar":
            text = matchers.grammar_from_lark(convert_gbnf_to_lark(value) if "::=" in value else value)
        elif name == "choice":
            text = matchers.grammar_from_lark(f"start: {' | '.join(json.dumps(choice) for choice in value)}")
        else:
            schema = {"type": "object"} if name == "json_object" else value
            text = schema if isinstance(schema, str) else json.dumps(schema)
            text = json.dumps(close_objects(json.loads(text)))
            text = matchers.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
    except (ValueError, RecursionError) as error:
        raise ModelError(f"structured outputs: {error}") from None
    return str(text)


def close_objects(schema: Any) -> Any:
    """Exclude further properties from the objects of a JSON schema that list properties; return the changed schema.

    vLLM 0.32.0 closes such objects too: its backend xgrammar always, its backend guidance with
    `disable_additional_properties`. An object stays open if it says so with `additionalProperties` or
    `unevaluatedProperties`, if it lists no properties, or if several schemas describe it together, as the members of
    `allOf` do, because each of them would exclude the properties of the others.
    """
    open_schemas, listing = set[int](), dict[int, dict[str, Any]]()
    visited = set[tuple[int, bool]]()
    unvisited: list[tuple[Any, bool]] = [(schema, False)]
    while unvisited:
        subschema, is_joined = unvisited.pop()
        if not isinstance(subschema, dict) or (id(subschema), is_joined) in visited:
            continue
        visited.add((id(subschema), is_joined))
        all_of = subschema.get("allOf")
        describing = sum(name in subschema for name in _DESCRIBING) + (
            len(all_of) if isinstance(all_of, list) else 0
        )
        is_joined = is_joined or describing > 1
        if is_joined or "additionalProperties" in subschema or "unevaluatedProperties" in subschema:
            open_schemas.add(id(subschema))
        if any(isinstance(subschema.get(name), dict) for name in ("properties", "patternProperties")):
            listing[id(subschema)] = subschema
        for name, argument in subschema.items():
            if name in _SCHEMA_MAPS and isinstance(argument, dict):
                is_definition = name in ("$defs", "definitions")
                unvisited += [(child, is_joined and not is_definition) for child in argument.values()]
            elif name in _SUBSCHEMAS:
                unvisited += [
                    (child, is_joined) for child in (argument if isinstance(argument, list) else [argument])
                ]
            elif name == "$ref":
                unvisited.append((_find_definition(schema, argument), is_joined))
    for number, subschema in listing.items():
        if number not in open_schemas:
            subschema["additionalProperties"] = False
    return schema


def _find_definition(schema: Any, pointer: Any) -> Any:
    """Return the part of a schema that a JSON pointer such as "#/$defs/City" names; None if there is none."""
    for name in pointer.split("/")[1:] if isinstance(pointer, str) and pointer.startswith("#") else ():
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema if isinstance(pointer, str) and pointer.startswith("#") else None


def take_first_line(text: str) -> str:
    """Return the first line of a message of llguidance; later lines show the parser's state."""
    return (text.splitlines() or [""])[0]


def load_llguidance() -> Any:
    """Import llguidance and return the module.

    Raises:
        ModelError: The extra `serve` is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise ModelError(
            "structured outputs need the extra serve: pip install 'nki-workbench[serve]'"
        ) from None
    return llguidance
