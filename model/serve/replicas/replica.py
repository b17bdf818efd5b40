"""A process that computes for the router of `nkw serve --replicas N`: its start, its end, and what it answers."""

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
from model.serve.serving import answering, engine_args
from nkw.errors import NkwError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

KEY_SALT_HEADER = b"x-nkw-key-salt"
"""Header from the router to a replica. A client cannot send it: the router copies no header of this name."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before a replica is started again; each time twice as many
_LONG_LIVED = 60.0  # seconds after which an end is not taken for one more of the same
_END_SECONDS = 10
_DRAIN = b"drain"
"""The message of a router that takes no further requests."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Replica:
    """A process that computes, as the router sees it. `up` says whether it answers at `path`."""

    def __init__(self, options: argparse.Namespace, number: int, folder: Path) -> None:
        self.number = number
        self.path = str(folder / f"{number}.sock")
        self.up = False
        self.restarts = 0
        self.positions = 0  # of its cache
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    async def start(self) -> None:
        """Start the process and wait until it answers; ModelError where it cannot."""
        try:
            self._process, self._pipe = self._begun()
        except OSError as error:
            raise ModelError(f"replica {self.number} cannot start: {error.strerror}") from None
        try:
            said = json.loads(await _received(self._pipe))
        except (EOFError, OSError):
            await self.stop()
            raise ModelError(
                f"replica {self.number} ended with status {self._process.returncode} before it could answer"
            ) from None
        if "error" in said:
            raise ModelError(*said["error"])
        self.positions, self.up = said["positions"], True
        LOG.info("replica %d answers, as process %d", self.number, self._process.pid)

    async def ended(self) -> int | None:
        """Wait for the end of the process, and return its exit status."""
        assert self._pipe is not None and self._process is not None
        with suppress(EOFError, OSError):
            await _received(self._pipe)
        await self.stop()
        return self._process.returncode

    async def keep(self, forget: Callable[[], None]) -> None:
        """Start the process again whenever it ends, after pauses that grow; `forget` is called at each end."""
        pause = _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            LOG.error("replica %d ended with status %s", self.number, await self.ended())
            forget()
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
        """Let the process take no further requests and cancel grammars; nothing where no process answers."""
        if self.up and self._pipe is not None:
            with suppress(OSError):  # the process has just ended
                self._pipe.send_bytes(_DRAIN)

    async def stop(self) -> None:
        """End the process after its step; at once where it still starts, or where that takes too long."""
        if self._pipe is None or self._process is None:
            return
        self._pipe.close()
        if self.up:
            self.up = False
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _END_SECONDS)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _begun(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """The process, which has just been started, and the pipe to it."""
        with _signals_blocked(), _threads_shared(self._options.replicas):
            return start_child(_compute, self._options, self.number, self.path)


def _compute(pipe: Connection, options: argparse.Namespace, number: int, path: str) -> None:
    """The process of a replica."""
    log_to_stderr(options.log_level, f"replica {number}: ")
    try:
        engine = make_engine(engine_args(options))
        asyncio.run(_answer(options, engine, path, pipe))
    except NkwError as error:
        refusal = [error.message, error.code]
    except MemoryError:
        refusal = [f"replica {number} needs more memory than this machine has", "NKW-MODEL-MEMORY"]
    with suppress(OSError):  # the router has gone
        pipe.send_bytes(json.dumps({"error": refusal}).encode())


async def _answer(options: argparse.Namespace, engine: Engine, path: str, pipe: Connection) -> None:
    """Answer at a socket until the router has gone or the engine has failed; the router then starts a new process."""
    import uvicorn

    from model.serve.http.server import make_config

    async with answering(options, engine) as (app, service):
        with socket.socket(socket.AF_UNIX) as listening:
            try:
                listening.bind(path)
            except FileNotFoundError:  # the router has gone, and another replica has removed the folder
                os._exit(0)
            listening.listen()
            server = uvicorn.Server(make_config(_with_key_salt(app), http="h11", date_header=False))
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            cache = engine.scheduler.cache
            with suppress(OSError):  # the router has gone, which the next line notices
                pipe.send_bytes(json.dumps({"positions": cache.positions}).encode())
            gone = asyncio.ensure_future(_follow_router(pipe, service.drain))
            failed = asyncio.ensure_future(service.engine.wait_until_failed())
            await asyncio.wait({serving, gone, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():  # clients get their errors first
                server.should_exit = True
                await asyncio.wait({serving}, timeout=_END_SECONDS)
            if not server.started:
                serving.cancel()  # before its socket is closed
    if gone.done():
        shutil.rmtree(Path(path).parent, ignore_errors=True)  # a router that was killed could not
    os._exit(not gone.done())  # nobody is left to be answered


async def _follow_router(pipe: Connection, drain: Callable[[], None]) -> None:
    """Call `drain` when the router says that it drains; return when the router has gone."""
    with suppress(EOFError, OSError):
        while True:
            message = await _received(pipe)
            assert message == _DRAIN
            drain()


def _with_key_salt(app: ASGIApp) -> ASGIApp:
    """Return an application that stores the salt sent by the router where `Admission` stores it in a single server."""
    from model.serve.http.gate import KEY_SALT

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        salt = dict(scope["headers"]).get(KEY_SALT_HEADER, b"").decode("ascii")
        scope.setdefault("state", {})[KEY_SALT] = salt
        await app(scope, receive, send)

    return answer


async def _received(pipe: Connection) -> bytes:
    """The next message; EOFError or OSError where the other side has gone."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def comes() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(pipe.fileno(), comes)
    try:
        await readable
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv_bytes()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A block in which a process is started that never sees the signals which end the router."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _threads_shared(replicas: int) -> Iterator[None]:
    """A block in which a process is started that has its part of the cores for products, unless the user says how many.

    Replicas whose threads together outnumber the cores wait for each other inside of products.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    added = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, str(max(1, cores // replicas))))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
