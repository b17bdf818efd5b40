"""Engine of `nkw serve --cluster` on a machine of the cluster, with the routes of a server.

Ray Serve starts it, checks its health and ends it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.device import use_overlay
from model.errors import ModelError
from model.llm.llm import make_engine
from model.serve.cluster.folder import hash_folder
from model.serve.http.admission import KEY_SALT
from model.serve.log import log_to_stderr
from model.serve.replicas.backend import Answer, Call, Head, collect_answer
from model.serve.serving import engine_args, run_application

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class EngineDescription:
    """Facts by which a server checks that an engine was started with the server's own model and options.

    `fingerprint` is a digest of the model and the options; `positions` is the number of token positions of the cache.
    """

    fingerprint: str
    positions: int


class ClusterEngine:
    """Ray Serve deployment of `nkw serve --cluster`: one engine and its routes in each replica."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: argparse.Namespace, digest: str, fingerprint: str
    ) -> None:
        """Load the model and start the engine.

        Args:
            options: The options of `nkw serve`.
            digest: The digest of the model's folder on the server's machine; None if there is no such folder.
            fingerprint: The fingerprint that `describe` returns.

        Raises:
            ModelError: The folder differs on this machine, or the engine cannot be made.
        """
        from ray import serve

        log_to_stderr(options.log_level)
        if options.hardware is not None:
            use_overlay(options.hardware)
        if hash_folder(options.model) != digest:
            raise ModelError(
                f"{options.model} is another model on this node than on the server's machine: copy the folder of that "
                "machine to the same path on every node"
            )
        self._key: str = serve.get_replica_context().replica_id.unique_id
        engine = make_engine(engine_args(options))
        self._description = EngineDescription(fingerprint, engine.scheduler.cache.positions)
        self._open = AsyncExitStack()
        self._app, _ = await self._open.enter_async_context(run_application(options, engine))

    async def answer(self, key: str, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Answer a request; yield the head of the answer and then pieces of the body.

        Args:
            key: Key of this replica. Ray's router reads it; here it has no effect.
            call: The request.
        """
        async for piece in answer_pieces(self._app, call):
            yield piece

    async def ask(self, path: str) -> tuple[str, Answer]:
        """Return (this replica's key, its whole answer to GET `path`)."""
        call = Call(path, raw_path=path.encode())
        return self._key, await collect_answer(answer_pieces(self._app, call))

    def describe(self) -> EngineDescription:
        """Return the fingerprint of this engine's options and the size of its cache."""
        return self._description

    async def check_health(self) -> None:
        """Check that the engine computes steps; Ray Serve calls this and starts another replica after an exception.

        Raises:
            ModelError: The engine has failed.
        """
        _, answer = await self.ask("/health")
        if answer.status != 200:
            raise ModelError("the engine has stopped")

    async def __del__(self) -> None:
        """End the engine; Ray Serve awaits this call after the replica has drained."""
        await self._open.aclose()


async def answer_pieces(app: ASGIApp, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """Send a request to an ASGI application; yield the head of the answer and then pieces of the body.

    Closing the generator cancels the application. An exception of the application is raised after its last piece.
    """
    pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
    messages: asyncio.Queue[Message] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": call.body, "more_body": False})
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

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            pieces.put_nowait(Head(message["status"], list(message["headers"])))
        elif message["body"]:
            pieces.put_nowait(message["body"])

    task = asyncio.ensure_future(app(scope, messages.get, send))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task
    finally:
        task.cancel()
        await asyncio.wait({task})
