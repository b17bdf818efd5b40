"""Pool of job processes for coroutines, with a bounded queue and cancellation.

A job is one call of a task in `model/workers/`: the tokenizer, the chat template or the compiler of grammars. A job is
long if it is known to take much CPU time, or if it has used `QUANTUM_SECONDS`. Short jobs go ahead of long ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from model.serve.errors import queue_full_error, server_stopping_error, worker_ended_error
from model.workers.frames import FrameReader, pack
from model.workers.launch import JobLimits, TaskSource, make_job_header, read_answer, start_process

QUANTUM_SECONDS = 0.25
"""CPU time after which a job counts as long, is killed, and is queued again after the short ones."""
_READ_BYTES = 2**18


@dataclass(eq=False)
class _Job:
    """A job that waits or runs; `number` identifies the running job, and is 0 while the job waits.

    `answer` gets the outcome and the body of the answer, or an exception.
    """

    task: str
    body: bytes
    limits: JobLimits
    is_long: bool
    answer: asyncio.Future[tuple[str, bytes]]
    number: int = 0


class WorkerPool:
    """Pool that runs each job in a process forked by one worker process.

    At most `processes` jobs run and at most `waiting` jobs wait. A long job never takes the last free process.
    Cancelling a call of `run` kills its job. All methods are called on one event loop.

    Args:
        source: Describes the tasks, from which the worker process is started.
        processes: Most jobs that run at once, at least 2.
        waiting: Most jobs that wait.
    """

    def __init__(self, source: TaskSource, processes: int = 2, waiting: int = 64) -> None:
        assert processes > 1, "a long job would stop all others"
        self._source = source
        self._processes = processes
        self._max_waiting = waiting
        self._queue: list[_Job] = []
        self._running: dict[int, _Job] = {}
        self._numbers = 0
        self._connection: _Connection | None = None
        self._facts: asyncio.Future[dict[str, Any]] | None = None
        self._is_stopped = False

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a process."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of jobs that have a process, including cancelled jobs that have not ended yet."""
        return len(self._running)

    def start(self) -> None:
        """Start the worker process unless it runs already; the first job would start it too.

        Raises:
            ApiError: The pool was stopped ("worker_ended").
        """
        if self._is_stopped:
            raise worker_ended_error()
        if self._connection is None:
            loop = asyncio.get_running_loop()
            self._facts = self._facts or loop.create_future()
            self._connection = _Connection(self._source, loop, self._handle_message, self._handle_loss)

    async def wait_for_facts(self) -> dict[str, Any]:
        """Wait until the worker process has started, and return the facts that it reports about its tasks.

        Raises:
            ApiError: The process ended before its report, or the pool was stopped ("worker_ended").
        """
        self.start()
        assert self._facts is not None
        return await asyncio.shield(self._facts)

    async def run(self, task: str, *arguments: Any, limits: JobLimits, is_long: bool = False) -> Any:
        """Run a job and return its answer.

        Args:
            task: The name of the job's task.
            *arguments: Arguments of the task, which are sent as JSON.
            limits: CPU time and memory of the job.
            is_long: Whether the job counts as long from the start, and so never takes the last free process.

        Raises:
            ModelError: The task refused the input, or the job exceeded a limit.
            ApiError: The queue is full ("queue_full"), `cancel` was called with the task ("stopping"), or the worker
            process ended during the job or the pool was stopped ("worker_ended").
        """
        self.start()
        answer = asyncio.get_running_loop().create_future()
        job = _Job(task, json.dumps(arguments).encode(), limits, is_long, answer)
        self._queue.append(job)
        self._start_jobs()
        if not job.number and self.waiting > self._max_waiting:
            self._drop(job)
            raise queue_full_error(None)
        try:
            outcome, body = await answer
        finally:
            self._drop(job)
        return read_answer(outcome, body, limits)

    def cancel(self, *tasks: str) -> None:
        """Cancel all waiting and running jobs of the given tasks; their calls of `run` raise ApiError ("stopping")."""
        for job in [*self._queue, *self._running.values()]:
            if job.task in tasks and not job.answer.done():
                job.answer.set_exception(server_stopping_error())

    def stop(self) -> None:
        """Kill the worker process and all jobs.

        Their calls of `run`, and all later calls, raise ApiError ("worker_ended").
        """
        self._is_stopped = True
        if self._connection is not None:
            self._connection.close()
            self._handle_loss()

    def _start_jobs(self) -> None:
        """Start waiting jobs while processes are free; the oldest long job comes first if a long job may run."""
        while self._connection is not None and len(self._running) < self._processes:
            may_be_long = sum(job.is_long for job in self._running.values()) < self._processes - 1
            candidates = [job for job in self._queue if may_be_long or not job.is_long]
            if not candidates:
                return
            job = max(candidates, key=lambda job: job.is_long)  # the oldest long job, or else the oldest job
            self._queue.remove(job)
            self._numbers += 1
            job.number = self._numbers
            self._running[job.number] = job
            header = make_job_header(
                job.number, job.task, job.limits, None if job.is_long else QUANTUM_SECONDS
            )
            self._connection.send(pack(header, job.body))

    def _drop(self, job: _Job) -> None:
        """Remove a waiting job from the queue, or have the worker process kill a running one.

        The killed job counts as running until the worker process reports its end. Nothing happens to a job that has
        ended.
        """
        with suppress(ValueError):
            self._queue.remove(job)
        if not job.answer.done():
            job.answer.cancel()
        if job.number in self._running and self._connection is not None:
            self._connection.send(pack({"cancel": True, "number": job.number}))

    def _handle_message(self, header: dict[str, Any], body: bytes) -> None:
        """Handle a message of the worker process: the facts after its start, or the outcome of a job.

        A job that has used up `QUANTUM_SECONDS` is queued again as a long job. Waiting jobs are started.
        """
        if header.get("ready"):
            assert self._facts is not None
            if not self._facts.done():  # another worker process has reported the same facts
                self._facts.set_result(json.loads(body))
            return
        job = self._running.pop(header["number"])
        if not job.answer.done():
            if header["outcome"] == "quantum":
                job.is_long, job.number = True, 0
                self._queue.append(job)
            else:
                job.answer.set_result((header["outcome"], body))
        self._start_jobs()

    def _handle_loss(self) -> None:
        """Handle the end of the worker process: running jobs fail with ApiError ("worker_ended").

        If jobs wait, another worker process is started for them. In a stopped pool they fail too.
        """
        self._connection = None
        jobs, self._running = [*self._running.values()], {}
        if self._is_stopped:
            jobs += self._queue
            self._queue.clear()
        futures: list[asyncio.Future[Any]] = [job.answer for job in jobs]
        if self._facts is not None and not self._facts.done():
            futures.append(self._facts)
            self._facts = None
        for future in futures:
            if not future.done():
                future.set_exception(worker_ended_error())
                future.exception()  # marks it as retrieved, so that asyncio logs nothing where no caller waits
        if self.waiting:
            self.start()
            self._start_jobs()


class _Connection:
    """Worker process, and the socket to it on an event loop; the constructor starts the process.

    Args:
        source: Describes the tasks of the process.
        loop: The event loop.
        on_message: Called with the header and the body of every message.
        on_loss: Called once the process has ended, unless `close` was called.
    """

    def __init__(
        self,
        source: TaskSource,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[dict[str, Any], bytes], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_loss = on_loss
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._process, self._socket = start_process(source)
        self._socket.setblocking(False)
        loop.add_reader(self._socket, self._read)

    def send(self, frame: bytes) -> None:
        """Send a frame; return at once, even if the socket does not take all of it yet."""
        if not self._unsent:
            self._loop.add_writer(self._socket, self._write)
        self._unsent += frame
        self._write()

    def close(self) -> None:
        """Kill the process and the processes of its jobs, and close the socket."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.close()
            self._on_loss()
            return
        for header, body in self._frames.feed(received):
            self._on_message(header, body)

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # the process has ended, as the next read tells
            self._unsent.clear()
            sent = 0
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)
