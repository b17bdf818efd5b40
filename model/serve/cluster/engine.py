"""An engine on a machine of the cluster, with the routes that the server has; Ray Serve starts and checks it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model.device import use_overlay
from model.errors import ModelError
from model.llm.llm import make_engine
from model.serve.cluster.folder import folder_digest
from model.serve.http.gate import KEY_SALT
from model.serve.log import log_to_stderr
from model.serve.replicas.backend import Answer, Call, Head
from model.serve.serving import answering, engine_args

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Deployed:
    """What a server has to know of an engine that may be another server's: its options and its cache."""

    fingerprint: str
    positions: int


class ClusterEngine:
    """The deployment of `nkw serve --cluster`: one engine and its routes."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: argparse.Namespace, digest: str, deployed_as: str
    ) -> None:
        """Load the model.

        Args:
            options: Of `nkw serve`.
            digest: Of the model's folder on the server's machine.
            deployed_as: The fingerprint that `describe` returns.

        Raises: ModelError if the folder of this machine is another one, or if the engine cannot be made.
        """
        from ray import serve

        log_to_stderr(options.log_level)
        if options.hardware is not None:
            use_overlay(options.hardware)
        if folder_digest(options.model) != digest:
            raise ModelError(f"{options.model} is another model on this node than on the server's machine")
        self._key: str = serve.get_replica_context().replica_id.unique_id
        engine = make_engine(engine_args(options))
        self._deployed = Deployed(deployed_as, engine.scheduler.cache.positions)
        self._open = AsyncExitStack()
        self._app, _ = await self._open.enter_async_context(answering(options, engine))

    async def answer(self, key: str, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of the answer and then its data. The key has served its purpose in Ray's router."""
        async for piece in answer_pieces(self._app, call):
            yield piece

    async def ask(self, path: str) -> tuple[str, Answer]:
        """Return this replica's key and its whole answer to GET of a path."""
        head, *data = [piece async for piece in answer_pieces(self._app, Call(path, raw_path=path.encode()))]
        return self._key, Answer(head.status, b"".join(data))  # type: ignore[union-attr, arg-type]

    def describe(self) -> Deployed:
        """Return what this replica was deployed as."""
        return self._deployed

    async def check_health(self) -> None:
        """Raise ModelError where the engine has failed; Ray Serve then starts another replica."""
        _, answer = await self.ask("/health")
        if answer.status != 200:
            raise ModelError("the engine has stopped")

    async def __del__(self) -> None:
        """End the engine; Ray Serve awaits this when the replica has drained."""
        await self._open.aclose()


async def answer_pieces(app: ASGIApp, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """Yield what an application answers, its head first; closing the generator cancels the application."""
    pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
    messages: asyncio.Queue[Message] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": call.body, "more_body": False})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            pieces.put_nowait(Head(message["status"], list(message["headers"])))
        elif message["body"]:
            pieces.put_nowait(message["body"])

    task = asyncio.ensure_future(_run(app, call, messages.get, send))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _run(app: ASGIApp, call: Call, receive: Callable[[], Any], send: Callable[..., Any]) -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.raw_path,
        "root_path": "",
        "query_string": call.query,
        "headers": [*call.headers, (b"content-length", str(len(call.body)).encode())],
        "client": None,
        "server": None,
        "state": {KEY_SALT: call.key_salt},
    }
    await app(scope, receive, send)
