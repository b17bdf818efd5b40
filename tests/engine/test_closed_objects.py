"""Objects of a JSON schema have no properties beyond those that it lists, unless it says so, as in vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")

import llguidance

from model.workers.grammar import close_objects, convert_form

BOOLEAN = {"type": "boolean"}
LISTED = {"type": "object", "properties": {"a": BOOLEAN}}
PAIR = {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
PARTS = {"A": {"properties": {"a": BOOLEAN}}, "B": {"properties": {"b": BOOLEAN}}}


def allows(schema: Any, text: str) -> bool:
    """Return whether a text has the form of a schema, byte by byte."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, convert_form({"json": schema}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tokenizer.tokenize_bytes(text.encode()))) and bool(
        matcher.is_accepting()
    )


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        (LISTED, False),
        (LISTED | {"additionalProperties": True}, True),
        (LISTED | {"additionalProperties": BOOLEAN}, True),
        (LISTED | {"additionalProperties": False}, False),
        ({"type": "object"}, True),
        ({"anyOf": [LISTED]}, False),
        ({"allOf": [LISTED]}, False),
        ({"$ref": "#/$defs/L", "$defs": {"L": LISTED}}, False),
        ({"allOf": [{"$ref": "#/$defs/L"}], "$defs": {"L": LISTED}}, False),
    ],
)
def test_object_is_closed_unless_it_says_otherwise(
    schema: dict[str, Any], is_open: bool, as_text: bool
) -> None:
    document = json.dumps(schema) if as_text else schema
    assert allows(document, '{"a":true}')
    assert allows(document, '{"a":true,"b":true}') == is_open


def test_objects_within_objects_are_closed() -> None:
    schema = {"properties": {"list": {"type": "array", "items": LISTED}}, "required": ["list"]}
    assert allows(schema, '{"list":[{"a":true}]}')
    assert not allows(schema, '{"list":[{"b":true}]}')


def test_schemas_that_describe_one_object_together_do_not_exclude_each_other() -> None:
    for schema in (
        PAIR | {"$defs": PARTS},
        {"allOf": list(PARTS.values())},
        {"properties": {"a": BOOLEAN}, "anyOf": [{"properties": {"b": BOOLEAN}}]},
        {"properties": {"x": PAIR}, "$defs": PARTS},
    ):
        text = '{"a":true,"b":true}'
        assert allows(schema, f'{{"x":{text}}}' if "x" in schema.get("properties", {}) else text)


def test_schema_of_the_caller_is_not_changed() -> None:
    schema = {"properties": {"a": LISTED}}
    before = json.dumps(schema)
    convert_form({"json": schema})
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema", [True, [], None, {"properties": 1}, {"$ref": 3}, {"$ref": "#/x"}, {"allOf": 1}]
)
def test_other_values_are_left_to_the_compiler(schema: Any) -> None:
    assert close_objects(json.loads(json.dumps(schema))) == schema


def test_recursive_and_deep_schemas_end() -> None:
    tree = {"$ref": "#/$defs/T", "$defs": {"T": {"properties": {"left": {"$ref": "#/$defs/T"}}}}}
    assert close_objects(tree)["$defs"]["T"]["additionalProperties"] is False
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"properties": {"a": deep}}
    assert close_objects(deep)["additionalProperties"] is False
