"""Backend for replicas that are processes of this machine, each with a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import h11
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from model.serve.replicas.backend import Answer, Call, Head, ReplicaLost, collect_answer
from model.serve.replicas.replica import KEY_SALT_HEADER, Replica

_READ_BYTES = 2**16
_HEADERS = [(b"host", b"localhost"), (b"connection", b"close")]
_HOP_BY_HOP_HEADERS = (b"connection", b"transfer-encoding")
"""Headers of an answer that concern the connection between replica and router only."""


class Sockets:
    """Backend of `nkw serve --replicas N`; the key of a replica is its number."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    @property
    def up(self) -> list[int]:
        """Numbers of the replicas that answer."""
        return [replica.number for replica in self._replicas if replica.up]

    async def exchange(self, key: Any, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Send a request over a new connection; yield the head of the replica's answer and then pieces of the body.

        Closing the generator closes the connection, which cancels the request.

        Raises:
            ReplicaLost: The replica ended before its answer did.
        """
        try:
            async with aclosing(_exchange(str(self._replicas[key].path), call)) as pieces:
                async for piece in pieces:
                    yield piece
        except (OSError, h11.RemoteProtocolError) as lost:
            raise ReplicaLost from lost

    async def ask(self, path: str) -> list[tuple[int, Answer]]:
        """Return (number, answer to GET `path`) for every replica, without replicas that end before their answer."""
        up, call = self.up, Call(path, raw_path=path.encode())
        exchanges = [collect_answer(self.exchange(key, call)) for key in up]
        answers = await asyncio.gather(*exchanges, return_exceptions=True)
        return [(key, answer) for key, answer in zip(up, answers) if isinstance(answer, Answer)]

    def drain(self) -> None:
        """Make the replicas take no further requests and cancel requests that have not started."""
        for replica in self._replicas:
            replica.drain()

    def collect(self) -> Iterator[Metric]:
        """Yield two metric families: which replicas answer, and how often each replica was started again."""
        up = GaugeMetricFamily("nkw_replica_up", "1 where the replica answers.", labels=["replica"])
        restarts = CounterMetricFamily("nkw_replica_restarts", "Starts after an end.", labels=["replica"])
        for replica in self._replicas:
            up.add_metric([str(replica.number)], replica.up)
            restarts.add_metric([str(replica.number)], replica.restarts)
        yield from (up, restarts)


async def _exchange(path: str, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """Send a request to the Unix socket at `path`; yield the head of the answer and then pieces of the body.

    Headers about the connection itself are left out of the head.

    Raises:
        OSError: The replica has ended, or the connection breaks off.
        h11.RemoteProtocolError: The connection ends before the answer does.
    """
    query = b"?" + call.query if call.query else b""
    request = h11.Request(
        method=call.method,
        target=call.raw_path + query,
        headers=[
            *_HEADERS,
            *call.headers,
            (KEY_SALT_HEADER, call.key_salt.encode()),
            (b"content-length", str(len(call.body)).encode()),
        ],
    )
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        connection = h11.Connection(h11.CLIENT)
        for outgoing in (request, h11.Data(data=call.body), h11.EndOfMessage()):
            writer.write(connection.send(outgoing) or b"")
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.EndOfMessage):
                return
            elif isinstance(event, h11.Response):
                headers = [header for header in event.headers if header[0] not in _HOP_BY_HOP_HEADERS]
                yield Head(event.status_code, headers)
            else:
                yield bytes(event.data)  # type: ignore[union-attr]
    finally:
        writer.transport.abort()
