"""Measurement of candidates in this process, or in several processes of this machine."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Protocol

from simulate.tune.measuring import Bench, Outcome, Subject, make_bench_in_process
from simulate.tune.parameters import Candidate

_GRACE_SECONDS = 2.0
Measured = Iterator[tuple[int, Outcome]]
"""Indices of candidates in their batch with their outcomes, in order of completion."""


class Workers(Protocol):
    """Protocol for measuring a batch of candidates in any order; `Here`, `Processes` and `Cluster` follow it."""

    def measure(self, batch: Sequence[Candidate], deadline: float) -> Measured:
        """Yield (index in the batch, outcome) of every candidate, in order of completion.

        Args:
            batch: The candidates.
            deadline: Value of `time.monotonic` at which the iterator ends; candidates without an outcome are dropped.
        """

    def close(self) -> None:
        """End all running measurements."""


class Here:
    """Measurement in this process."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def measure(self, batch: Sequence[Candidate], deadline: float) -> Measured:
        """Measure candidates one after another, as `Workers.measure` does; one that has begun is always completed."""
        for index, candidate in enumerate(batch):
            if time.monotonic() >= deadline:
                return
            yield index, self._bench.time_candidate(candidate)

    def close(self) -> None:
        """Do nothing: no measurement runs after `measure` has ended."""


class Processes:
    """Workers in several processes of this machine.

    These are spawned and not forked, because threads of this process would be lost in a copy.
    """

    def __init__(self, subject: Subject, count: int, seconds: float | None = None) -> None:
        """Start `count` processes.

        Args:
            subject: The kernel with its arguments.
            count: The number of processes.
            seconds: Time limit of a candidate; its process is killed at the limit, and the candidate counts as
                refused. None for no limit.
        """
        self._subject = subject
        self._seconds = inf if seconds is None else seconds
        self._idle: list[_Worker] = [_Worker(subject) for _ in range(count)]
        self._busy: dict[Connection, tuple[_Worker, int]] = {}

    def measure(self, batch: Sequence[Candidate], deadline: float) -> Measured:
        """Measure as many candidates at a time as there are processes, as `Workers.measure` does.

        A candidate is refused if its process ends or reaches the time limit; another process takes its place.
        Candidates that run at the deadline are not awaited, and keep their processes busy until `close`.
        """
        pending = list(enumerate(batch))[::-1]
        while pending or self._busy:
            while pending and self._idle:
                worker = self._idle.pop()
                index, candidate = pending.pop()
                worker.ask(candidate)
                self._busy[worker.connection] = worker, index
            next_timeout = min(worker.asked_at for worker, _ in self._busy.values()) + self._seconds
            remaining = max(0.0, min(deadline, next_timeout) - time.monotonic())
            ready = wait(list(self._busy), None if remaining == inf else remaining)
            if not ready and time.monotonic() >= deadline:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                worker, index = self._busy.pop(connection)
                outcome = worker.answer()
                if outcome is None:
                    worker, outcome = self._replace(worker, "ended with status {status}")
                self._idle.append(worker)
                yield index, outcome
            for connection, (worker, index) in list(self._busy.items()):
                if time.monotonic() >= worker.asked_at + self._seconds:
                    del self._busy[connection]
                    worker, outcome = self._replace(worker, f"reached the time limit of {self._seconds:g} s")
                    self._idle.append(worker)
                    yield index, outcome

    def _replace(self, worker: _Worker, reason: str) -> tuple[_Worker, Outcome]:
        """End a process, and start another.

        Args:
            worker: The process.
            reason: What happened to it; `{status}` stands for its exit status.

        Returns:
            The new process, and a refusal as the outcome of the candidate that the ended process measured.
        """
        status = worker.end()
        message = f"the process of this candidate {reason.format(status=status)}"
        return _Worker(self._subject), Outcome(code="process", why=message)

    def close(self) -> None:
        """End all processes."""
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()
        self._idle, self._busy = [], {}


class _Worker:
    """A process that measures one candidate at a time: call `ask`, then `answer` when `connection` is readable."""

    def __init__(self, subject: Subject) -> None:
        starting = multiprocessing.get_context("spawn")
        self.connection, theirs = starting.Pipe()
        self._process = starting.Process(target=_measure, args=(theirs, subject), daemon=True)
        self._process.start()
        theirs.close()  # the pipe then closes when the process ends
        self.asked_at = inf
        """Time at which the last candidate was sent, in `time.monotonic`; infinity before the first."""

    def ask(self, candidate: Candidate) -> None:
        """Send the process a candidate, without waiting for its outcome; does not fail if the process has ended."""
        self.asked_at = time.monotonic()
        with suppress(OSError):  # `answer` reports a process that has ended
            self.connection.send(dict(candidate))

    def answer(self) -> Outcome | None:
        """Wait for the outcome of the last candidate and return it, or None if the process has ended."""
        try:
            outcome: Outcome = self.connection.recv()
            return outcome
        except (EOFError, OSError):
            return None

    def end(self) -> int | None:
        """End the process, by SIGKILL after two seconds, and return its exit status, which is negative for a signal."""
        self._process.terminate()
        self._process.join(_GRACE_SECONDS)
        self._process.kill()  # in case the kernel ignores the signal
        self._process.join()
        self.connection.close()
        return self._process.exitcode


def _measure(connection: Connection, subject: Subject) -> None:
    """Receive candidates and send their outcomes until the pipe is closed; the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all processes; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bench = make_bench_in_process(subject)
    with suppress(EOFError, OSError):  # the parent process has ended
        while True:
            connection.send(bench.time_candidate(connection.recv()))
