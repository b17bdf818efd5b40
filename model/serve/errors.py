"""Refusals of the server in the format of OpenAI's API, and functions that make those of several modules.

The body of a refusal is an object with message, type, param and code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

_DEFAULT_RETRY_SECONDS, _MAX_RETRY_SECONDS = 2, 3600
"""The default, a few steps of a small simulated model, is for an engine of which no request has ended yet."""
_RETRY_HEADERS = {"retry-after": str(_DEFAULT_RETRY_SECONDS)}


@dataclass
class ApiError(Exception):
    """Refused request, which an exception handler of the application answers.

    `status` is the HTTP status, `code` a stable name for programs, and `param` the argument at fault. `headers` are
    sent with the answer.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """Body of the answer as a JSON object; the error's type follows from the status."""
        types = {401: "authentication_error", 429: "rate_limit_error"}
        error_type = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }


def check_model_name(name: str | None, served: str) -> None:
    """Refuse a name that is not that of the server's model; None stands for the model.

    Raises:
        ApiError: The name is another one (404).
    """
    if name not in (None, served):
        raise ApiError(404, f"the model does not exist; this server has {served}", "model_not_found", "model")


def server_stopping_error() -> ApiError:
    """Return the error, status 503, of a request that arrives after the server was told to stop."""
    return ApiError(503, "the server is stopping", "stopping")


def engine_stopped_error() -> ApiError:
    """Return the error, status 503, of a request to a server whose engine has failed or ended."""
    return ApiError(503, "the engine has stopped", "engine_stopped")


def queue_full_error(seconds: float | None) -> ApiError:
    """Return the error, status 429, of a request beyond the queue's limit, with the header Retry-After.

    Args:
        seconds: Estimated time until the queue takes another request; with None the header says 2 seconds. The header
            is
        at least 1 second and at most an hour.
    """
    retry_seconds = _DEFAULT_RETRY_SECONDS if seconds is None else max(1, ceil(seconds))
    headers = {"retry-after": str(min(retry_seconds, _MAX_RETRY_SECONDS))}
    return ApiError(
        429,
        "the queue of requests is full: try again after the seconds of the header Retry-After",
        "queue_full",
        headers=headers,
    )


def replica_ended_error() -> ApiError:
    """Return the error, status 503, of a request whose replica ended before its answer, or that no replica can take."""
    return ApiError(
        503,
        "the replica of this request has ended and is started again: try again later",
        "replica_ended",
        headers=_RETRY_HEADERS,
    )


def worker_ended_error() -> ApiError:
    """Return the error, status 503, of a request whose tokenizer, template or grammar ran in a process that ended."""
    return ApiError(
        503,
        "the worker process of tokenizer and grammars has ended and is started again: try again later",
        "worker_ended",
        headers=_RETRY_HEADERS,
    )
