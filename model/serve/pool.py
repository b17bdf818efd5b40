"""A pool of job processes for coroutines: a bounded queue, cancellation, and short jobs ahead of long ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from model.workers.frames import FrameReader, pack
from model.workers.launch import JobLimits, TaskSource, job_header, read_answer, start_process

QUANTUM_SECONDS = 0.25
"""CPU time after which a job counts as long: it starts again behind short ones."""
_PIECE_BYTES = 2**18


class PoolFull(Exception):
    """As many jobs wait as may."""


class JobCancelled(Exception):
    """The job was cancelled by `WorkerPool.cancel`."""


class WorkerEnded(Exception):
    """The worker process has ended during a job; another one is started."""


@dataclass(eq=False)
class _Job:
    """A job that waits or runs."""

    task: str
    body: bytes
    limits: JobLimits
    is_long: bool
    answer: asyncio.Future[tuple[str, bytes]]
    number: int = 0


class WorkerPool:
    """At most `processes` jobs at once, each in a process forked by one worker process; others wait.

    At most `waiting` jobs wait. A long job never takes the last free process. Cancelling a call of `run` kills its job.
    Everything runs on one event loop.
    """

    def __init__(self, source: TaskSource, processes: int = 2, waiting: int = 64) -> None:
        assert processes > 1, "a long job would stop all others"
        self.facts: dict[str, Any] | None = None
        """What the worker process says of its tasks, once it has started."""
        self._source = source
        self._processes = processes
        self._most_waiting = waiting
        self._short: deque[_Job] = deque()
        self._long: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}
        self._numbers = 0
        self._connection: _Connection | None = None
        self._ready: asyncio.Future[None] | None = None
        self._is_stopped = False

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a process."""
        return len(self._short) + len(self._long)

    @property
    def running(self) -> int:
        """Number of jobs that have a process, cancelled ones that have not ended yet included."""
        return len(self._running)

    def start(self) -> None:
        """Start the worker process, unless it runs. Raises WorkerEnded after `stop`."""
        if self._is_stopped:
            raise WorkerEnded
        if self._connection is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._connection = _Connection(self._source, loop, self._received, self._lost)

    async def known_facts(self) -> dict[str, Any]:
        """Return what the worker process says of its tasks. Raises WorkerEnded where it ends before that."""
        while self.facts is None:
            self.start()
            assert self._ready is not None
            await asyncio.shield(self._ready)
        return self.facts

    async def run(self, task: str, *arguments: Any, limits: JobLimits, is_long: bool = False) -> Any:
        """Return the answer to a job.

        Raises PoolFull where no process is free and the queue is full, ModelError for a refused input and an exceeded
        limit, JobCancelled and WorkerEnded.
        """
        self.start()
        job = _Job(
            task,
            json.dumps(arguments).encode(),
            limits,
            is_long,
            asyncio.get_running_loop().create_future(),
        )
        (self._long if is_long else self._short).append(job)
        self._start_jobs()
        if not job.number and self.waiting > self._most_waiting:
            self._drop(job)
            raise PoolFull
        try:
            outcome, body = await job.answer
        finally:
            self._drop(job)
        return read_answer(outcome, body, limits)

    def cancel(self, *tasks: str) -> None:
        """Cancel the waiting and running jobs of some tasks: their calls of `run` raise JobCancelled."""
        for job in [*self._short, *self._long, *self._running.values()]:
            if job.task in tasks and not job.answer.done():
                job.answer.set_exception(JobCancelled())

    def stop(self) -> None:
        """End the worker process and all jobs, for good."""
        self._is_stopped = True
        if self._connection is not None:
            self._connection.close()
            self._lost()

    def _start_jobs(self) -> None:
        """Give free processes to jobs that wait."""
        while self._connection is not None and len(self._running) < self._processes:
            long_jobs = sum(job.is_long for job in self._running.values())
            if self._long and long_jobs < self._processes - 1:
                job = self._long.popleft()
            elif self._short:
                job = self._short.popleft()
            else:
                return
            self._numbers += 1
            job.number = self._numbers
            self._running[job.number] = job
            header = job_header(job.number, job.task, job.limits, None if job.is_long else QUANTUM_SECONDS)
            self._connection.send(pack(header, job.body))

    def _drop(self, job: _Job) -> None:
        """Take a job out of the queue, or kill its process; the process counts until its end is known."""
        for jobs in (self._short, self._long):
            with suppress(ValueError):
                jobs.remove(job)
        if not job.answer.done():
            job.answer.cancel()
        if job.number in self._running and self._connection is not None:
            self._connection.send(pack({"cancel": True, "number": job.number}))

    def _received(self, header: dict[str, Any], body: bytes) -> None:
        if header.get("ready"):
            self.facts = json.loads(body)
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
            return
        job = self._running.pop(header["number"])
        if not job.answer.done():
            if header["outcome"] == "quantum":
                job.is_long, job.number = True, 0
                self._long.append(job)
            else:
                job.answer.set_result((header["outcome"], body))
        self._start_jobs()

    def _lost(self) -> None:
        """Fail the jobs that run, and start another process for those that wait."""
        self._connection = None
        ready, self._ready = self._ready, None
        jobs, self._running = [*self._running.values()], {}
        if self._is_stopped:
            jobs += [*self._short, *self._long]
            self._short.clear()
            self._long.clear()
        answers: list[asyncio.Future[Any]] = [job.answer for job in jobs]
        for future in [*answers, *([] if ready is None else [ready])]:
            if not future.done():
                future.set_exception(WorkerEnded())
                future.exception()  # it is not reported where nothing waits for it
        if self.waiting:
            self.start()
            self._start_jobs()


class _Connection:
    """The socket to a worker process on an event loop."""

    def __init__(
        self,
        source: TaskSource,
        loop: asyncio.AbstractEventLoop,
        received: Callable[[dict[str, Any], bytes], None],
        lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._received = received
        self._lost = lost
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._process: subprocess.Popen[bytes]
        self._socket: socket.socket
        self._process, self._socket = start_process(source)
        self._socket.setblocking(False)
        loop.add_reader(self._socket, self._read)

    def send(self, data: bytes) -> None:
        """Send bytes, in the background where the socket does not take them at once."""
        if not self._unsent:
            self._loop.add_writer(self._socket, self._write)
        self._unsent += data
        self._write()

    def close(self) -> None:
        """End the process, which kills its jobs."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        try:
            received = self._socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.close()
            self._lost()
            return
        for header, body in self._frames.feed(received):
            self._received(header, body)

    def _write(self) -> None:
        if self._socket.fileno() < 0:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # the process has ended, which is read next
            self._unsent.clear()
            sent = 0
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)
