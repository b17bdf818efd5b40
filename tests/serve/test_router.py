"""A router and its replicas in one process: how the router drains, and what it says of an engine that fails."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="openai is an extra of development (dev)")

from model.engine import Engine
from model.loading import tokenizer
from model.serve.replicas import replica
from model.serve.replicas.replicas import serve_replicas
from tests.serve.conftest import MODEL, Reached, options_of
from tests.serve.scripted import write_scripted
from tests.serve.test_ends import wait_until
from tests.serve.test_failed_requests import break_steps

pytestmark = pytest.mark.slow


class ReplicaEnded(BaseException):
    """Stands for the end of a replica's process in the thread that runs its code."""


class ThreadAsProcess:
    """A thread with the methods of a process that the router uses; it ends when its pipe is closed."""

    pid = 0

    def __init__(self, run: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self._run = run
        self._thread = threading.Thread(target=self._end_with_status, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout)

    def kill(self) -> None:
        """Do nothing: the pipe of the replica is closed, which ends its code."""

    def _end_with_status(self) -> None:
        try:
            self._run()
        except ReplicaEnded as ended:
            self.returncode = ended.args[0]


@dataclass
class Routed(Reached):
    """A router in a thread, its server, and the engines and services of all replicas in the order of their starts."""

    server: Any = None
    engines: list[Engine] = field(default_factory=list)
    services: list[Any] = field(default_factory=list)
    may_restart: threading.Event = field(default_factory=threading.Event)

    def ask(self, method: str, path: str, **body: Any) -> tuple[int, Any]:
        """Send a request and return the status and the JSON of its answer."""
        response, answer = self.send(method, path, json.dumps(body).encode() if body else None)
        return response.status, json.loads(answer)

    def complete(self, **more: Any) -> tuple[int, Any]:
        """Ask for a short completion."""
        body = {"model": MODEL, "prompt": " Tom", "max_tokens": 2} | more
        return self.ask("POST", "/v1/completions", **body)

    def code_of(self, method: str, path: str, **body: Any) -> tuple[int, str]:
        """Send a request that is refused and return its status and its code."""
        status, answer = self.ask(method, path, **body)
        return status, answer["error"]["code"]


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function of command-line options whose result, a context manager, runs a router and its replicas."""
    routed = Routed(0, [])
    folder = write_scripted(tmp_path / MODEL, {" Tom": [" had", " a", " ball"]})
    make_engine, run_application = replica.make_engine, replica.run_application

    def started(
        target: Callable[..., None], *arguments: Any, environment: Any
    ) -> tuple[ThreadAsProcess, Connection]:
        near, far = multiprocessing.Pipe()
        is_restart = len(routed.engines) >= arguments[0].replicas

        def run() -> None:
            if is_restart:
                routed.may_restart.wait()
            with far:
                target(far, *arguments)

        return ThreadAsProcess(run), near

    def engine_made(*arguments: Any) -> Engine:
        routed.engines.append(make_engine(*arguments))
        return routed.engines[-1]

    @contextmanager
    def serving(*words: str) -> Iterator[Routed]:
        bound = threading.Event()

        def listening(port: int) -> None:
            routed.port = port
            bound.set()

        errors: list[Exception] = []

        def run() -> None:
            server_made = lambda server: setattr(routed, "server", server)  # noqa: E731
            try:
                asyncio.run(
                    serve_replicas(options_of("--model", str(folder), *words), [], listening, server_made)
                )
            except Exception as error:
                errors.append(error)
                bound.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert bound.wait(60) and not errors, errors
        try:
            yield routed
        finally:
            routed.may_restart.set()
            routed.server.should_exit = True
            thread.join()

    class Answering:
        """The block of `run_application` that also keeps its service."""

        def __init__(self, *arguments: Any) -> None:
            self._block = run_application(*arguments)

        async def __aenter__(self) -> Any:
            app, service = await self._block.__aenter__()
            routed.services.append(service)
            return app, service

        async def __aexit__(self, *raised: Any) -> Any:
            return await self._block.__aexit__(*raised)

    def exits(status: int) -> None:
        raise ReplicaEnded(status)

    monkeypatch.setattr(replica, "start_child", started)
    monkeypatch.setattr(replica, "make_engine", engine_made)
    monkeypatch.setattr(replica, "run_application", Answering)
    monkeypatch.setattr(replica.os, "_exit", exits)
    monkeypatch.setattr(replica, "log_to_stderr", lambda *_: None)
    monkeypatch.setattr(replica, "_FIRST_PAUSE", 0.0)
    # Replicas are threads here, and an isolated call would fork a process of many threads.
    monkeypatch.setattr(tokenizer, "survives", lambda *_: True)
    return serving


def test_a_router_that_drains_cancels_grammars_of_its_replicas(routing: Callable[..., Any]) -> None:
    pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")
    from tests.serve.test_grammar_limits import exploding

    answers: list[Any] = []
    with routing("--grammar-cpu-seconds", "20") as routed:
        schema = {"json": exploding(24)}
        thread = threading.Thread(target=lambda: answers.append(routed.complete(structured_outputs=schema)))
        thread.start()
        wait_until(lambda: routed.services[0].texts._pool.running == 1)
    thread.join()
    assert [(status, answer["error"]["code"]) for status, answer in answers] == [(503, "stopping")]
    assert routed.services[0].draining


def test_an_engine_that_fails_behind_a_router_is_reported_until_its_replica_is_back(
    routing: Callable[..., Any],
) -> None:
    with routing() as routed:
        assert routed.complete()[0] == 200
        assert routed.ask("GET", "/health") == (200, {"status": "ok"})
        break_steps(routed.engines[0], lambda batch: True)
        status, answer = routed.complete()
        assert (status, answer["error"]["code"]) == (500, "engine_failed")
        assert "secret" not in json.dumps(answer)
        for path in ("/health", "/ready"):
            assert routed.code_of("GET", path) == (503, "replica_ended")
        body = {"model": MODEL, "prompt": " Tom", "max_tokens": 2}
        status, code = routed.code_of("POST", "/v1/completions", **body)
        assert status == 503 and code in ("engine_stopped", "replica_ended")
        routed.may_restart.set()
        wait_until(lambda: routed.ask("GET", "/health")[0] == 200)
        assert routed.complete()[0] == 200
        assert len(routed.engines) == 2
        assert b'nkw_replica_restarts_total{replica="0"} 1.0' in routed.send("GET", "/metrics")[1]


def test_a_replica_whose_engine_works_answers_for_one_whose_engine_failed(
    routing: Callable[..., Any],
) -> None:
    with routing("--replicas", "2") as routed:
        break_steps(routed.engines[0], lambda batch: True)
        wait_until(lambda: any(routed.complete()[0] == 500 for _ in range(2)))
        assert routed.ask("GET", "/health") == (200, {"status": "ok"})
        assert routed.ask("GET", "/ready") == (200, {"status": "ready"})
        wait_until(lambda: routed.complete()[0] == 200)
        assert len(routed.engines) == 2
