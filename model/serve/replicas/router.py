"""In front of several replicas: each request goes to one of them, and the answer passes through as it comes.

A backend reaches the replicas: over sockets of this machine's processes (`sockets.py`), or through Ray Serve
(`model/serve/cluster/`).

Keys, hosts, sizes and slow clients are checked before this (`gate.py`, `server.py`), arguments and queues behind it:
each once, and as with one server. `/health`, `/ready` and `/metrics` speak for all replicas.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from prometheus_client import Counter, generate_latest
from prometheus_client.core import Metric
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
from model.serve.openai.generation import ClientGone, run_while_connected
from model.serve.replicas.backend import Answer, Backend, Call, Head, ReplicaLost
from model.serve.replicas.routing import GENERATING, Asked, Routing

_EVENT_END = b"\n\n"


class Router:
    """The ASGI application of some replicas."""

    def __init__(self, backend: Backend, routing: Routing) -> None:
        self._backend = backend
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
        self._backend.drain()

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
                await run_while_connected(receive, self._forward(scope, body, send))
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
        up = self._backend.up
        if not up:
            raise replica_ended()
        choice = self._routing.choose(asked, up)
        if asked.wanted:
            self._routed.labels(choice.replica, "prefix" if choice.by_prefix else "load").inc()
        try:
            await _pass_on(self._backend.exchange(choice.replica, _call(scope, body)), send)
        finally:
            self._routing.ended(choice, asked)

    async def _health(self) -> Response:
        """Whether any replica computes steps; one that has ended starts anew."""
        if not any(answer.status == 200 for _, answer in await self._backend.ask("/health")):
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
        found = await self._backend.ask("/metrics")
        families = _Families([*_labelled(found), *self._routed.collect(), *self._backend.collect()])
        return Response(generate_latest(families), headers={"content-type": CONTENT_TYPE})


class _Families(Collector):
    """Numbers that were collected."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """The numbers."""
        return self._families


def _labelled(found: Sequence[tuple[Hashable, Answer]]) -> Iterable[Metric]:
    """The numbers of some replicas, by name, with the label `replica`."""
    families: dict[str, Metric] = {}
    for key, answer in found:
        for each in text_string_to_metric_families(answer.body.decode()):
            family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
            for sample in each.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": str(key)}, sample.value)
    return families.values()


def _call(scope: Scope, body: bytes) -> Call:
    """Return the request for the replica."""
    kept = [(name, text) for name, text in scope["headers"] if name == b"content-type"]
    key_salt = scope.get("state", {}).get(KEY_SALT, "")
    path, raw_path = scope["path"], scope["raw_path"]
    return Call(path, scope["method"], raw_path, scope["query_string"], kept, key_salt, body)


async def _pass_on(pieces: AsyncGenerator[Head | bytes, None], send: Send) -> None:
    """Send an answer: a stream event by event, any other one whole.

    A replica that ends before its answer is a refusal, and in a stream an event, the last one but [DONE].
    """
    begun = False
    data = b""
    async with aclosing(pieces):
        try:
            head = await anext(pieces)
            assert isinstance(head, Head)
            start = {"type": "http.response.start", "status": head.status, "headers": list(head.headers)}
            streams = dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream")
            if streams:
                await send(start)
                begun = True
            async for piece in pieces:
                assert isinstance(piece, bytes)
                data += piece
                if streams:
                    whole, end, data = data.rpartition(_EVENT_END)
                    await send({"type": "http.response.body", "body": whole + end, "more_body": True})
        except ReplicaLost:
            LOG.warning("a replica ended before its answer")
            if not begun:
                raise replica_ended() from None
            data = b"data: " + error_bytes(replica_ended()) + _EVENT_END + b"data: [DONE]" + _EVENT_END
        if not begun:
            await send(start)
        await send({"type": "http.response.body", "body": data})
