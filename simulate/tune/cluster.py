"""Measurement of candidates on the machines of a Ray cluster."""

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
from simulate.tune.measuring import Outcome, Subject, make_bench_in_process
from simulate.tune.parameters import Candidate
from simulate.tune.workers import Measured


class Cluster:
    """Workers on a Ray cluster: processes that measure candidates, each of which imports the kernel's file once.

    Every machine needs this package and the kernel's file at the same paths, and the same version of Python.
    `processors` is the number of processes.
    """

    def __init__(self, subject: Subject, address: str, processes: int | None) -> None:
        """Join a cluster and start the processes.

        Args:
            subject: The kernel with its arguments.
            address: Address of a running cluster; `auto` finds a running one, `local` starts one on this machine.
            processes: The number of processes, at most one for each CPU of the cluster; None for as many.

        Raises:
            InvalidArgument: If Ray is missing, or if the cluster cannot be joined.
        """
        self._joined = ExitStack()
        try:
            ray = self._joined.enter_context(join_cluster(address, processes or os.cpu_count() or 1))
        except ImportError as absent:
            raise InvalidArgument(
                "NKW-TUNE-EXTRA",
                "--cluster needs Ray, which is not installed; pip install 'nki-workbench[cluster]'",
            ) from absent
        except ConnectionError as refused:
            raise InvalidArgument("NKW-TUNE-CLUSTER", str(refused)) from None
        self._ray = ray
        num_cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.processors = min(processes or num_cpus, num_cpus)
        self._bench: Callable[[], Any] = partial(ray.remote(num_cpus=1)(_Bench).remote, subject)
        self._idle = [self._bench() for _ in range(self.processors)]
        self._busy: dict[Any, tuple[Any, int]] = {}

    def measure(self, batch: Sequence[Candidate], deadline: float) -> Measured:
        """Measure as many candidates at a time as there are processes, as `Workers.measure` does.

        A candidate whose process is lost is refused, and another process takes its place. Candidates that run at the
        deadline are not awaited, and keep their processes busy.
        """
        pending = list(enumerate(batch))[::-1]
        while pending or self._busy:
            while pending and self._idle:
                bench = self._idle.pop()
                index, candidate = pending.pop()
                self._busy[bench.time_candidate.remote(dict(candidate))] = bench, index
            remaining = max(0.0, deadline - time.monotonic())
            ready, _ = self._ray.wait(list(self._busy), timeout=None if remaining == inf else remaining)
            if not ready:
                return
            for answer in ready:
                bench, index = self._busy.pop(answer)
                try:
                    outcome: Outcome = self._ray.get(answer)
                except self._ray.exceptions.RayError as lost:
                    bench = self._bench()
                    outcome = Outcome(
                        code="process", why=f"the process of this candidate was lost: {lost!s:.120}"
                    )
                self._idle.append(bench)
                yield index, outcome

    def close(self) -> None:
        """End the processes that this command started on the cluster, and disconnect."""
        self._joined.close()


class _Bench:
    """Actor of the cluster, which holds a `Bench` in its process."""

    def __init__(self, subject: Subject) -> None:
        self._bench = make_bench_in_process(subject)

    def time_candidate(self, candidate: Candidate) -> Outcome:
        """Return the predicted times of a candidate, or its refusal."""
        return self._bench.time_candidate(candidate)
