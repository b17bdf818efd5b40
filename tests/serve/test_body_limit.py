"""How much of a body that is too large the server reads before it refuses it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")

from model.serve.http.admission import Admission, Keys

MOST, CHUNK = 1000, 100


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request with 200."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def post(size: int, **headers: str) -> tuple[int, int]:
    """Return the status of a request whose body has `size` bytes, and how many of them the server read before it."""
    chunks = [b"x" * min(CHUNK, size - start) for start in range(0, size, CHUNK)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks)}
        for index, chunk in enumerate(chunks, start=1)
    ]
    unread, sent = iter(messages), []

    async def receive() -> Any:
        return next(unread)

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    asyncio.run(
        Admission(answer, Keys([]), MOST, 5)({"type": "http", "path": "/", "headers": raw}, receive, send)
    )
    num_unread = sum(len(message["body"]) for message in unread)
    return sent[0]["status"], size - num_unread


@pytest.mark.parametrize(
    ("size", "status"), [(0, 200), (999, 200), (1000, 200), (1001, 413), (1999, 413), (2000, 413)]
)
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_is_read_to_its_end_before_the_answer(size: int, status: int, is_declared: bool) -> None:
    headers = {"content_length": str(size)} if is_declared else {}
    assert post(size, **headers) == (status, size)


@pytest.mark.parametrize("size", [2001, 10**6])
def test_a_body_of_more_than_twice_the_limit_is_refused_at_once(size: int) -> None:
    assert post(size, content_length=str(size)) == (413, 0)
    status, read = post(size)
    assert status == 413 and 2 * MOST < read <= 2 * MOST + CHUNK


@pytest.mark.parametrize(("size", "expected"), [(1000, (200, 1000)), (1001, (413, 0))])
def test_a_client_that_asks_first_sends_no_refused_body(size: int, expected: tuple[int, int]) -> None:
    assert post(size, content_length=str(size), expect="100-continue") == expected
