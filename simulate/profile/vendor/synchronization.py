"""Reading of a device profile's tables SemaphoreUpdate, CoreBarriers, PendingDma, Throttle and Flow.

They tell waits and throttling.
"""

from __future__ import annotations

import numpy as np

from simulate.profile.vendor.engines import SPAN, get_span
from simulate.profile.vendor.errors import Broken
from simulate.profile.vendor.intervals import Covered
from simulate.profile.vendor.records import Synchronization
from simulate.profile.vendor.tables import ColumnType, Names, Tables


def sum_synchronization(tables: Tables) -> Synchronization:
    """Return the sums over the five tables; a figure is None if the profile lacks the table."""
    updates = tables.count_rows("SemaphoreUpdate") if "SemaphoreUpdate" in tables else None
    barriers, barrier_ns = _sum_barriers(tables)
    throttled_ns, throttled_to = _sum_throttle(tables)
    return Synchronization(
        updates,
        barriers,
        barrier_ns,
        _find_peak_pending(tables),
        throttled_ns,
        throttled_to,
        _count_dependences(tables),
    )


def _sum_barriers(tables: Tables) -> tuple[int | None, float | None]:
    """Return (number of core barriers, their total time in ns); (None, None) without the table."""
    count, total = None, None
    for batch in tables.read_batches("CoreBarriers", SPAN):
        starts, ends = get_span(batch, "CoreBarriers")
        count = (count or 0) + len(starts)
        total = (total or 0.0) + float((ends - starts).sum(dtype=np.float64))
    return count, total


def _find_peak_pending(tables: Tables) -> int | None:
    """Return the largest number of DMAs pending at one time, or None without the table."""
    peak = None
    for batch in tables.read_batches("PendingDma", {"value": ColumnType.integer}):
        peak = max(int(batch["value"].max(initial=0)), peak or 0)
    return peak


def _sum_throttle(tables: Tables) -> tuple[float | None, float | None]:
    """Return (throttled time in ns, lowest utilisation that was allowed, between 0 and 1).

    (None, None) without the table.

    Raises:
        Broken: If a limit is outside 0 to 1.
    """
    covered, lowest = Covered(), None
    needed = {
        "timestamp": ColumnType.time,
        "duration": ColumnType.time,
        "k": ColumnType.integer,
        "n": ColumnType.integer,
    }
    for batch in tables.read_batches("Throttle", needed):
        allowed, full = batch["k"], batch["n"]
        if np.any((allowed < 0) | (full < 1) | (allowed > full)):
            raise Broken("Throttle has a limit k / n outside 0 to 1")
        slowed = allowed < full
        starts, lengths = batch["timestamp"][slowed], batch["duration"][slowed]
        covered.add(starts, starts + lengths)
        lowest = min(float((allowed / full).min(initial=1.0)), 1.0 if lowest is None else lowest)
    return (None, None) if lowest is None else (covered.ns, lowest)


def _count_dependences(tables: Tables) -> dict[str, int]:
    """Return the number of rows of the table Flow by type of dependence; empty without the table."""
    names = Names()
    counts_by_type: dict[str, int] = {}
    for batch in tables.read_batches("Flow", {}, {"dependency_type": ColumnType.text}, names):
        numbers, counts = np.unique(batch["dependency_type"], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist()):
            name = names.get_text(number) or "unknown"
            counts_by_type[name] = counts_by_type.get(name, 0) + count
    return counts_by_type
