"""The tables SemaphoreUpdate, CoreBarriers, PendingDma, Throttle and Flow: what waits, and what is slowed down."""

from __future__ import annotations

import numpy as np

from simulate.profile.vendor.engines import SPAN, span
from simulate.profile.vendor.errors import Broken
from simulate.profile.vendor.intervals import Covered
from simulate.profile.vendor.records import Synchronization
from simulate.profile.vendor.tables import Kind, Names, Tables


def synchronization(tables: Tables) -> Synchronization:
    """All five tables, added up."""
    updates = tables.count("SemaphoreUpdate") if "SemaphoreUpdate" in tables else None
    barriers, barrier_ns = _barriers(tables)
    throttled_ns, throttled_to = _throttle(tables)
    return Synchronization(
        updates, barriers, barrier_ns, _pending(tables), throttled_ns, throttled_to, _dependences(tables)
    )


def _barriers(tables: Tables) -> tuple[int | None, float | None]:
    count, total = None, None
    for batch in tables.batches("CoreBarriers", SPAN):
        starts, ends = span(batch, "CoreBarriers")
        count = (count or 0) + len(starts)
        total = (total or 0.0) + float((ends - starts).sum(dtype=np.float64))
    return count, total


def _pending(tables: Tables) -> int | None:
    most = None
    for batch in tables.batches("PendingDma", {"value": Kind.whole}):
        most = max(int(batch["value"].max(initial=0)), most or 0)
    return most


def _throttle(tables: Tables) -> tuple[float | None, float | None]:
    covered, lowest = Covered(), None
    needed = {"timestamp": Kind.time, "duration": Kind.time, "k": Kind.whole, "n": Kind.whole}
    for batch in tables.batches("Throttle", needed):
        allowed, most = batch["k"], batch["n"]
        if np.any((allowed < 0) | (most < 1) | (allowed > most)):
            raise Broken("Throttle has a limit k / n that is no share")
        slowed = allowed < most
        starts, lengths = batch["timestamp"][slowed], batch["duration"][slowed]
        covered.add(starts, starts + lengths)
        lowest = min(float((allowed / most).min(initial=1.0)), 1.0 if lowest is None else lowest)
    return (None, None) if lowest is None else (covered.ns, lowest)


def _dependences(tables: Tables) -> dict[str, int]:
    names = Names()
    found: dict[str, int] = {}
    for batch in tables.batches("Flow", {}, {"dependency_type": Kind.text}, names):
        numbers, counts = np.unique(batch["dependency_type"], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist()):
            name = names.of(number) or "unknown"
            found[name] = found.get(name, 0) + count
    return found
