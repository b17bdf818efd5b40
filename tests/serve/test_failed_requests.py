"""A request whose step raises gets an error of its own; an engine that fails is visible to clients and to probes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("openai", reason="openai is an extra of development (dev)")

import openai

from model.engine import Batch, Engine, Request
from model.engine.speculation import NO_ROWS, Rows
from model.sampling import StepOutput
from tests.serve.conftest import MODEL, Served

MARK = 77
"""The first token of a prompt whose steps raise."""


def break_steps(engine: Engine, fails: Callable[[Batch], bool]) -> None:
    """Let the model of an engine raise after it has computed a batch."""
    step = engine._model.step

    def broken(batch: Batch, rows: Rows = NO_ROWS) -> Mapping[Request, Any]:
        answers: Mapping[Request, list[StepOutput]] = step(batch, rows)  # type: ignore[assignment]
        if fails(batch):
            raise ZeroDivisionError("a secret of the server")
        return answers

    engine._model.step = broken  # type: ignore[method-assign]


def is_marked(batch: Batch) -> bool:
    return any(request.tokens[0] == MARK for request in batch.chunks)


def completion(server: Served, prompt: list[int], **more: Any) -> Any:
    arguments: dict[str, Any] = {"max_tokens": 6, "temperature": 0.8, "seed": 5} | more
    return server.client().completions.create(
        model=MODEL, prompt=prompt, extra_body={"ignore_eos": True}, **arguments
    )


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].text
    return text


@pytest.mark.slow
def test_faulty_requests_get_errors_and_the_other_streams_go_on(start: Callable[..., Any]) -> None:
    with start("--max-num-seqs", "8") as server:
        prompts = [[100 + number, 200, 300] for number in range(4)]
        wanted = [text_of(completion(server, prompt)) for prompt in prompts]
        break_steps(server.engine, is_marked)
        body = {"model": MODEL, "prompt": [MARK, 5], "max_tokens": 4}

        def fail_completion(_: int) -> openai.InternalServerError:
            with pytest.raises(openai.InternalServerError) as failed:
                completion(server, [MARK, 5, 6])
            return failed.value

        def streamed(_: int) -> list[str]:
            _, payload = server.send("POST", "/v1/completions", json.dumps(body | {"stream": True}).encode())
            return payload.decode().split("\n\n")

        def good(prompt: list[int]) -> str:
            return "".join(map(text_of, completion(server, prompt, stream=True)))

        with ThreadPoolExecutor(8) as threads:
            errors, events = threads.map(fail_completion, range(2)), threads.map(streamed, range(2))
            assert list(threads.map(good, prompts)) == wanted
            for error in errors:
                assert error.body == {
                    "message": "the model could not compute this request",
                    "type": "server_error",
                    "param": None,
                    "code": "request_failed",
                }
            for event in events:
                first, done, _ = event
                assert json.loads(first.removeprefix("data: "))["error"]["code"] == "request_failed"
                assert done == "data: [DONE]"
        assert server.send("GET", "/health")[0].status == 200
        assert text_of(completion(server, prompts[0])) == wanted[0]


@pytest.mark.slow
def test_failed_engine_is_reported_by_health_and_to_clients(start: Callable[..., Any]) -> None:
    with start() as server:
        assert server.send("GET", "/health")[0].status == 200
        break_steps(server.engine, lambda batch: True)
        with pytest.raises(openai.InternalServerError) as failed:
            completion(server, [5, 6])
        assert failed.value.code == "engine_failed"
        assert "secret" not in str(failed.value)
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/ready", None),
            ("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": "a"}).encode()),
        ):
            response, payload = server.send(method, path, body)
            assert (response.status, json.loads(payload)["error"]["code"]) == (503, "engine_stopped"), path
        assert server.engine.scheduler.cache.free == server.engine.scheduler.cache.count
