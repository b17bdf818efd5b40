"""What the router of `nkw serve` asks of the engines behind it, however it reaches them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric


@dataclass(frozen=True)
class Call:
    """A request as a replica gets it; of the client's headers it keeps the content type alone."""

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
        """Yield the head of a replica's answer and then its data; closing the generator cancels the request.

        Raises: ReplicaLost if the replica ends before its answer does.
        """

    async def ask(self, path: str) -> Sequence[tuple[Hashable, Answer]]:
        """Return every replica's answer to GET of a path; a replica that ends meanwhile has none."""

    def drain(self) -> None:
        """Let the replicas take no further requests, if they belong to this router alone."""

    def collect(self) -> Iterable[Metric]:
        """Return the numbers that the backend counts itself."""
