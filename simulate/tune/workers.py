"""Where candidates are measured: in this process, or in several of this machine."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Protocol

from simulate.tune.measuring import Bench, Outcome, Subject, bench_elsewhere
from simulate.tune.parameters import Candidate

_GRACE_SECONDS = 2.0
Measured = Iterator[tuple[int, Outcome]]
"""Places of candidates in their batch, with their outcomes, as they come."""


class Workers(Protocol):
    """Measures a batch of candidates in any order."""

    def measured(self, batch: Sequence[Candidate], until: float) -> Measured:
        """Every candidate once; at `until`, a time of time.monotonic, the rest of the batch is given up."""

    def close(self) -> None:
        """End what is still under way."""


class Here:
    """This process."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def measured(self, batch: Sequence[Candidate], until: float) -> Measured:
        """One candidate after another; the one under way at `until` is finished."""
        for place, candidate in enumerate(batch):
            if time.monotonic() >= until:
                return
            yield place, self._bench.outcome(candidate)

    def close(self) -> None:
        """Nothing is under way."""


class Processes:
    """Processes of this machine, each started anew and not forked: threads of this one would be lost in a copy."""

    def __init__(self, subject: Subject, count: int, seconds: float | None = None) -> None:
        """Start `count` processes; a candidate that takes longer than `seconds` fails, and its process is ended."""
        self._subject = subject
        self._seconds = inf if seconds is None else seconds
        self._idle: list[_Worker] = [_Worker(subject) for _ in range(count)]
        self._busy: dict[Connection, tuple[_Worker, int]] = {}

    def measured(self, batch: Sequence[Candidate], until: float) -> Measured:
        """As many candidates at a time as there are processes; one that ends refuses its candidate."""
        waiting = list(enumerate(batch))[::-1]
        while waiting or self._busy:
            while waiting and self._idle:
                worker = self._idle.pop()
                place, candidate = waiting.pop()
                worker.ask(candidate)
                self._busy[worker.connection] = worker, place
            first = min(worker.asked for worker, _ in self._busy.values()) + self._seconds
            remaining = max(0.0, min(until, first) - time.monotonic())
            ready = wait(list(self._busy), None if remaining == inf else remaining)
            if not ready and time.monotonic() >= until:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                worker, place = self._busy.pop(connection)
                outcome = worker.answer()
                if outcome is None:
                    worker, outcome = self._replaced(worker, "ended with status {status}")
                self._idle.append(worker)
                yield place, outcome
            for connection, (worker, place) in list(self._busy.items()):
                if time.monotonic() >= worker.asked + self._seconds:
                    del self._busy[connection]
                    worker, outcome = self._replaced(worker, f"reached the time limit of {self._seconds:g} s")
                    self._idle.append(worker)
                    yield place, outcome

    def _replaced(self, worker: _Worker, why: str) -> tuple[_Worker, Outcome]:
        """End a process; returns a new one, and the outcome of the candidate that it had."""
        status = worker.end()
        said = f"the process of this candidate {why.format(status=status)}"
        return _Worker(self._subject), Outcome(code="process", why=said)

    def close(self) -> None:
        """End all processes."""
        for worker in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            worker.end()
        self._idle, self._busy = [], {}


class _Worker:
    """One process that measures."""

    def __init__(self, subject: Subject) -> None:
        starting = multiprocessing.get_context("spawn")
        self.connection, theirs = starting.Pipe()
        self._process = starting.Process(target=_measure, args=(theirs, subject), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.asked = inf
        """Time of the last question, by time.monotonic."""

    def ask(self, candidate: Candidate) -> None:
        """Give the process a candidate."""
        self.asked = time.monotonic()
        with suppress(OSError):  # it has ended, which `answer` will say
            self.connection.send(dict(candidate))

    def answer(self) -> Outcome | None:
        """The outcome that is ready; None where the process has ended."""
        try:
            outcome: Outcome = self.connection.recv()
            return outcome
        except (EOFError, OSError):
            return None

    def end(self) -> int | None:
        """End the process; its exit status."""
        self._process.terminate()
        self._process.join(_GRACE_SECONDS)
        self._process.kill()  # of a kernel that ignores the signal
        self._process.join()
        self.connection.close()
        return self._process.exitcode


def _measure(connection: Connection, subject: Subject) -> None:
    """Answer candidates until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the process that asks decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    bench = bench_elsewhere(subject)
    with suppress(EOFError, OSError):  # the process that asks has ended
        while True:
            connection.send(bench.outcome(connection.recv()))
