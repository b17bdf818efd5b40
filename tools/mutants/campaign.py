"""Runs many mutants, each in a forked process with limits of CPU time and memory, several at a time."""

from __future__ import annotations

import os
import pickle
import resource
import selectors
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tools.mutants.cases import cases
from tools.mutants.cases.case import Case
from tools.mutants.judge import Baseline, Fate, Verdict, baseline, judge_mutant
from tools.mutants.rows import printed_times
from tools.mutants.source import Mutant, list_imports

CPU_SECONDS = 60
"""Of one mutant; the shipped kernels take some seconds for all cases. CPU time does not depend on other processes."""

MEMORY_BYTES = 3 << 30
"""Of address space, on top of what the process has that starts it: a thread that finds none left never begins, and
whoever started it waits for ever."""

STUCK_SECONDS = 600
"""A mutant that neither computes nor ends is killed after this time; none is known."""


@dataclass(frozen=True, slots=True)
class Result:
    """A mutant and the verdict on it."""

    mutant: Mutant
    verdict: Verdict


def run(
    mutants: Sequence[Mutant],
    processes: int = 2,
    progress: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run mutants and return their results in the order of the mutants.

    `progress` is called with each result as it arrives. At most `processes` run at once; each runs only the cases
    whose kernel imports a changed module.
    """
    changed = {mutant.module for mutant in mutants}
    chosen = [index for index, case in enumerate(cases()) if changed & list_imports(case.kernel)]
    tried = [cases()[index] for index in chosen]
    known = [_baseline(index) for index in chosen]
    times = dict(printed_times({case.kernel for case in tried}))
    results: dict[int, Result] = {}
    waiting = list(enumerate(mutants))[::-1]
    with selectors.DefaultSelector() as selector:
        running = 0
        while waiting or running:
            while waiting and running < processes:
                number, mutant = waiting.pop()
                child, pipe = _start(mutant, tried, known, times)
                selector.register(pipe, selectors.EVENT_READ, (number, mutant, child, bytearray()))
                running += 1
            ready = selector.select(STUCK_SECONDS)
            if not ready:
                for key in selector.get_map().values():
                    os.kill(key.data[2], signal.SIGKILL)
            for key, _ in ready:
                number, mutant, child, received = key.data
                chunk = os.read(key.fd, 1 << 16)
                if chunk:
                    received += chunk
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                running -= 1
                results[number] = Result(mutant, _ended(child, bytes(received)))
                progress(results[number])
    return [results[number] for number in sorted(results)]


@cache
def _baseline(number: int) -> Baseline:
    """Return what the shipped kernel does on the case with this index."""
    known = baseline(cases()[number])
    assert {module for module, _ in known.functions} <= list_imports(cases()[number].kernel)
    return known


def _start(
    mutant: Mutant, tried: Sequence[Case], known: Sequence[Baseline], times: Mapping[str, str]
) -> tuple[int, int]:
    """Start a forked process that judges a mutant; return its id and the pipe on which its pickled verdict arrives."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        memory = _address_space_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        verdict = judge_mutant(mutant, tried, known, times)
        os.write(writing, pickle.dumps(verdict))
        status = 0
    finally:
        os._exit(status)
    raise AssertionError("unreachable")


def _address_space_bytes() -> int:
    """Return the bytes that this process has mapped, or 0 if the system does not report them."""
    try:
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _ended(child: int, received: bytes) -> Verdict:
    """Wait for a process and return its verdict; without one, `Fate.limit` with the signal that ended it."""
    _, status = os.waitpid(child, 0)
    if received:
        verdict: Verdict = pickle.loads(received)
        return verdict
    if os.WIFSIGNALED(status):
        return Verdict(Fate.limit, f"signal {os.WTERMSIG(status)}")
    return Verdict(Fate.limit, "no verdict")
