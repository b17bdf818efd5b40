"""What stands before the routes: the size and the time of a body, keys, the host's name, and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.serve.errors import ApiError
from model.serve.log import LOG

OPEN_PATHS = ("/", "/health", "/ready", "/version")
"""Paths that need no key: what a load balancer asks, and the page, which asks for one."""
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")


class Keys:
    """The keys of clients. None at all lets everybody in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def admits(self, header: bytes) -> bool:
        """Whether `Bearer KEY` names a key; the time it takes does not depend on how much of the key is right."""
        if not self._digests:
            return True
        scheme, _, key = header.partition(b" ")
        given = sha256(key.strip()).digest()
        found = [hmac.compare_digest(given, each) for each in self._digests]
        return scheme.lower() == b"bearer" and any(found)


@dataclass(frozen=True)
class Gate:
    """An ASGI application around another one.

    A body has at most `most_bytes` and comes within `seconds`. `hosts`, where given, are the names by which a browser
    may call this server: without keys, a page of another site must not reach it under a name of its own.
    """

    app: ASGIApp
    keys: Keys
    most_bytes: int
    seconds: float
    hosts: Collection[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, begun, status = f"req_{uuid4().hex}", time.monotonic(), 0

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check(scope["path"], headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await refuse(error, answered)
        else:
            if body is not None:
                await self.app(scope, _again(body, receive), answered)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            path = getattr(scope.get("route"), "path", "unknown path")
            said = status or "no answer"
            LOG.info("%s %s %s %.3f s %s", method, path, said, time.monotonic() - begun, request_id)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self.hosts is not None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if name not in self.hosts:
                raise ApiError(
                    403, "this server has no key and is called by its loopback names only", "wrong_host"
                )
        if path not in OPEN_PATHS and not self.keys.admits(headers.get(b"authorization", b"")):
            raise ApiError(
                401,
                "a key is needed: Authorization: Bearer KEY, of the server's --api-key-file",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None where the client left before it was there."""
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size[:20]) > self.most_bytes:
            raise self._too_large()
        try:
            return await asyncio.wait_for(self._read(receive), self.seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {self.seconds:g} seconds", "timeout") from None

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.most_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.most_bytes:,} bytes", "request_too_large")


def error_bytes(error: ApiError) -> bytes:
    """The body of a refusal."""
    return json.dumps(error.document).encode()


async def refuse(error: ApiError, send: Send) -> None:
    """Answer with an error. The rest of a body is not read, so the connection ends."""
    body = error_bytes(error)
    headers: list[tuple[str, Any]] = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("connection", "close"),
        *error.headers.items(),
    ]
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _again(body: bytes, receive: Receive) -> Receive:
    """What gives a body that was read, and then what follows it."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
