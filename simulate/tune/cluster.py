"""Candidates measured on the machines of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any

from nkw.cluster import join_cluster
from nkw.errors import InvalidArgument
from simulate.tune.measuring import Outcome, Subject, bench_elsewhere
from simulate.tune.parameters import Candidate
from simulate.tune.workers import Measured


class Cluster:
    """The processors of a Ray cluster: a process each, in which the kernel's file is read once.

    Every machine has this package and the kernel's file where this one has them, and the same version of Python.
    """

    def __init__(self, subject: Subject, address: str, processes: int | None) -> None:
        """`address` is that of a running cluster, `auto`, or `local`; raises InvalidArgument where there is none."""
        self._joined = ExitStack()
        try:
            ray = self._joined.enter_context(join_cluster(address, processes or os.cpu_count() or 1))
        except ImportError as absent:
            raise InvalidArgument(
                "NKW-TUNE-EXTRA", "--cluster needs Ray; pip install 'nki-workbench[cluster]'"
            ) from absent
        except ConnectionError as refused:
            raise InvalidArgument("NKW-TUNE-CLUSTER", str(refused)) from None
        self._ray = ray
        there = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.processors = min(processes or there, there)
        self._bench: Callable[[], Any] = partial(ray.remote(num_cpus=1)(_Bench).remote, subject)
        self._idle = [self._bench() for _ in range(self.processors)]
        self._busy: dict[Any, tuple[Any, int]] = {}

    def measured(self, batch: Sequence[Candidate], until: float) -> Measured:
        """As many candidates at a time as there are processes; one whose process is lost is refused."""
        waiting = list(enumerate(batch))[::-1]
        while waiting or self._busy:
            while waiting and self._idle:
                bench = self._idle.pop()
                place, candidate = waiting.pop()
                self._busy[bench.outcome.remote(dict(candidate))] = bench, place
            remaining = max(0.0, until - time.monotonic())
            ready, _ = self._ray.wait(list(self._busy), timeout=None if remaining == inf else remaining)
            if not ready:
                return
            for answer in ready:
                bench, place = self._busy.pop(answer)
                try:
                    outcome: Outcome = self._ray.get(answer)
                except self._ray.exceptions.RayError as lost:
                    bench = self._bench()
                    outcome = Outcome(
                        code="process", why=f"the process of this candidate was lost: {lost!s:.120}"
                    )
                self._idle.append(bench)
                yield place, outcome

    def close(self) -> None:
        """Leave the cluster, which ends what this command started there."""
        self._joined.close()


class _Bench:
    """The bench in a process of the cluster."""

    def __init__(self, subject: Subject) -> None:
        self._bench = bench_elsewhere(subject)

    def outcome(self, candidate: Candidate) -> Outcome:
        return self._bench.outcome(candidate)
