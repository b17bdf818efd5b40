"""Interface between the router of `nkw serve` and the engines behind it, on one machine or on a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric


@dataclass(frozen=True)
class Call:
    """Request as a replica gets it; of the client's headers it has the content type alone."""

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
    """Status and body of a whole answer."""

    status: int
    body: bytes


class ReplicaLost(Exception):
    """The replica has ended before its answer did."""


class Backend(Protocol):
    """Replicas by key. A key is a label of metrics, and no other replica gets it while this one answers."""

    @property
    def up(self) -> Sequence[Hashable]:
        """Keys of the replicas that answer."""

    def exchange(self, key: Hashable, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of a replica's answer and then its body; closing the generator cancels the request.

        Raises:
            ReplicaLost: The replica ended before its answer did.
        """

    async def ask(self, path: str) -> Sequence[tuple[Hashable, Answer]]:
        """Return every replica's answer to GET of a path, without replicas that end before their answer."""

    def drain(self) -> None:
        """Make the replicas take no further requests, if they belong to this router alone."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics that the backend counts itself."""


async def collect_answer(pieces: AsyncGenerator[Head | bytes, None]) -> Answer:
    """Return the whole answer of an exchange."""
    async with aclosing(pieces):
        head, *body = [piece async for piece in pieces]
    return Answer(head.status, b"".join(body))  # type: ignore[union-attr, arg-type]
