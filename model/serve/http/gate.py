"""Checks before the routes: origins, keys, the size and the time of a body; and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.serve.errors import ApiError
from model.serve.http.origins import OriginPolicy
from model.serve.log import LOG

OPEN_PATHS = ("/", "/health", "/ready", "/version")
"""Paths that need no key: what a load balancer asks, and the page, which asks for one."""
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")


KEY_SALT = "key_salt"
"""Name in the scope's state of the salt that belongs to the request's key: a text, empty on a server without keys."""


class Keys:
    """The clients' keys. Without keys every client is admitted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._salts = [derive_salt(key) for key in keys]

    def find_salt(self, header: bytes) -> str | None:
        """Return the salt of the key in `Bearer KEY`; "" on a server without keys, and None for a wrong key.

        The time taken does not depend on how much of the key is right.
        """
        if not self._digests:
            return ""
        scheme, _, key = header.partition(b" ")
        sent = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._salts[matches.index(True)]


def derive_salt(key: str) -> str:
    """Return the salt of a key's prefix cache, 64 hexadecimal digits that do not reveal the key."""
    return blake2b(key.encode(), digest_size=32, person=b"nkw key salt").hexdigest()


def combine_salts(key_salt: str, cache_salt: str | None) -> str | None:
    """Return the engine's cache_salt of a request: two requests share pages only if both of their salts are equal."""
    return f"{key_salt}{cache_salt or ''}" or None


@dataclass(frozen=True)
class Gate:
    """An ASGI application around another one: request ids, a line in the log for every request, and origins."""

    app: ASGIApp
    policy: OriginPolicy

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
            self.policy.check(scope)
            await self.app(scope, receive, answered)
        except ApiError as error:
            await refuse(error, answered)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            path = getattr(scope.get("route"), "path", "unknown path")
            outcome = status or "no answer"
            LOG.info("%s %s %s %.3f s %s", method, path, outcome, time.monotonic() - begun, request_id)


@dataclass(frozen=True)
class Admission:
    """An ASGI application around another one that checks keys and reads bodies.

    A body has at most `most_bytes` and comes within `seconds`. The salt of the request's key is stored in the scope's
    state under KEY_SALT.
    """

    app: ASGIApp
    keys: Keys
    most_bytes: int
    seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._body(dict(scope["headers"]), receive)
        except ApiError as error:
            await refuse(error, send)
        else:
            if body is not None:
                await self.app(scope, _replay_body(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) > 1:
            raise ApiError(400, "the request has several Authorization headers; send one", "duplicate_header")
        salt = self.keys.find_salt(b"".join(headers))
        if salt is None and scope["path"] not in OPEN_PATHS:
            raise ApiError(
                401,
                "a key is needed: Authorization: Bearer KEY, of the server's --api-key-file",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        scope.setdefault("state", {})[KEY_SALT] = salt or ""

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body; None where the client left before its end. Raises ApiError for a late or too large one."""
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


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a channel that first gives the body that was read, and then what `receive` gives."""
    is_replayed = False

    async def next_message() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
