"""Process of one engine behind the router of `nkw serve --replicas N`: its start, its end and its answers.

The router's process has a `Replica` for each; `_compute` is the process itself. A Unix socket carries requests. A pipe
carries the report of the start and the message that the router drains, and its end tells of the end of a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from model.engine import Engine
from model.errors import ModelError
from model.llm.llm import make_engine
from model.serve.child import start_child
from model.serve.log import LOG, log_to_stderr
from model.serve.serving import engine_args, run_application
from nkw.errors import NkwError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

KEY_SALT_HEADER = b"x-nkw-key-salt"
"""Header from the router to a replica. A client cannot send it: the router copies no header of this name."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before a replica is started again; each pause doubles
_LONG_LIVED = 60.0  # seconds of life after which the pauses begin anew
_MAX_STOP_SECONDS = 10
_DRAIN = b"drain"
"""Message of a router that takes no further requests."""
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Replica:
    """Process of a replica, as the router sees it; the process answers at the Unix socket `path` while `up` is True.

    `restarts` counts its starts after an end, and `positions` are the token positions of its cache.

    Args:
        options: The parsed options of `nkw serve`.
        number: Number of the replica, from 0.
        folder: Folder of the sockets.
    """

    def __init__(self, options: argparse.Namespace, number: int, folder: Path) -> None:
        self.number = number
        self.path = folder / f"{number}.sock"
        self.up = False
        self.restarts = 0
        self.positions = 0
        self._options = options
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None

    async def start(self) -> None:
        """Start the process, wait until it answers, and set `up` and `positions`.

        Raises:
            ModelError: The process cannot start, ended before it could answer, or refuses the model or an option.
        """
        environment = _share_threads(self._options.replicas)
        try:
            with _block_signals():
                self._child = start_child(
                    _compute, self._options, self.number, str(self.path), environment=environment
                )
        except OSError as error:
            raise ModelError(f"replica {self.number} cannot start: {error.strerror}") from None
        process, pipe = self._child
        try:
            report = json.loads(await _receive(pipe))
        except (EOFError, OSError):
            await self.stop()
            raise ModelError(
                f"replica {self.number} ended with status {process.returncode} before it could answer"
            ) from None
        if "error" in report:
            raise ModelError(*report["error"])
        self.positions, self.up = report["positions"], True
        LOG.info("replica %d answers, as process %d", self.number, process.pid)

    async def wait_until_ended(self) -> int | None:
        """Wait for the end of the process, clean up after it, and return its exit status."""
        assert self._child is not None
        process, pipe = self._child
        with suppress(EOFError, OSError):
            await _receive(pipe)
        await self.stop()
        return process.returncode

    async def supervise(self, on_end: Callable[[], None]) -> None:
        """Start the process again whenever it ends; never return.

        The pause before a start is 0.5 s and doubles up to 60 s; it begins anew after a process that lived for 60 s.

        Args:
            on_end: Called at each end of the process.
        """
        pause = _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            LOG.error("replica %d ended with status %s", self.number, await self.wait_until_ended())
            on_end()
            if time.monotonic() - begun > _LONG_LIVED:
                pause = _FIRST_PAUSE
            while not self.up:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                try:
                    await self.start()
                except ModelError as error:
                    LOG.error("replica %d does not start: %s", self.number, error)
            self.restarts += 1

    def drain(self) -> None:
        """Make the process take no further requests and cancel those that have not started.

        Do nothing if the process is down.
        """
        if self.up and self._child is not None:
            with suppress(OSError):  # the process has just ended
                self._child[1].send_bytes(_DRAIN)

    async def stop(self) -> None:
        """End the process and remove its socket; do nothing if it was never started.

        A process that answers has 10 s to finish its step, and is killed then. Another one is killed at once.
        """
        if self._child is None:
            return
        process, pipe = self._child
        pipe.close()
        if self.up:
            self.up = False
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _MAX_STOP_SECONDS)
        process.kill()
        await asyncio.to_thread(process.wait)
        self.path.unlink(missing_ok=True)


def _compute(pipe: Connection, options: argparse.Namespace, number: int, path: str) -> None:
    """Serve HTTP at the Unix socket `path` until the router ends: the main function of a replica's process.

    If the engine cannot be made, the reason is sent over `pipe` and the function returns.
    """
    log_to_stderr(options.log_level, f"replica {number}: ")
    try:
        engine = make_engine(engine_args(options))
        asyncio.run(_answer(options, engine, path, pipe))
    except NkwError as error:
        refusal = [error.message, error.code]
    except MemoryError:
        refusal = [f"replica {number} needs more memory than this machine has", "NKW-MODEL-MEMORY"]
    with suppress(OSError):  # the router has ended
        pipe.send_bytes(json.dumps({"error": refusal}).encode())


async def _answer(options: argparse.Namespace, engine: Engine, path: str, pipe: Connection) -> None:
    """Answer at the socket until the router has ended or the engine has failed, and then end this process.

    The exit status is 0 if the router has ended, and otherwise 1. Sends the cache's positions over `pipe` when it
    answers.
    """
    import uvicorn

    from model.serve.http.server import make_config

    async with run_application(options, engine) as (app, service):
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(path)
            except FileNotFoundError:  # the router has ended, and another replica has removed the folder
                os._exit(0)
            listening.listen()
            server = uvicorn.Server(make_config(_with_key_salt(app), http="h11", date_header=False))
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            with suppress(OSError):  # the router has ended, which the next line notices
                pipe.send_bytes(json.dumps({"positions": engine.scheduler.cache.positions}).encode())
            router_ended = asyncio.ensure_future(_follow_router(pipe, service.drain))
            failed = asyncio.ensure_future(service.engine.wait_until_failed())
            await asyncio.wait({serving, router_ended, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():  # clients get their errors first
                server.should_exit = True
                await asyncio.wait({serving}, timeout=_MAX_STOP_SECONDS)
            if not server.started:
                serving.cancel()  # before its socket is closed
    if router_ended.done():
        shutil.rmtree(Path(path).parent, ignore_errors=True)  # a router that was killed could not
    os._exit(not router_ended.done())  # no client is left


async def _follow_router(pipe: Connection, drain: Callable[[], None]) -> None:
    """Call `drain` whenever the router sends that it drains; return when the router has ended."""
    with suppress(EOFError, OSError):
        while True:
            message = await _receive(pipe)
            assert message == _DRAIN
            drain()


def _with_key_salt(app: ASGIApp) -> ASGIApp:
    """Return an application that copies the salt in the router's header to the scope's state, and then calls `app`.

    `Admission` stores the salt at the same place in a server without a router.
    """
    from model.serve.http.admission import KEY_SALT

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        salt = dict(scope["headers"]).get(KEY_SALT_HEADER, b"").decode("ascii")
        scope.setdefault("state", {})[KEY_SALT] = salt
        await app(scope, receive, send)

    return answer


async def _receive(pipe: Connection) -> bytes:
    """Return the next message of the pipe, without blocking the event loop.

    Raises:
        EOFError: The other process has closed the pipe.
        OSError: The pipe is broken.
    """
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv_bytes()


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread; a process started in the block never receives them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _share_threads(replicas: int) -> dict[str, str]:
    """Return the environment variables of a replica, which give numpy an equal share of the cores.

    A number of threads that the user has set stays. Replicas whose threads together outnumber the cores wait for each
    other inside of matrix products.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {**dict.fromkeys(_THREAD_COUNTS, str(max(1, cores // replicas))), **os.environ}
