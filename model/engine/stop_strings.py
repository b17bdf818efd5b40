"""Stop strings, which end a generated text and are searched for while the text is generated."""

from __future__ import annotations

from collections.abc import Sequence

from model.errors import ModelError


class StopStrings:
    """Search for the first stop string in a text that arrives in pieces.

    `matched` is the stop string, or None so far. Text that may become a stop string is kept back.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Create the search before the first piece of a text.

        Args:
            stops: The stop strings.

        Raises:
            ModelError: A stop string is empty.
        """
        if not all(stops):
            raise ModelError("a stop string is empty; every text begins with it: leave it out")
        self._stops = tuple(stops)
        self._pending = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Append a piece of text, and return the text that can now be output because it is before any stop string.

        Sets `matched` if the text has a stop string; the stop string and the text after it are never returned.
        """
        self._pending += text
        matches = [(index, stop) for stop in self._stops if (index := self._pending.find(stop)) >= 0]
        if matches:
            end, self.matched = min(matches)
            self._pending = self._pending[:end]
            return self.finish()
        end = len(self._pending) - max(
            (_count_overlap(self._pending, stop) for stop in self._stops), default=0
        )
        certain, self._pending = self._pending[:end], self._pending[end:]
        return certain

    def finish(self) -> str:
        """Return the text that was kept back, after the last piece; later calls return nothing."""
        pending, self._pending = self._pending, ""
        return pending


def _count_overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning, but not the whole, of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
