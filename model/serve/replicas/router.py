"""Router of several replicas: it sends each request to one of them and passes the answer on piece by piece.

A backend reaches the replicas: over sockets of this machine's processes (`sockets.py`), or through Ray Serve
(`model/serve/cluster/`).

Keys, hosts, sizes and slow clients are checked before the router (`admission.py`, `server.py`), arguments and queues
in the replica: each once, and as with one server. `/health`, `/ready` and `/metrics` are answered for all replicas
together.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from prometheus_client import Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from model.serve.errors import ApiError, replica_ended_error, server_stopping_error
from model.serve.http.admission import KEY_SALT, encode_error, make_error_response
from model.serve.http.app import TEXT_ROUTERS
from model.serve.log import LOG
from model.serve.metrics import CONTENT_TYPE, Families
from model.serve.openai.generation import ClientGone, run_while_connected
from model.serve.replicas.backend import Answer, Backend, Call, Head, ReplicaLost
from model.serve.replicas.routing import GENERATING, RoutedRequest, Routing

_EVENT_END = b"\n\n"


class Router:
    """ASGI application that sends each request to a replica and passes on the answer.

    Args:
        backend: Reaches the replicas.
        routing: Chooses the replica of a request.
    """

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
        self._handlers: dict[str, Callable[[], Coroutine[Any, Any, Response]]] = {
            "/health": self._answer_health,
            "/ready": self._answer_ready,
            "/metrics": self._answer_metrics,
        }
        """Handlers of the paths that the router answers for all replicas, by path."""

    def drain(self) -> None:
        """Refuse further requests that the engine would compute (503), and make the replicas cancel waiting ones.

        A waiting request is one of which the engine has not computed anything, because its grammar or prompt is being
        made.
        """
        self._draining = True
        self._backend.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body arrives in one message.

        Refusals are answered in OpenAI's format. A client that disconnects cancels its request.
        """
        scope["route"] = next(
            (
                route
                for router in TEXT_ROUTERS
                for route in router.routes
                if route.matches(scope)[0] is Match.FULL
            ),
            None,
        )
        handler = self._handlers.get(scope["path"]) if scope["method"] == "GET" else None
        response: Response | None = None
        try:
            body = (await receive()).get("body", b"")
            if handler is not None:
                response = await handler()
            else:
                await run_while_connected(receive, self._forward(scope, body, send))
        except ClientGone:
            response = Response(status_code=499)
        except ApiError as error:
            response = make_error_response(error)
        if response is not None:
            await response(scope, receive, send)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send the request to the replica that the routing chooses, and its answer to the client.

        Raises:
            ApiError: The router is draining, no replica answers, or the replica ended before its answer.
            ClientGone: The client disconnected.
        """
        content_type = [header for header in scope["headers"] if header[0] == b"content-type"]
        key_salt = scope.get("state", {}).get(KEY_SALT, "")
        call = Call(
            *(scope["path"], scope["method"], scope["raw_path"], scope["query_string"]),
            *(content_type, key_salt, body),
        )
        request = RoutedRequest.from_body(call.path, body, self._routing.max_blocks, key_salt)
        if self._draining and call.path in GENERATING:
            raise server_stopping_error()
        up = self._backend.up
        if not up:
            raise replica_ended_error()
        choice = self._routing.choose(request, up)
        if request.continuations:
            self._routed.labels(choice.replica, "prefix" if choice.by_prefix else "load").inc()
        try:
            await _send_answer(self._backend.exchange(choice.replica, call), send)
        finally:
            self._routing.end(choice, request)

    async def _answer_health(self) -> Response:
        """Return status 200 if the engine of at least one replica computes steps.

        Raises:
            ApiError: No replica does; a replica that has ended is being started again (503).
        """
        if not any(answer.status == 200 for _, answer in await self._backend.ask("/health")):
            raise replica_ended_error()
        return JSONResponse({"status": "ok"})

    async def _answer_ready(self) -> Response:
        """Return status 200 if the router takes requests and at least one replica computes steps.

        Raises:
            ApiError: The router is draining, or no replica computes steps (503).
        """
        if self._draining:
            raise server_stopping_error()
        await self._answer_health()
        return JSONResponse({"status": "ready"})

    async def _answer_metrics(self) -> Response:
        """Return the metrics of all replicas, with the label `replica`, and those of the router and the backend."""
        families = _label_metrics(await self._backend.ask("/metrics"))
        metrics = Families([*families, *self._routed.collect(), *self._backend.collect()])
        return Response(generate_latest(metrics), headers={"content-type": CONTENT_TYPE})


def _label_metrics(metrics: Sequence[tuple[Hashable, Answer]]) -> Iterable[Metric]:
    """Return the metric families of all replicas as one list; each sample gets the label `replica`.

    The label `engine` of vLLM's series is set to the replica too.

    Args:
        metrics: The key of every replica, and its answer to `/metrics`.
    """
    families: dict[str, Metric] = {}
    for key, answer in metrics:
        for metric in text_string_to_metric_families(answer.body.decode()):
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                names = ("replica", "engine") if "engine" in sample.labels else ("replica",)
                labels = sample.labels | dict.fromkeys(names, str(key))
                family.add_sample(sample.name, labels, sample.value)
    return families.values()


async def _send_answer(pieces: AsyncGenerator[Head | bytes, None], send: Send) -> None:
    """Send a replica's answer to the client: a stream event by event, and an answer without events as a whole.

    A stream whose replica ends early gets an error event and then [DONE].

    Args:
        pieces: The head of the answer and the pieces of its body.
        send: ASGI's channel to the client.

    Raises:
        ApiError: The replica ended before an answer that is not streamed, or before the head of its answer.
    """
    has_begun = False
    unsent = b""
    async with aclosing(pieces):
        try:
            head = await anext(pieces)
            assert isinstance(head, Head)
            start = {"type": "http.response.start", "status": head.status, "headers": list(head.headers)}
            is_stream = dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream")
            if is_stream:
                await send(start)
                has_begun = True
            async for piece in pieces:
                assert isinstance(piece, bytes)
                unsent += piece
                if is_stream:
                    events, end, unsent = unsent.rpartition(_EVENT_END)
                    await send({"type": "http.response.body", "body": events + end, "more_body": True})
        except ReplicaLost:
            LOG.warning("a replica ended before its answer")
            if not has_begun:
                raise replica_ended_error() from None
            unsent = (
                b"data: " + encode_error(replica_ended_error()) + _EVENT_END + b"data: [DONE]" + _EVENT_END
            )
        if not has_begun:
            await send(start)
        await send({"type": "http.response.body", "body": unsent})
