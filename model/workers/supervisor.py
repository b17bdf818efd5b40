"""The worker process: it loads the tokenizer once and forks a job process for every job.

The server has several threads, so its own process cannot be forked safely. This process has one thread. A job process
inherits what is loaded, runs under limits, sends its answer through a pipe and exits; to cancel a job is to kill its
process.

`model.workers.launch` runs `main` with the number of an inherited socket, `module:factory` of the tasks, and the JSON
arguments of the factory.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from model.errors import ModelError
from model.workers.frames import FrameReader, Header, pack
from nkw.process import Limits, quiet

MOST_ANSWER_BYTES = 2**26
"""Longest answer of a job; a job that writes more is killed."""
_NICE = 5
"""Increase of the niceness of job processes, so that the engine's threads have priority."""
_PIECE_BYTES = 2**16


class Tasks(Protocol):
    """Interface of the tasks of a worker process."""

    facts: dict[str, Any]
    """Facts that are sent once, when the process is ready."""

    def prepare(self, task: str) -> None:
        """Load what the jobs of a task share, in the worker process before the fork; called for every job.

        Raises:
            ModelError: Loading fails.
        """

    def run(self, task: str, arguments: list[Any]) -> Any:
        """Compute a job in its own process, and return the answer as JSON data.

        Raises:
            ModelError: The input is refused.
        """


@dataclass
class _Job:
    """Running job process: its number and process id, the pipe from it, and the answer received so far."""

    number: int
    pid: int
    pipe: int
    answer: bytearray = field(default_factory=bytearray)
    is_cancelled: bool = False


class Supervisor:
    """Main loop of a worker process, which starts and cancels jobs and sends their answers."""

    def __init__(self, connection: socket.socket, tasks: Tasks) -> None:
        self._connection = connection
        self._tasks = tasks
        self._frames = FrameReader()
        self._jobs: dict[int, _Job] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Send the tasks' facts, then start jobs and send answers until the other end of the connection is closed.

        Then kills the remaining jobs.
        """
        try:
            self._send({"ready": True}, json.dumps(self._tasks.facts).encode())
            self._selector.register(self._connection, selectors.EVENT_READ, None)
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._read_answer(key.data)
                    elif not self._read_orders():
                        return
        except OSError:  # the server has gone
            return
        finally:
            for job in self._jobs.values():
                _kill(job.pid)

    def _read_orders(self) -> bool:
        received = self._connection.recv(_PIECE_BYTES)
        for header, body in self._frames.feed(received):
            if header.get("cancel"):
                job = self._jobs.get(header["number"])
                if job is not None:
                    job.is_cancelled = True
                    _kill(job.pid)
            else:
                self._start(header, body)
        return bool(received)

    def _start(self, header: Header, body: bytes) -> None:
        number = header["number"]
        try:
            self._tasks.prepare(header["task"])
        except ModelError as error:
            self._send({"number": number, "outcome": "refused"}, _encode_error(error))
            return
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reader)
                self._connection.close()
                for job in self._jobs.values():
                    os.close(job.pipe)
                _run_job(self._tasks, header, body, writer)
            finally:
                os._exit(1)
        os.close(writer)
        job = self._jobs[number] = _Job(number, pid, reader)
        self._selector.register(reader, selectors.EVENT_READ, job)

    def _read_answer(self, job: _Job) -> None:
        piece = os.read(job.pipe, _PIECE_BYTES)
        job.answer += piece
        if len(job.answer) > MOST_ANSWER_BYTES:
            _kill(job.pid)
        elif piece:
            return
        self._selector.unregister(job.pipe)
        os.close(job.pipe)
        _, status = os.waitpid(job.pid, 0)
        del self._jobs[job.number]
        outcome, body = _read_outcome(job, status)
        self._send({"number": job.number, "outcome": outcome}, body)

    def _send(self, header: Header, body: bytes) -> None:
        self._connection.sendall(pack(header, body))


def _read_outcome(job: _Job, status: int) -> tuple[str, bytes]:
    """Return the outcome of a job whose process has ended, and its answer or the name of the signal that ended it.

    Outcomes are "done", "refused", "memory", "time", "quantum", "cancelled" and "crash".

    Args:
        job: The job, with the answer that its process wrote.
        status: Exit status as of os.waitpid.
    """
    if job.is_cancelled:
        return "cancelled", b""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        outcomes: dict[int, str] = {
            signal.SIGXCPU: "time",
            signal.SIGPROF: "quantum",
            signal.SIGABRT: "memory",
        }
        names: dict[int, str] = {known.value: known.name for known in signal.Signals}
        return outcomes.get(number, "crash"), names.get(number, f"signal {number}").encode()
    if os.WEXITSTATUS(status):
        return "crash", b"its process ended early"
    outcome, _, body = bytes(job.answer).partition(b"\n")
    return outcome.decode(), body


def _run_job(tasks: Tasks, header: Header, body: bytes, writer: int) -> None:
    """Compute a job under its limits, write outcome and answer to a pipe, and end this process; never returns."""
    with suppress(OSError):
        os.nice(_NICE)
    if header["quantum"] is not None:
        signal.setitimer(signal.ITIMER_PROF, header["quantum"])
    Limits(header["cpu_seconds"], header["memory_bytes"]).apply()
    try:
        with quiet():
            value = tasks.run(header["task"], json.loads(body))
        outcome, answer = b"done", json.dumps(value).encode()
    except ModelError as error:
        outcome, answer = b"refused", _encode_error(error)
    except MemoryError:
        outcome, answer = b"memory", b"MemoryError"
    with open(writer, "wb") as pipe:
        pipe.write(outcome + b"\n" + answer)
    os._exit(0)


def _encode_error(error: ModelError) -> bytes:
    return json.dumps([error.message, error.code]).encode()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(descriptor: str, tasks: str, arguments: str) -> None:
    """Run the worker process until its connection is closed.

    It ignores SIGINT and SIGTERM, which the server handles, and has a process group of its own.

    Args:
        descriptor: File descriptor of the inherited socket.
        tasks: Factory of the tasks as `module:factory`.
        arguments: JSON arguments of the factory.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.setpgid(0, 0)  # so that all of it can be killed at once
    connection = socket.socket(fileno=int(descriptor))
    module, _, factory = tasks.partition(":")
    Supervisor(connection, getattr(importlib.import_module(module), factory)(*json.loads(arguments))).run()
