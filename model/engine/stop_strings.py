"""Stop strings: where a generated text ends, found while it comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from model.errors import ModelError


class StopStrings:
    """Gives out the text before the first stop string, `found`, and holds back what may still become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """ModelError for an empty stop string, which every text begins with."""
        if not all(stops):
            raise ModelError("a stop string is empty; every text begins with it")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to stand before a stop string, now that `text` has come."""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            first, self.found = min(places)
            given, self._held = self._held[:first], ""
            return given
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        given, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return given

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        given, self._held = self._held, ""
        return given


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
