"""Replicas that are processes of this machine, each reached at its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import h11
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from model.serve.replicas.backend import Answer, Call, Head, ReplicaLost
from model.serve.replicas.replica import KEY_SALT_HEADER, Replica

_READ_BYTES = 2**16
_HEADERS = [(b"host", b"localhost"), (b"connection", b"close")]
_OWN_HEADERS = (b"connection", b"transfer-encoding")
"""Headers of an answer that hold between the replica and the router only."""


class Sockets:
    """The backend of `nkw serve --replicas N`; a replica's key is its number."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    def up(self) -> list[int]:
        """Numbers of the replicas that answer."""
        return [replica.number for replica in self._replicas if replica.up]

    async def exchange(self, key: Any, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of a replica's answer and its data, on a connection of their own.

        Raises: ReplicaLost if the replica ends before its answer does.
        """
        try:
            async with aclosing(_exchange(self._replicas[key].path, call)) as pieces:
                async for piece in pieces:
                    yield piece
        except (OSError, h11.RemoteProtocolError) as lost:
            raise ReplicaLost from lost

    async def ask(self, path: str) -> list[tuple[int, Answer]]:
        """Return every replica's answer to GET of a path; a replica that ends meanwhile has none."""
        up = self.up
        answers = await asyncio.gather(*(self._whole(key, path) for key in up), return_exceptions=True)
        return [(key, answer) for key, answer in zip(up, answers) if isinstance(answer, Answer)]

    def drain(self) -> None:
        """Let the replicas take no further requests and cancel what has not begun."""
        for replica in self._replicas:
            replica.drain()

    def collect(self) -> Iterator[Metric]:
        """Return which replicas answer, and how often each was started again."""
        up = GaugeMetricFamily("nkw_replica_up", "1 where the replica answers.", labels=["replica"])
        restarts = CounterMetricFamily("nkw_replica_restarts", "Starts after an end.", labels=["replica"])
        for replica in self._replicas:
            up.add_metric([str(replica.number)], replica.up)
            restarts.add_metric([str(replica.number)], replica.restarts)
        yield from (up, restarts)

    async def _whole(self, key: int, path: str) -> Answer:
        async with aclosing(self.exchange(key, Call(path, raw_path=path.encode()))) as pieces:
            head, *data = [piece async for piece in pieces]
        return Answer(head.status, b"".join(data))  # type: ignore[union-attr, arg-type]


async def _exchange(path: str, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """Yield an answer from a socket. Raises OSError or RemoteProtocolError where the replica ends before it does."""
    query = b"?" + call.query if call.query else b""
    headers = [*_HEADERS, *call.headers, (KEY_SALT_HEADER, call.key_salt.encode())]
    request = h11.Request(
        method=call.method,
        target=call.raw_path + query,
        headers=[*headers, (b"content-length", str(len(call.body)).encode())],
    )
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        connection = h11.Connection(h11.CLIENT)
        for sent in (request, h11.Data(data=call.body), h11.EndOfMessage()):
            writer.write(connection.send(sent) or b"")
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.EndOfMessage):
                return
            elif isinstance(event, h11.Response):
                kept = [(name, text) for name, text in event.headers if name not in _OWN_HEADERS]
                yield Head(event.status_code, kept)
            else:
                yield bytes(event.data)  # type: ignore[union-attr]
    finally:
        writer.transport.abort()
