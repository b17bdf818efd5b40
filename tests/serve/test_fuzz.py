"""Requests made up from the schema that is served: every answer is one that the schema describes, and none is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.serve.conftest import MODEL, Served

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is an extra of development (dev)")


def checks() -> list[Any]:
    """What every answer is held against."""
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
        operations = [each for each in operations if each.method == "post"]
    assert len(operations) == (4 if mode == "negative" else 10)
    for operation in operations:
        _fuzz(operation, mode, examples)


def _fuzz(operation: Any, mode: str, examples: int) -> None:
    """Requests of one route, which name the model that is there and ask for few tokens."""

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
            case.body["model"] = MODEL
            if mode == "positive" and operation.path.startswith("/v1/"):
                case.body |= {"n": 2, "max_tokens": 2, "min_tokens": 0}
                case.body.pop("max_completion_tokens", None)
        case.call_and_validate(checks=checks())

    send()
