"""The time that intervals cover, which arrive in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntColumn = NDArray[np.int64]
_MERGED_AT = 1 << 18  # intervals that are kept before they are merged again


class Covered:
    """A union of intervals, kept as disjoint ones: 16 bytes each."""

    def __init__(self) -> None:
        self._starts: list[IntColumn] = []
        self._ends: list[IntColumn] = []
        self._count, self._merge_at = 0, _MERGED_AT

    def add(self, starts: IntColumn, ends: IntColumn) -> None:
        """Intervals from each start to its end, in ns."""
        starts, ends = _merged(starts, ends)
        self._starts.append(starts)
        self._ends.append(ends)
        self._count += len(starts)
        if self._count > self._merge_at:
            self._merge()
            self._merge_at = max(2 * self._count, _MERGED_AT)

    @property
    def ns(self) -> float:
        """The length of the union."""
        self._merge()
        return float(sum(int((ends - starts).sum()) for starts, ends in zip(self._starts, self._ends)))

    def _merge(self) -> None:
        if len(self._starts) > 1:
            starts, ends = _merged(np.concatenate(self._starts), np.concatenate(self._ends))
            self._starts, self._ends, self._count = [starts], [ends], len(starts)


@dataclass
class Extent:
    """The first start and the last end of events; None without any."""

    first_ns: int | None = None
    last_ns: int | None = None

    def add(self, starts: IntColumn, ends: IntColumn) -> None:
        """More events."""
        if len(starts):
            first, last = int(starts.min()), int(ends.max())
            self.first_ns = first if self.first_ns is None else min(first, self.first_ns)
            self.last_ns = last if self.last_ns is None else max(last, self.last_ns)


def most_at_once(starts: IntColumn, ends: IntColumn, sizes: IntColumn) -> int:
    """The largest sum of the sizes of intervals that overlap; one that ends leaves before one that starts there."""
    if not len(starts):
        return 0
    when = np.concatenate([starts, ends])
    change = np.concatenate([sizes, -sizes]).astype(np.float64)  # no sum wraps around
    order = np.lexsort((change, when))
    return int(np.cumsum(change[order]).max(initial=0))


def _merged(starts: IntColumn, ends: IntColumn) -> tuple[IntColumn, IntColumn]:
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(starts[1:] > reached[:-1])
    return starts[np.concatenate([[0], apart + 1])], reached[np.concatenate([apart, [len(starts) - 1]])]
