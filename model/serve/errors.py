"""Refusals in the shape of OpenAI's API: a status, and an object with message, type, param and code."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any


@dataclass
class ApiError(Exception):
    """A request that is not answered as asked. `param` is the argument at fault, `headers` go with the answer."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """The answer's body."""
        types = {401: "authentication_error", 429: "rate_limit_error"}
        kind = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def stopping_now() -> ApiError:
    """The server drains."""
    return ApiError(503, "the server is stopping", "stopping")


def engine_stopped() -> ApiError:
    """Return the answer of a server whose engine has failed or ended."""
    return ApiError(503, "the engine has stopped", "engine_stopped")


def queue_is_full(seconds: float | None) -> ApiError:
    """The engine has no place left, and `seconds` is when it may have."""
    after = _RETRY_SECONDS if seconds is None else min(max(1, ceil(seconds)), _MOST_RETRY_SECONDS)
    return ApiError(
        429,
        "as many requests wait as may: try again later",
        "queue_full",
        headers={"retry-after": str(after)},
    )


def replica_ended() -> ApiError:
    """The process that computed the answer is gone, or none is there to compute it."""
    return ApiError(
        503,
        "the replica has ended and starts anew: try again later",
        "replica_ended",
        headers={"retry-after": str(_RETRY_SECONDS)},
    )


def worker_ended() -> ApiError:
    """Return the error of a request whose tokenizer, chat template or grammar ran in a process that has ended."""
    return ApiError(
        503,
        "the worker process of tokenizer and grammars has ended and is started again: try again later",
        "worker_ended",
        headers={"retry-after": str(_RETRY_SECONDS)},
    )


_RETRY_SECONDS = 2
"""Where no request has ended yet: a few steps of a small simulated model."""
_MOST_RETRY_SECONDS = 3600
