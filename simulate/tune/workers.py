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

    def __init__(self, subject: Subject, count: int) -> None:
        self._subject = subject
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
            remaining = max(0.0, until - time.monotonic())
            ready = wait(list(self._busy), None if remaining == inf else remaining)
            if not ready:
                return
            for connection in ready:
                assert isinstance(connection, Connection)
                worker, place = self._busy.pop(connection)
                outcome = worker.answer()
                if outcome is None:
                    status = worker.end()
                    worker = _Worker(self._subject)
                    outcome = Outcome(
                        code="process", why=f"the process of this candidate ended with status {status}"
                    )
                self._idle.append(worker)
                yield place, outcome

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

    def ask(self, candidate: Candidate) -> None:
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
