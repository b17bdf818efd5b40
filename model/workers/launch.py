"""Start of worker processes, limits of their jobs, and a worker for synchronous code that runs one job at a time.

A worker is a process with loaded tasks, such as a tokenizer. It runs each job in a forked process with limits.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

from model.errors import ModelError
from model.workers.frames import FrameReader, pack

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from model.workers.supervisor import main; "
    "main(*sys.argv[1:])"
)
"""Program of a worker; it imports modules from this process's path and not from the current folder."""
TEXT_TASKS = "model.workers.tasks:TextTasks"


@dataclass(frozen=True)
class TaskSource:
    """Where a worker's tasks come from: a factory as `module:factory`, and its JSON arguments."""

    factory: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class JobLimits:
    """Limits of CPU time and memory of one job.

    The message for a job that exceeds them begins with `subject` and ends with `advice`, which says what the user can
    do.
    """

    cpu_seconds: int
    memory_bytes: int
    subject: str
    advice: str = ""

    def error(self, outcome: str, reason: str) -> ModelError:
        """Return the error for a job that was neither done nor refused.

        Args:
            outcome: "time" or "memory" for a limit; any other text for the end of the job's process.
            reason: Why the process ended, such as the name of a signal.
        """
        excess = {
            "time": f"takes more than {self.cpu_seconds} seconds of CPU time",
            "memory": f"takes more than {self.memory_bytes >> 20} MiB of memory",
        }.get(outcome, f"ends its process ({reason})")
        return ModelError(f"{self.subject} {excess}{self.advice}", "NKW-MODEL-LIMIT")


def start_process(source: TaskSource) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a worker process, and return it with the socket to it; the process ends when the socket is closed."""
    near, far = socket.socketpair()
    path = [folder or os.getcwd() for folder in sys.path]
    arguments = [json.dumps(path), str(far.fileno()), source.factory, json.dumps(source.arguments)]
    # A tokenizer with threads of its own could not be forked; numpy is imported but multiplies nothing.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"}
    with far:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _COMMAND, *arguments],
            pass_fds=(far.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
    return process, near


def read_answer(outcome: str, body: bytes, limits: JobLimits) -> Any:
    """Return the answer of a job, decoded from JSON.

    Args:
        outcome: The outcome in the answer's header.
        body: The answer, the error of a refused job, or a reason, as bytes.
        limits: The limits of the job, for messages.

    Raises:
        ModelError: The job refused its input or exceeded a limit.
    """
    if outcome == "done":
        return json.loads(body)
    if outcome == "refused":
        raise ModelError(*json.loads(body))
    raise limits.error(outcome, body.decode())


class SingleWorker:
    """Worker process that starts with the first job and runs one job at a time; several threads may use it."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = FrameReader()
        self._number = 0

    def run(self, task: str, arguments: list[Any], limits: JobLimits) -> Any:
        """Run a job, wait for it, and return its answer.

        Args:
            task: Name of the task.
            arguments: JSON arguments of the task.
            limits: Limits of the job.

        Raises:
            ModelError: The job refused its input or exceeded a limit, or the worker process has ended. In the last case
                the next job starts a new process.
        """
        with self._lock:
            try:
                outcome, body = self._exchange(task, arguments, limits)
            except BaseException as error:
                self.stop()
                if isinstance(error, OSError | EOFError):
                    raise ModelError(f"{limits.subject}: the worker process has ended: try again") from None
                raise
        return read_answer(outcome, body, limits)

    def stop(self) -> None:
        """Close the socket, so that the worker process and its job end, and wait for the process.

        The next job starts a new process. Without a process nothing happens.
        """
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
        self._socket = self._process = None
        self._frames = FrameReader()

    def __del__(self) -> None:
        # Python prints an exception of __del__ and ignores it. While the interpreter ends, modules that stop() uses may
        # be gone, and the process may have ended already; the supervisor ends by itself when its socket is closed.
        with suppress(Exception):
            self.stop()

    def _exchange(self, task: str, arguments: list[Any], limits: JobLimits) -> tuple[str, bytes]:
        if self._socket is None:
            self._process, self._socket = start_process(self._source)
        self._number += 1
        body = json.dumps(arguments).encode()
        self._socket.sendall(pack(make_job_header(self._number, task, limits), body))
        while True:
            received = self._socket.recv(2**16)
            if not received:
                raise EOFError
            for header, answer in self._frames.feed(received):
                if header.get("number") == self._number:
                    return header["outcome"], answer


def make_job_header(
    number: int, task: str, limits: JobLimits, quantum: float | None = None
) -> dict[str, Any]:
    """Return the header of the frame that starts a job.

    Args:
        number: Number of the job, which the answer repeats.
        task: Name of the task.
        limits: Limits of the job.
        quantum: Seconds of CPU time after which the job is stopped with the outcome "quantum", so that other jobs get a
            turn; None for no such limit.
    """
    return {
        "number": number,
        "task": task,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "quantum": quantum,
    }
