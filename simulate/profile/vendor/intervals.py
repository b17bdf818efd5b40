"""Unions of time intervals that are added in any order, such as the active times of an engine, and peaks of overlaps.

An interval is given by its start and end, two integers; intervals are passed as two arrays of equal length.
The readers of the profile's tables add a batch of rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntColumn = NDArray[np.int64]
_MERGED_AT = 1 << 18  # number of stored intervals at which they are merged


class Covered:
    """Union of intervals that are added in any order; `ns` is its length.

    It is stored as disjoint intervals of 16 bytes each, so that memory grows with the gaps and not with the
    rows.
    """

    def __init__(self) -> None:
        self._starts: list[IntColumn] = []
        self._ends: list[IntColumn] = []
        self._count, self._merge_at = 0, _MERGED_AT

    def add(self, starts: IntColumn, ends: IntColumn) -> None:
        """Add intervals to the union, given arrays of their starts and ends in ns; they may overlap."""
        starts, ends = _merge_intervals(starts, ends)
        self._starts.append(starts)
        self._ends.append(ends)
        self._count += len(starts)
        if self._count > self._merge_at:
            self._merge()
            self._merge_at = max(2 * self._count, _MERGED_AT)

    @property
    def ns(self) -> float:
        """Length of the union in ns: time that several intervals cover counts once."""
        self._merge()
        return float(sum(int((ends - starts).sum()) for starts, ends in zip(self._starts, self._ends)))

    def _merge(self) -> None:
        """Replace the stored intervals by disjoint ones with the same union, in order of start."""
        if len(self._starts) > 1:
            starts, ends = _merge_intervals(np.concatenate(self._starts), np.concatenate(self._ends))
            self._starts, self._ends, self._count = [starts], [ends], len(starts)


@dataclass
class Extent:
    """First start and last end of all events that were added, in ns; both None before the first event."""

    first_ns: int | None = None
    last_ns: int | None = None

    def add(self, starts: IntColumn, ends: IntColumn) -> None:
        """Extend the extent by events, given arrays of their starts and ends in ns.

        Empty arrays change nothing.
        """
        if len(starts):
            first, last = int(starts.min()), int(ends.max())
            self.first_ns = first if self.first_ns is None else min(first, self.first_ns)
            self.last_ns = last if self.last_ns is None else max(last, self.last_ns)


def find_peak_overlap(starts: IntColumn, ends: IntColumn, sizes: IntColumn) -> int:
    """Return the largest sum of sizes at any time, where each interval has its size from its start to its end.

    With allocations as intervals and their bytes as sizes, that is the most bytes allocated at one time. An
    interval that ends at some time does not overlap an interval that starts then. Returns 0 without
    intervals.

    Args:
        starts: Starts of the intervals.
        ends: Ends of the intervals.
        sizes: Size of each interval.
    """
    if not len(starts):
        return 0
    times_ns = np.concatenate([starts, ends])
    change = np.concatenate([sizes, -sizes]).astype(np.float64)  # no sum wraps around
    order = np.lexsort((change, times_ns))
    return int(np.cumsum(change[order]).max(initial=0))


def _merge_intervals(starts: IntColumn, ends: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Return (starts, ends) of the disjoint intervals with the same union, in order of start.

    Intervals that touch are merged.
    """
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(starts[1:] > reached[:-1])
    return starts[np.concatenate([[0], breaks + 1])], reached[np.concatenate([breaks, [len(starts) - 1]])]
