"""Timing helpers: medians of several runs, taken in turn so that a drift of the machine affects all sides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

SPIN_SECONDS = 0.2
"""Longer than threads of OpenBLAS and OpenMP look for more work after a product. Two libraries whose threads do so one
after the other would be measured against each other: a product by oneMKL took twice as long right after numpy's."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    work: what was measured. reference: what it is compared with. measured: value in `unit`. ratio: measured over
    reference, or None if nothing is compared.
    """

    work: str
    reference: str
    measured: float
    unit: str
    ratio: float | None = None


def seconds(action: Callable[[], object]) -> float:
    """Return the wall-clock time of one call in seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def medians(actions: list[Callable[[], object]], runs: int = 7, pause: float = 0.0) -> list[float]:
    """Return the median wall-clock time of each action in seconds.

    Each action is called once to warm up. Then all are called in turn, `runs` times, each after `pause` seconds: with
    SPIN_SECONDS, large products find all cores free.
    """
    for action in actions:
        action()
    samples: list[list[float]] = [[] for _ in actions]
    for _ in range(runs):
        for kept, action in zip(samples, actions):
            time.sleep(pause)
            kept.append(seconds(action))
    return [statistics.median(kept) for kept in samples]


def against(
    work: str,
    reference: str,
    action: Callable[[], object],
    other: Callable[[], object],
    runs: int = 7,
    pause: float = 0.0,
) -> Row:
    """Time `action` and `other` in turn; return the row of `action`: its median in ms, and the ratio to `other`."""
    mine, theirs = medians([action, other], runs, pause)
    return Row(work, reference, mine * 1e3, "ms", mine / theirs)
