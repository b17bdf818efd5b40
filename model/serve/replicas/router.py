"""In front of several replicas: each request goes to one of them, and the answer passes through as it comes.

Keys, hosts, sizes and slow clients are checked before this (`gate.py`, `server.py`), arguments and queues behind it:
each once, and as with one server. `/health`, `/ready` and `/metrics` speak for all replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import h11
from prometheus_client import Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from model.serve.errors import ApiError, replica_ended, stopping_now
from model.serve.http.app import router as routes
from model.serve.http.gate import KEY_SALT, error_bytes
from model.serve.log import LOG
from model.serve.metrics import CONTENT_TYPE
from model.serve.openai.generation import ClientGone, while_connected
from model.serve.replicas.replica import KEY_SALT_HEADER, Replica
from model.serve.replicas.routing import GENERATING, Asked, Routing

_READ_BYTES = 2**16
_EVENT_END = b"\n\n"
_HEADERS = [(b"host", b"localhost"), (b"connection", b"close")]
_OWN_HEADERS = (b"connection", b"transfer-encoding")
"""Headers of an answer that hold between the replica and the router only."""


class Router:
    """The ASGI application of some replicas."""

    def __init__(self, replicas: Sequence[Replica], routing: Routing) -> None:
        self._replicas = replicas
        self._routing = routing
        self._draining = False
        self._routed = Counter(
            "nkw_routed_requests",
            "Requests for texts by replica, and whether their prompt's prefix or the load decided.",
            ["replica", "reason"],
            registry=None,
        )
        self._own: dict[str, Callable[[], Coroutine[Any, Any, Response]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
        }

    def drain(self) -> None:
        """Take no further requests for texts, and let the replicas cancel what has not begun."""
        self._draining = True
        for replica in self._replicas:
            replica.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body comes whole."""
        scope["route"] = next((each for each in routes.routes if each.matches(scope)[0] is Match.FULL), None)
        own = self._own.get(scope["path"]) if scope["method"] == "GET" else None
        response: Response | None = None
        try:
            body = (await receive()).get("body", b"")
            if own is not None:
                response = await own()
            else:
                await while_connected(receive, self._forward(scope, body, send))
        except ClientGone:
            response = Response(status_code=499)
        except ApiError as error:
            response = JSONResponse(error.document, error.status, headers=error.headers)
        if response is not None:
            await response(scope, receive, send)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Have a replica answer."""
        key_salt = scope.get("state", {}).get(KEY_SALT, "")
        asked = Asked.of(scope["path"], body, self._routing.most_blocks, key_salt)
        if self._draining and scope["path"] in GENERATING:
            raise stopping_now()
        up = [each.number for each in self._replicas if each.up]
        if not up:
            raise replica_ended()
        choice = self._routing.choose(asked, up)
        if asked.wanted:
            self._routed.labels(choice.replica, "prefix" if choice.by_prefix else "load").inc()
        try:
            await _pass_on(_exchange(self._replicas[choice.replica].path, _request(scope, body), body), send)
        finally:
            self._routing.ended(choice, asked)

    async def _health(self) -> Response:
        """Whether any replica computes steps; one that has ended starts anew."""
        if not any(answer.status == 200 for _, answer in await self._ask("/health")):
            raise replica_ended()
        return JSONResponse({"status": "ok"})

    async def _ready(self) -> Response:
        """Whether requests are taken."""
        if self._draining:
            raise stopping_now()
        await self._health()
        return JSONResponse({"status": "ready"})

    async def _metrics(self) -> Response:
        """The numbers of all replicas, each with the label `replica`, and those of the router."""
        found = await self._ask("/metrics")
        families = _Families([*_labelled(found), *self._routed.collect(), *self._processes()])
        return Response(generate_latest(families), headers={"content-type": CONTENT_TYPE})

    def _processes(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("nkw_replica_up", "1 where the replica answers.", labels=["replica"])
        restarts = CounterMetricFamily("nkw_replica_restarts", "Starts after an end.", labels=["replica"])
        for each in self._replicas:
            up.add_metric([str(each.number)], each.up)
            restarts.add_metric([str(each.number)], each.restarts)
        yield from (up, restarts)

    async def _ask(self, path: str) -> list[tuple[int, _Answer]]:
        """The answers of the replicas that are up, by their numbers; one that ends meanwhile has none."""
        request = h11.Request(method="GET", target=path, headers=_HEADERS)
        up = [each for each in self._replicas if each.up]
        found = await asyncio.gather(*(_whole(each.path, request) for each in up), return_exceptions=True)
        return [(each.number, answer) for each, answer in zip(up, found) if isinstance(answer, _Answer)]


@dataclass(frozen=True)
class _Answer:
    """A whole answer."""

    status: int
    body: bytes


class _Families(Collector):
    """Numbers that were collected."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """The numbers."""
        return self._families


def _labelled(found: Sequence[tuple[int, _Answer]]) -> Iterable[Metric]:
    """The numbers of some replicas, by name, with the label `replica`."""
    families: dict[str, Metric] = {}
    for number, answer in found:
        for each in text_string_to_metric_families(answer.body.decode()):
            family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
            for sample in each.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": str(number)}, sample.value)
    return families.values()


def _request(scope: Scope, body: bytes) -> h11.Request:
    """Return the request for the replica: of the client's headers the content type alone, and the key's salt."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    kept = [(name, value) for name, value in scope["headers"] if name == b"content-type"]
    kept.append((KEY_SALT_HEADER, scope.get("state", {}).get(KEY_SALT, "").encode()))
    headers = [*_HEADERS, *kept, (b"content-length", str(len(body)).encode())]
    return h11.Request(method=scope["method"], target=scope["raw_path"] + query, headers=headers)


async def _whole(path: str, request: h11.Request) -> _Answer:
    """A whole answer; OSError or RemoteProtocolError where the replica ends before."""
    async with aclosing(_exchange(path, request)) as events:
        head, *data = [each async for each in events]
    return _Answer(head.status_code, b"".join(each.data for each in data))


async def _exchange(path: str, request: h11.Request, body: bytes = b"") -> AsyncGenerator[Any, None]:
    """The head of an answer and its data as they come, on a connection of their own; to leave it is to hang up.

    OSError or RemoteProtocolError where the replica ends before its answer does.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        connection = h11.Connection(h11.CLIENT)
        for sent in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(sent) or b"")
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                yield event
    finally:
        writer.transport.abort()


async def _pass_on(events: AsyncGenerator[Any, None], send: Send) -> None:
    """Send an answer: a stream event by event, any other one whole.

    A replica that ends before its answer is a refusal, and in a stream an event, the last one but [DONE].
    """
    begun = False
    data = b""
    async with aclosing(events):
        try:
            head = await anext(events)
            start = {
                "type": "http.response.start",
                "status": head.status_code,
                "headers": _kept(head.headers),
            }
            streams = dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream")
            if streams:
                await send(start)
                begun = True
            async for each in events:
                data += each.data
                if streams:
                    whole, end, data = data.rpartition(_EVENT_END)
                    await send({"type": "http.response.body", "body": whole + end, "more_body": True})
        except (OSError, h11.RemoteProtocolError):
            LOG.warning("a replica ended before its answer")
            if not begun:
                raise replica_ended() from None
            data = b"data: " + error_bytes(replica_ended()) + _EVENT_END + b"data: [DONE]" + _EVENT_END
        if not begun:
            await send(start)
        await send({"type": "http.response.body", "body": data})


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that are for the client."""
    return [(name, value) for name, value in headers if name not in _OWN_HEADERS]
