"""Rate at which continuations end and free their capacity, measured from the last ones that ended.

The asynchronous engine derives from it when a refused request can be tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_MAX_ENDS = 32
"""Number of the last ends that the rate is measured from."""


class ReleaseRate:
    """Rate at which continuations end, in continuations per second of a clock.

    Idle times, in which no continuation runs, do not count.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken = 0
        self._began = 0.0  # time of the first start after an idle time, or of the oldest recorded end
        self._ends: deque[tuple[float, int]] = deque()
        self._rate: float | None = None

    def take(self, count: int) -> None:
        """Record that `count` continuations start."""
        if not self._taken:
            self._began = self._clock()
            self._ends.clear()
        self._taken += count

    def free(self, count: int, has_begun: bool = True) -> None:
        """Record that `count` continuations end.

        Args:
            count: Number of continuations.
            has_begun: Whether they had been accepted; otherwise they do not count in the rate.
        """
        self._taken -= count
        if not has_begun:
            return
        now = self._clock()
        self._ends.append((now, count))
        if len(self._ends) > _MAX_ENDS:
            self._began, _ = self._ends.popleft()
        if now > self._began:
            self._rate = sum(count for _, count in self._ends) / (now - self._began)

    def estimate_seconds(self, count: int) -> float | None:
        """Return the estimated time in seconds until `count` continuations have ended; None before the first end."""
        return None if self._rate is None else count / self._rate
