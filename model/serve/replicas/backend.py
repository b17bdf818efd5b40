"""Interface between the router of `nkw serve` and the engines behind it, on one machine or on a cluster.

`sockets.py` implements it for processes of this machine, `model/serve/cluster/handle.py` for a Ray cluster.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric


@dataclass(frozen=True)
class Call:
    """HTTP request as a replica gets it from the router.

    Of the client's headers it has the content type alone. `key_salt` is the salt of the client's API key.
    """

    path: str
    method: str = "GET"
    raw_path: bytes = b""
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    key_salt: str = ""
    body: bytes = b""


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Answer:
    """Status and body of a whole answer, without its headers."""

    status: int
    body: bytes


class ReplicaLost(Exception):
    """Error of an exchange with a replica that ended before its answer did."""


class Backend(Protocol):
    """Replicas of a router, each under a key.

    A key is a label of metrics, and no other replica gets it while this one answers.
    """

    @property
    def up(self) -> Sequence[Hashable]:
        """Keys of the replicas that answer now."""

    def exchange(self, key: Hashable, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Send a request to a replica; yield the head of its answer and then pieces of the body.

        Closing the generator cancels the request.

        Raises:
            ReplicaLost: The replica ended before its answer did.
        """

    async def ask(self, path: str) -> Sequence[tuple[Hashable, Answer]]:
        """Return (key, answer to GET `path`) for every replica, without replicas that end before their answer."""

    def drain(self) -> None:
        """Make the replicas take no further requests; do nothing if they also serve other routers."""

    def collect(self) -> Iterable[Metric]:
        """Return the metric families that the backend counts itself, such as which replicas answer."""


async def collect_answer(pieces: AsyncGenerator[Head | bytes, None]) -> Answer:
    """Return the status and the whole body of an exchange, of which `pieces` are the head and the pieces of the body.

    Raises:
        ReplicaLost: The replica ended before its answer did.
    """
    async with aclosing(pieces):
        head, *body = [piece async for piece in pieces]
    return Answer(head.status, b"".join(body))  # type: ignore[union-attr, arg-type]
