"""Checks of requests before the routes: origins, API keys, and the size and the time of a body; the log of requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from uuid import uuid4

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.serve.errors import ApiError
from model.serve.http.origins import OriginPolicy
from model.serve.log import LOG

OPEN_PATHS = ("/", "/health", "/ready", "/version")
"""Paths that need no key: those for load balancers, and the page, which asks its user for a key."""
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
KEY_SALT = "key_salt"
"""Name in the scope's state of the salt of the request's key: a text, empty on a server without keys."""


class Keys:
    """API keys of clients; an empty sequence admits every client."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._salts = [derive_salt(key) for key in keys]

    def find_salt(self, header: bytes) -> str | None:
        """Return the salt of the key in the value of an Authorization header, `Bearer KEY`.

        The time of the comparison does not depend on how many characters of the key are right.

        Returns:
            The salt, "" on a server without keys, or None for a wrong or missing key.
        """
        if not self._digests:
            return ""
        scheme, _, key = header.partition(b" ")
        key_digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(key_digest, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._salts[matches.index(True)]


def derive_salt(key: str) -> str:
    """Return the salt with which prompts of a key's clients are hashed for the prefix cache.

    It has 64 hexadecimal digits that do not reveal the key. Clients of different keys so share no pages.
    """
    return blake2b(key.encode(), digest_size=32, person=b"nkw key salt").hexdigest()


def combine_salts(key_salt: str, cache_salt: str | None) -> str | None:
    """Return the engine's cache_salt of a request, made of the key's salt and the request's own; None without both.

    Requests share pages only if both of their salts are equal.
    """
    return f"{key_salt}{cache_salt or ''}" or None


@dataclass(frozen=True)
class Gate:
    """ASGI application that checks the origin of a request, adds the header x-request-id to its answer, and logs it."""

    app: ASGIApp
    policy: OriginPolicy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request with `app`, or refuse it and end its connection."""
        request_id, begun, status = f"req_{uuid4().hex}", time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self.policy.check(scope)
            await self.app(scope, receive, send_with_id)
        except ApiError as error:
            await _refuse(error)(scope, receive, send_with_id)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            path = getattr(scope.get("route"), "path", "unknown path")
            outcome = status or "no answer"
            LOG.info("%s %s %s %.3f s %s", method, path, outcome, time.monotonic() - begun, request_id)


@dataclass(frozen=True)
class Admission:
    """ASGI application that checks the key of a request and reads its body before `app` gets it.

    A body has at most `max_bytes` and arrives within `seconds`. The salt of the request's key is stored in the scope's
    state under KEY_SALT.
    """

    app: ASGIApp
    keys: Keys
    max_bytes: int
    seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request with `app`, or refuse it and end its connection.

        A client that leaves before the end of its body gets no answer.
        """
        try:
            self._check_key(scope)
            body = await self._read_body(dict(scope["headers"]), receive)
        except ApiError as error:
            await _refuse(error)(scope, receive, send)
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
                "the request has no valid key: send the header Authorization: Bearer KEY with a key of the server's "
                "--api-key-file",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        scope.setdefault("state", {})[KEY_SALT] = salt or ""

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body, or None if the client left before its end.

        A body of up to twice `max_bytes` is read to its end before it is refused: most clients read no answer before
        they have sent all of it. A larger one is refused at once, and so is one whose client asks before it sends.

        Raises:
            ApiError: The body has more than `max_bytes` bytes (413), or did not arrive within `seconds` (408).
        """
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size[:20]) > self.max_bytes * (1 if b"expect" in headers else 2):
            raise self._too_large()
        try:
            return await asyncio.wait_for(self._read_messages(receive), self.seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self.seconds:g} seconds: send it faster, or start nkw serve with a "
                "longer --body-timeout",
                "timeout",
            ) from None

    async def _read_messages(self, receive: Receive) -> bytes | None:
        body, size, is_complete = bytearray(), 0, False
        while not is_complete and size <= 2 * self.max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= self.max_bytes:
                body += message.get("body", b"")
            is_complete = not message.get("more_body")
        if size > self.max_bytes:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self.max_bytes:,} bytes: shorten it, or start nkw serve with a larger --max-body",
            "request_too_large",
        )


def encode_error(error: ApiError) -> bytes:
    """Return the body of a refusal as JSON bytes."""
    return json.dumps(error.document).encode()


def make_error_response(error: ApiError) -> JSONResponse:
    """Return the HTTP response of a refusal: its status, its JSON body and its headers."""
    return JSONResponse(error.document, error.status, headers=error.headers)


def _refuse(error: ApiError) -> JSONResponse:
    """Return the HTTP response of a refusal with the header `connection: close`.

    The connection ends because the request's body may not have been read to its end.
    """
    response = make_error_response(error)
    response.headers["connection"] = "close"
    return response


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive channel whose first message is a body that was read; later ones come from `receive`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message
