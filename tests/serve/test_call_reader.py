"""Calls are read alike however the text is cut into pieces, and what is no call stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.serve.openai.calls import TOOL_CALL_PARSERS, CallReader
from model.serve.openai.messages import FunctionDefinition
from model.serve.openai.tools import ToolUse

NAMES = {"weather", "add-1"}
CALL = '{"name": "weather", "arguments": {"city": "a } \\" { </tool_call> b", "n": [1, {}]}}'
ARGUMENTS = '{"city": "a } \\" { </tool_call> b", "n": [1, {}]}'
OTHER = '{"arguments": {"a": 1}, "name": "add-1"}'
LATE = '{"name": "add-1", "parameters": {"a": 1}}'
UNKNOWN = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
Found = tuple[str, list[tuple[str, str]]]


def read(parser: str, text: str, size: int, several: bool = True) -> Found:
    """Return the text and the calls (name, arguments) of an answer in pieces of `size` characters."""
    reader = CallReader(TOOL_CALL_PARSERS[parser], NAMES, several)
    plain_text, calls = "", list[list[str]]()
    pieces = [
        piece for start in range(0, len(text), size) for piece in reader.push(text[start : start + size])
    ]
    for piece in [*pieces, *reader.push("", is_last=True)]:
        if isinstance(piece, str):
            plain_text += piece
        elif piece.id is not None:
            assert piece.index == len(calls) and piece.name is not None
            calls.append([piece.name, piece.arguments])
        else:
            assert piece.index == len(calls) - 1 and piece.arguments
            calls[-1][1] += piece.arguments
    assert reader.num_calls == len(calls)
    return plain_text, [(name, arguments) for name, arguments in calls]


HERMES: list[tuple[str, Found]] = [
    ("just text\n", ("just text\n", [])),
    (f"<tool_call>\n{CALL}\n</tool_call>", ("", [("weather", ARGUMENTS)])),
    (f"I look.\n\n<tool_call>{CALL}</tool_call>", ("I look.", [("weather", ARGUMENTS)])),
    (
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n",
        ("", [("weather", ARGUMENTS), ("add-1", '{"a": 1}')]),
    ),
    (f"<tool_call>{LATE}</tool_call>\nDone.", ("Done.", [("add-1", '{"a": 1}')])),
    (f"<tool_call>{CALL}", ("", [("weather", ARGUMENTS)])),
    (f"<tool_call>{CALL[:-9]}", ("", [("weather", ARGUMENTS[:-8])])),
    ("a <tool_call> b <tool_cal", ("a <tool_call> b <tool_cal", [])),
    (UNKNOWN, (UNKNOWN, [])),
    ('<tool_call>{"name": 1}}</tool_call>', ('<tool_call>{"name": 1}}</tool_call>', [])),
    ('<tool_call>{"name": "weather", "argu', ('<tool_call>{"name": "weather", "argu', [])),
    ('<tool_call>{"name": "weather"}</tool_call>', ("", [("weather", "{}")])),
]  # fmt: skip
LLAMA: list[tuple[str, Found]] = [
    ("just { text", ("just { text", [])),
    (LATE, ("", [("add-1", '{"a": 1}')])),
    (f"{LATE}; {CALL}", ("", [("add-1", '{"a": 1}'), ("weather", ARGUMENTS)])),
    (f"\n[{LATE}, {CALL}]\n", ("", [("add-1", '{"a": 1}'), ("weather", ARGUMENTS)])),
    (f"Look: {LATE}", (f"Look: {LATE}", [])),
    ('{"a": {"b": 1}} is it', ('{"a": {"b": 1}} is it', [])),
    ("[1, 2]", ("[1, 2]", [])),
    ('{"name": "add-1", "parameters": "x"}', ('{"name": "add-1", "parameters": "x"}', [])),
    ("", ("", [])),
]
CASES = [("hermes", *case) for case in HERMES] + [("llama3_json", *case) for case in LLAMA]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_calls_are_read_alike_in_pieces_of_any_size(parser: str, text: str, expected: Found) -> None:
    for size in range(1, len(text) + 1):
        assert read(parser, text, size) == expected, size


def test_arguments_go_on_before_the_call_has_ended() -> None:
    reader = CallReader(TOOL_CALL_PARSERS["hermes"], NAMES)
    assert reader.push('<tool_call>{"name": "weather", "arguments": ') == []
    (begin,) = reader.push('{"city"')
    (more,) = reader.push(': "P')
    assert [delta.arguments for delta in (begin, more) if not isinstance(delta, str)] == ['{"city"', ': "P']


def test_only_the_first_call_counts_where_they_are_not_parallel() -> None:
    text = f"<tool_call>{LATE}</tool_call><tool_call>{CALL}</tool_call> and more"
    for size in (1, 7, len(text)):
        assert read("hermes", text, size, several=False) == ("", [("add-1", '{"a": 1}')])
        assert len(read("hermes", text, size)[1]) == 2


def test_required_calls_have_a_grammar_in_which_each_schema_has_its_own_definitions() -> None:
    llguidance = pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")
    schemas: list[dict[str, Any] | None] = [
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": json_type}}}
        | {"required": ["x"], "additionalProperties": False}
        for json_type in ("integer", "boolean")
    ]
    functions = [
        FunctionDefinition(name=name, parameters=schema) for name, schema in zip("abc", [*schemas, None])
    ]
    tokenizer = llguidance.LLTokenizer("byte")

    def accepts(text: str, several: bool) -> bool:
        form = ToolUse(functions, is_required=True, is_parallel=several).build_structured_outputs(None, None)
        assert form is not None
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(form.grammar))
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.tokenize_str(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    def call(name: str, **arguments: Any) -> str:
        return json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))

    for several in (False, True):
        assert accepts(f"[{call('a', x=1)}]", several)
        assert accepts(f"[{call('b', x=True)}]", several)
        assert accepts(f"[{call('c')}]", several)
        assert not accepts(f"[{call('a', x=True)}]", several)
        assert not accepts(f"[{call('c', x=1)}]", several)
        assert not accepts(f"[{call('d')}]", several)
        assert not accepts("[]", several)
        assert accepts(f"[{call('c')},{call('a', x=2)}]", several) == several
    assert (
        ToolUse(functions, is_required=False, is_parallel=True).build_structured_outputs(None, None) is None
    )
