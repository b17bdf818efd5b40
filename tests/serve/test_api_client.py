"""The client of `nkw bench serve` and `nkw chat`: addresses, events of streams, refusals, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from model.commands.api_client import Address, ApiClient, RequestFailed, check_client, read_client_key
from model.errors import ModelError

Work = Callable[[ApiClient], Awaitable[Any]]
EVENTS = b'data: {"a": 1}\r\n\r\n: ping\n\ndata: {"a":\ndata:  2}\n\ndata: [DONE]\n\n'


def answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ask(work: Work, *answers: bytes, cut: int | None = None) -> tuple[Any, list[bytes], int]:
    """Return the result of work with a client of a server of these answers, sent by the byte if `cut`.

    Returns: also the requests that came, and the number of connections.
    """
    requests: list[bytes] = []
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while len(requests) < len(answers):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            requests.append(head + await reader.readexactly(length))
            reply = answers[len(requests) - 1]
            for start in range(0, len(reply), cut or len(reply) or 1):
                writer.write(reply[start : start + (cut or len(reply))])
                await writer.drain()
                await asyncio.sleep(0)
            if b"connection: close" in reply or not reply:
                break
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            client = ApiClient(
                Address.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "--url")
            )
            try:
                return await work(client)
            finally:
                client.close()

    return asyncio.run(run()), requests, connections


async def collect(client: ApiClient) -> list[Any]:
    return [event async for event in client.stream("/v1/completions", {"stream": True})]


@pytest.mark.parametrize("cut", [None, 1, 7])
def test_events_are_read_however_they_are_cut(cut: int | None) -> None:
    events, (request,), _ = ask(collect, answer("200 OK", EVENTS), cut=cut)
    assert events == [{"a": 1}, {"a": 2}]
    assert request.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert request.endswith(b'\r\n\r\n{"stream": true}')


def test_a_connection_serves_the_next_request() -> None:
    async def twice(client: ApiClient) -> list[Any]:
        return [await client.fetch("GET", "/a"), await client.fetch("GET", "/b")]

    answers, requests, connections = ask(twice, answer("200 OK", b"1"), answer("200 OK", b"2"))
    assert (answers, connections) == ([1, 2], 1)
    assert [request.split()[1] for request in requests] == [b"/a", b"/b"]


def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    async def twice(client: ApiClient) -> list[Any]:
        first = await client.fetch("GET", "/a")
        await asyncio.sleep(0.05)
        return [first, await client.fetch("GET", "/b")]

    closing = answer("200 OK", b"1", "connection: close")
    answers, _, connections = ask(twice, closing, answer("200 OK", b"2"))
    assert (answers, connections) == ([1, 2], 2)


@pytest.mark.parametrize(
    ("reply", "message", "status"),
    [
        (answer("404 Not Found", b'{"error": {"message": "no such model"}}'), "404: no such model", 404),
        (answer("400 Bad Request", b'{"object": "error", "message": "too long"}'), "400: too long", 400),
        (answer("502 Bad Gateway", b"<html>"), "502: <html>", 502),
        (answer("200 OK", b'data: {"error": {"message": "it broke"}}\n\n'), "it broke", None),
        (answer("200 OK", b"data: {\n\n"), "an event of the stream is no JSON", None),
    ],
)
def test_a_refusal_is_told_in_the_words_of_the_server(reply: bytes, message: str, status: int | None) -> None:
    with pytest.raises(RequestFailed) as failed:
        ask(collect, reply)
    assert (failed.value.message, failed.value.status) == (message, status)


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\ndata"]
)
def test_an_answer_that_breaks_off_is_a_failure(reply: bytes) -> None:
    with pytest.raises(RequestFailed, match=r"^http://127\.0\.0\.1:\d+ "):
        ask(collect, reply)


def test_a_port_without_a_server_is_a_failure() -> None:
    with pytest.raises(RequestFailed, match="does not answer"):
        asyncio.run(ApiClient(Address("http", "127.0.0.1", 1, "")).fetch("GET", "/v1/models"))


def test_a_key_is_sent_as_a_bearer() -> None:
    async def keyed(client: ApiClient) -> Any:
        return await ApiClient(client.address, "a-secret", {"x-a": "b"}).fetch("GET", "/")

    _, (request,), _ = ask(keyed, answer("200 OK", b"1"))
    assert b"authorization: Bearer a-secret\r\n" in request
    assert b"x-a: b\r\n" in request


@pytest.mark.parametrize("models", [b'{"data": []}', b"[]", b'{"data": [{}]}'])
def test_a_server_without_models_is_a_failure(models: bytes) -> None:
    with pytest.raises(RequestFailed, match="lists no model"):
        ask(lambda client: client.find_model(), answer("200 OK", models))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost:8000", Address("http", "localhost", 8000, "")),
        ("http://localhost:8000/v1/", Address("http", "localhost", 8000, "")),
        ("https://api.example/openai/v1", Address("https", "api.example", 443, "/openai")),
        ("http://[::1]", Address("http", "::1", 80, "")),
    ],
)
def test_an_address_is_that_of_the_server(url: str, address: Address) -> None:
    assert Address.parse(url, "--url") == address
    assert str(address).endswith(address.path)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "http://[::1", "http://a:65536", "http://a b"]
)
def test_another_text_is_no_address(url: str) -> None:
    with pytest.raises(ModelError, match=r"^--url is .*; it must be like http://127\."):
        Address.parse(url, "--url")


def test_the_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert read_client_key(None) is None
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    assert read_client_key(None) == "of-the-environment"
    path = tmp_path / "keys"
    path.write_text("first-key-of-the-file\nsecond-key-of-the-file\n", encoding="utf-8")
    assert read_client_key(path) == "first-key-of-the-file"


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_client("nkw chat")
    monkeypatch.setattr("model.commands.api_client.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"^nkw chat needs h11; pip install 'nki-workbench\[serve\]'$"):
        check_client("nkw chat")
