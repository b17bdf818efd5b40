"""Published clients run unmodified against the server; what they sent once is answered by `make test`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.clients import CLIENTS, PROGRAMS, RECORDED, NotInstalled
from tests.serve.conftest import Served

RECORDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDED.glob("*.json"))
}


@pytest.mark.deep
@pytest.mark.parametrize("name", CLIENTS)
def test_client_runs_unmodified(server: Served, name: str) -> None:
    try:
        done = CLIENTS[name].run(server.url)
    except NotInstalled as reason:
        pytest.skip(str(reason))
    assert done.returncode == 0, done.stderr[-3000:]


def test_each_client_has_a_program_and_a_record() -> None:
    assert set(RECORDS) == set(CLIENTS)
    assert {client.program for client in CLIENTS.values()} == {
        path.stem for path in PROGRAMS.glob("*.py") if path.stem != "__init__"
    }


@pytest.mark.parametrize("name", RECORDS)
def test_recorded_requests_are_answered(server: Served, name: str) -> None:
    for request in RECORDS[name]:
        body = None if request["body"] is None else json.dumps(request["body"]).encode()
        response, answer = server.send(request["method"], request["path"], body)
        assert response.status == request["status"] == 200, (request, answer)
        if request["body"] is not None and request["body"].get("stream"):
            check_stream(answer)
        elif response.headers["content-type"] == "application/json":
            assert not json.loads(answer).get("error")


def check_stream(answer: bytes) -> None:
    """Check that a stream has its end and no error."""
    frames = answer.decode().removesuffix("\n\n").split("\n\n")
    data: list[Any] = [frame[frame.index("data: ") + 6 :] for frame in frames]
    if data[-1] == "[DONE]":
        data.pop()
        assert all("error" not in json.loads(event) for event in data)
    else:
        assert json.loads(data[-1])["type"] in ("response.completed", "response.incomplete")
