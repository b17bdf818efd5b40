"""The core's DMA engines as one pool of time that DMAs share."""

from __future__ import annotations

from bisect import bisect_right


class DmaPool:
    """When the DMA engines of a core are taken.

    All engines together are one server. DMAs ask in program order; each takes the earliest free time from its
    arrival on, in pieces where earlier DMAs have taken parts of it already. So the engines never idle while a
    DMA waits, a store that waits for its data does not hold up the loads behind it, and one queue is served
    first come, first served.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._owners: list[int] = []

    def take(self, arrival_ns: float, busy_ns: float, owner: int) -> tuple[float, float, int]:
        """Reserve `busy_ns` from `arrival_ns` on: (begin, end, the DMA it waited for last or -1)."""
        starts, ends = self._starts, self._ends
        first = at = bisect_right(ends, arrival_ns)
        count = len(starts)
        moment, need = arrival_ns, busy_ns
        blocker = -1
        begin: float | None = None
        while True:
            if at < count and starts[at] <= moment:
                moment, blocker = ends[at], self._owners[at]
                at += 1
                continue
            if begin is None:
                begin = moment
            if at < count and starts[at] < moment + need:
                need -= starts[at] - moment
                moment = starts[at]
                continue
            break
        end = max(moment + need, begin + busy_ns)
        if busy_ns > 0.0:
            # Everything from the first interval passed to the end is taken now, without a gap.
            low = min(starts[first], begin) if at > first else begin
            starts[first:at] = [low]
            ends[first:at] = [end]
            self._owners[first:at] = [owner]
        return begin, end, blocker
