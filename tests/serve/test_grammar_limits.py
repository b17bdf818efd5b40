"""Hostile clients beside others: grammars that explode, long texts, templates that loop, clients that leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="openai is an extra of development (dev)")
pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")

from tests.deep import deep_except
from tests.serve.conftest import MODEL, Served, serving
from tests.serve.scripted import write_scripted
from tests.serve.test_ends import LONG, long_stream, wait_until

TOKEN_BYTES, PROMPT_TOKENS = 14, 255
"""The longest token of the default model, and its longest prompt."""
LOOPS = (
    "{% if messages[0].content == 'loop' %}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    "{% endif %}once"
)


def exploding(entries: int) -> dict[str, Any]:
    """Return a schema each of whose entries doubles the time and the memory of its compilation."""
    names = ({"type": "string", "pattern": f"a{index}"} for index in range(entries))
    return {"allOf": [{"anyOf": [name, {"type": "integer"}]} for name in names]}


def post(served: Served, path: str, **body: Any) -> tuple[int, Any]:
    """Send a request and return the status and the JSON of its answer."""
    response, answer = served.send("POST", path, json.dumps(body).encode())
    return response.status, json.loads(answer)


def complete(served: Served, **body: Any) -> tuple[int, Any]:
    """Ask for a short completion."""
    return post(served, "/v1/completions", **{"model": MODEL, "prompt": "Tom", "max_tokens": 4} | body)


def abandoned(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and return its connection, which the client closes before the answer."""
    text = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", served.port))
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"content-length: {len(text)}", "", ""]
    connection.sendall("\r\n".join(lines).encode() + text)
    return connection


def pool_of(served: Served) -> Any:
    """Return the pool of a server's job processes."""
    application = served.server.config.app
    while not hasattr(application, "state"):
        application = application.app
    return application.state.service.texts._pool


def is_idle(served: Served) -> bool:
    """Return whether no job runs or waits."""
    return pool_of(served).running == 0 == pool_of(served).waiting


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    """Yield a server whose grammars may take one second."""
    with serving("--grammar-cpu-seconds", "1", "--max-num-seqs", "4", "--max-queue", "4") as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("entries", deep_except([17, 21, 24], [17, 24]))
def test_a_grammar_that_explodes_is_refused_and_streams_go_on(limited: Served, entries: int) -> None:
    stream = iter(long_stream(limited.client(), max_tokens=60))
    before = limited.engine.use.tokens
    status, answer = complete(limited, structured_outputs={"json": exploding(entries)})
    during = limited.engine.use.tokens - before
    assert status == 400
    if entries > 17:
        assert "the grammar takes more than 1 seconds of CPU time" in answer["error"]["message"]
        assert "--grammar-cpu-seconds" in answer["error"]["message"]
        assert during > 0
    assert sum(1 for event in stream if event.choices[0].text) > 0
    status, answer = complete(limited, structured_outputs={"choice": ["yes"]})
    assert (status, answer["choices"][0]["text"]) == (200, "yes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    deep_except(
        [
            {"regex": ".*" * 4000},
            {"choice": [f"option {index} of many" for index in range(40_000)]},
            {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
            {"grammar": "root ::= " + "(" * 20_000},
            {"grammar": 'root ::= "' + "\\" * 1001},
            {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
            {"json": '{"a":' * 20_000},
            {"regex": "(" * 20_000 + "a" + ")" * 20_000},
        ],
        2,
    ),
)
def test_other_grammars_without_end_are_refused(limited: Served, form: dict[str, Any]) -> None:
    status, answer = complete(limited, structured_outputs=form)
    assert status == 400
    assert answer["error"]["message"].startswith("structured outputs: ")
    assert is_idle(limited)


def test_an_equal_grammar_is_compiled_once(limited: Served) -> None:
    form = {"regex": "a{3}"}
    for _ in range(2):
        status, answer = complete(limited, structured_outputs=form, max_tokens=8)
        assert (status, answer["choices"][0]["text"]) == (200, "aaa")
        jobs = pool_of(limited)._numbers
    status, _ = complete(limited, structured_outputs=form, prompt=[5], max_tokens=8)
    assert status == 200
    assert pool_of(limited)._numbers == jobs  # a prompt of ids needs no job either


@pytest.mark.parametrize(("over", "status"), [(-1, 200), (0, 200), (1, 400)])
def test_a_text_that_cannot_fit_is_refused_by_its_length(limited: Served, over: int, status: int) -> None:
    text = "x" * (TOKEN_BYTES * PROMPT_TOKENS + over)
    jobs = pool_of(limited)._numbers
    status_code, answer = post(limited, "/tokenize", prompt=text)
    assert status_code == status
    assert pool_of(limited)._numbers == jobs + (status == 200)
    if status == 400:
        assert answer["error"]["message"].startswith(
            "the text has 3,571 bytes; a prompt has at most 255 tokens"
        )
    status_code, answer = complete(limited, prompt=text)
    assert status_code == 400


def test_a_prompt_is_encoded_once(limited: Served) -> None:
    jobs = pool_of(limited)._numbers
    assert complete(limited, prompt="Once upon a time")[0] == 200
    assert pool_of(limited)._numbers == jobs + 1


@pytest.mark.slow
def test_clients_that_leave_free_their_processes(limited: Served) -> None:
    """A grammar that would take a second, and tokenizations of a megabyte."""
    pool = pool_of(limited)
    form = {"structured_outputs": {"json": exploding(24)}, "model": MODEL, "prompt": "Tom"}
    for path, body in [("/v1/completions", form | {"stream": True}), ("/v1/completions", form)]:
        connection = abandoned(limited, path, body)
        wait_until(lambda: pool.running == 1)
        connection.close()
        wait_until(lambda: is_idle(limited))
    for _ in range(60):
        abandoned(limited, "/tokenize", {"prompt": "long " * 200_000}).close()
    assert complete(limited)[0] == 200
    wait_until(lambda: is_idle(limited))


@pytest.mark.slow
def test_tokenizing_takes_a_place_in_the_queue() -> None:
    with serving("--max-num-seqs", "1", "--max-queue", "0") as served:
        stream = long_stream(served.client())
        for path, body in [("/tokenize", {"prompt": "Tom"}), ("/detokenize", {"tokens": [5]})]:
            assert post(served, path, **body)[0] == 429
        stream.close()
        wait_until(lambda: not served.engine.busy)
        wait_until(lambda: post(served, "/tokenize", prompt="Tom")[0] == 200)


@pytest.mark.slow
def test_a_template_that_loops_keeps_nobody_waiting(tmp_path: Path) -> None:
    folder = write_scripted(tmp_path / "folder", {"once": ["upon"]})
    (folder / "chat_template.jinja").write_text(LOOPS, encoding="utf-8")
    chat = {"model": "folder", "max_tokens": 4}
    with serving("--model", str(folder), "--max-num-seqs", "4") as served:
        path, loop = "/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "loop"}]}
        hostile = [abandoned(served, path, loop) for _ in range(4)]
        wait_until(lambda: pool_of(served).running == 2)
        status, answer = post(served, path, **chat, messages=[{"role": "user", "content": "hello"}])
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "upon")
        assert pool_of(served).running + pool_of(served).waiting > 1
        for connection in hostile[1:]:
            connection.close()
        wait_until(lambda: pool_of(served).running + pool_of(served).waiting < 2)
        refusal = HTTPResponse(hostile[0])
        refusal.begin()
        assert (refusal.status, refusal.reason) == (400, "Bad Request")
        assert b"the chat template takes more than 2 seconds of CPU time" in refusal.read()
        hostile[0].close()


@pytest.mark.slow
def test_a_server_that_stops_cancels_grammars() -> None:
    answers: list[Any] = []
    with serving("--grammar-cpu-seconds", "100000") as served:
        thread = threading.Thread(
            target=lambda: answers.append(complete(served, structured_outputs={"json": exploding(24)}))
        )
        thread.start()
        wait_until(lambda: pool_of(served).running == 1)
    thread.join()
    assert [(status, answer["error"]["code"]) for status, answer in answers] == [(503, "stopping")]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_503(limited: Served) -> None:
    answers: list[Any] = []
    pool = pool_of(limited)
    thread = threading.Thread(
        target=lambda: answers.append(complete(limited, structured_outputs={"json": exploding(24)}))
    )
    thread.start()
    wait_until(lambda: pool.running == 1)
    os.kill(pool._connection._process.pid, signal.SIGKILL)
    thread.join()
    assert [(status, answer["error"]["code"]) for status, answer in answers] == [(503, "worker_ended")]
    assert complete(limited, prompt=LONG["prompt"])[0] == 200
