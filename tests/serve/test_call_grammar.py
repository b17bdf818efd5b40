"""Grammars of answers with tools allow calls in the format that a parser reads, or the form of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")
pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")

import llguidance

from model.engine.structured import StructuredOutputsParams
from model.serve.openai.messages import FunctionDefinition
from model.serve.openai.tools import ToolUse
from model.workers.grammar import convert_form

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [FunctionDefinition(name="weather", parameters=CITY), FunctionDefinition(name="now")]
ANSWER = StructuredOutputsParams(json={"type": "object", "properties": {"n": {"type": "integer"}}})
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


def allows(params: StructuredOutputsParams | None, text: str) -> bool:
    assert params is not None
    tokenizer: Any = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, convert_form(params.form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tokenizer.tokenize_bytes(text.encode()))) and bool(
        matcher.is_accepting()
    )


HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize(
    ("parser", "text", "alone", "parallel"),
    [
        ("hermes", HERMES, True, True),
        ("hermes", f"{HERMES}\n<tool_call>{NOW}</tool_call>", False, True),
        ("hermes", CALL, False, False),
        ("hermes", f"Look: {HERMES}", False, False),
        ("hermes", HERMES.replace("weather", "other"), False, False),
        ("hermes", HERMES.replace('"Oslo"', '"Oslo", "x": 1'), False, False),
        ("llama3_json", CALL, True, True),
        ("llama3_json", NOW, True, True),
        ("llama3_json", f"{CALL}; {NOW}", False, True),
        ("llama3_json", HERMES, False, False),
        ("llama3_json", '{"n":1}', True, True),
        ("hermes", '{"n":1}', True, True),
        ("hermes", '{"n":1,"m":1}', False, False),
        ("hermes", "text", False, False),
    ],
)
def test_answer_is_calls_or_has_its_form(parser: str, text: str, alone: bool, parallel: bool) -> None:
    for is_parallel, allowed in ((False, alone), (True, parallel)):
        use = ToolUse(FUNCTIONS, is_required=False, is_parallel=is_parallel)
        assert allows(use.build_structured_outputs(ANSWER, parser), text) == allowed


@pytest.mark.parametrize(("parser", "text"), [("hermes", HERMES), ("llama3_json", f"{CALL}; {NOW}")])
def test_calls_that_the_grammar_allows_are_read(parser: str, text: str) -> None:
    use = ToolUse(FUNCTIONS, is_required=False, is_parallel=True)
    reader = use.make_reader(parser)
    reader.push(text, is_last=True)
    assert reader.num_calls == text.count('"name"')


def test_form_alone_holds_where_no_calls_are_read() -> None:
    use = ToolUse(FUNCTIONS, is_required=False, is_parallel=True)
    assert use.build_structured_outputs(ANSWER, None) is ANSWER
    assert use.build_structured_outputs(None, "hermes") is None


@pytest.mark.parametrize(
    ("parameters", "is_open"), [(CITY, False), (CITY | {"additionalProperties": True}, True), ({}, True)]
)
def test_arguments_of_required_calls_are_closed(parameters: dict[str, Any], is_open: bool) -> None:
    before = json.dumps(parameters)
    use = ToolUse([FunctionDefinition(name="f", parameters=parameters)], is_required=True, is_parallel=False)
    params = use.build_structured_outputs(ANSWER, "hermes")
    assert allows(params, '[{"name":"f","arguments":{"city":"Oslo"}}]')
    assert allows(params, '[{"name":"f","arguments":{"city":"Oslo","x":1}}]') == is_open
    assert json.dumps(parameters) == before
