"""How fast places become free, measured from the last requests that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_KEPT = 32


class Pace:
    """Places that were taken and became free, by a clock of seconds.

    Only times in which places are taken count, so that an idle hour makes no later estimate slower.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken = 0
        self._began = 0.0  # when the first place was taken, or the oldest end of those kept
        self._ends: deque[tuple[float, int]] = deque()
        self._rate: float | None = None

    def take(self, places: int) -> None:
        """Some places are taken."""
        if not self._taken:
            self._began = self._clock()
            self._ends.clear()
        self._taken += places

    def free(self, places: int, counts: bool = True) -> None:
        """Some places are free again; where it `counts`, because what held them has ended."""
        self._taken -= places
        if not counts:
            return
        now = self._clock()
        self._ends.append((now, places))
        if len(self._ends) > _KEPT:
            self._began, _ = self._ends.popleft()
        if now > self._began:
            self._rate = sum(each for _, each in self._ends) / (now - self._began)

    def seconds(self, places: int) -> float | None:
        """In how many seconds so many places will have become free; None while nothing is known."""
        return None if self._rate is None else places / self._rate
