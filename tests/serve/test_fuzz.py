"""Requests made up from the schema that is served: every answer is one that the schema describes, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.serve.conftest import MODEL, Served

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is an extra of development (dev)")


def checks() -> list[Any]:
    """Return the checks of every answer."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    return [
        not_a_server_error,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.status_code_conformance,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("examples", [3, pytest.param(1000, marks=pytest.mark.deep)])
def test_answers_are_those_of_the_schema(server: Served, mode: str, examples: int) -> None:
    api = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    operations = [result.ok() for result in api.get_all_operations()]
    if mode == "negative":  # nothing can be wrong with a request without arguments
        operations = [operation for operation in operations if operation.method == "post"]
    assert len(operations) == (7 if mode == "negative" else 14)
    for operation in operations:
        fuzz(operation, mode, examples, few_tokens)


def few_tokens(body: dict[str, Any]) -> None:
    """Ask for few tokens of texts."""
    if "prompt" in body or "messages" in body:
        body |= {"n": 2, "max_tokens": 2, "min_tokens": 0}
        body.pop("max_completion_tokens", None)


def fuzz(
    operation: Any, mode: str, examples: int, change: Callable[[dict[str, Any]], None], model: str = MODEL
) -> None:
    """Return requests of one route for the served model; in the mode positive their bodies are changed."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def send(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = model
            if mode == "positive" and operation.path.startswith("/v1/"):
                change(case.body)
        case.call_and_validate(checks=checks())

    send()
