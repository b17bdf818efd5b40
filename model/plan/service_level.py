"""Service levels: the longest times that requests may take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model.errors import ModelError

DEFAULT_LEVEL = "ttft=500ms,itl=50ms"
SHARE = 0.99
"""Share of the requests that have to keep a service level, as in MLPerf's server scenario for language models."""

_UNITS_NS = {"us": 1e3, "ms": 1e6, "s": 1e9}


class RequestTimes(Protocol):
    """Times of a request in ns: to its first token, the mean between its tokens, and from arrival to its last token."""

    @property
    def ttft_ns(self) -> float:
        """Time from arrival to the first token."""

    @property
    def mean_itl_ns(self) -> float:
        """Mean time between tokens."""

    @property
    def e2e_ns(self) -> float:
        """Time from arrival to the last token."""


@dataclass(frozen=True)
class ServiceLevel:
    """Longest times of a request in ns; None bounds nothing.

    `ttft` is the time to first token, `itl` the mean time between tokens, and `e2e` the time from arrival to the last
    token.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether any time is bounded."""
        return (self.ttft, self.itl, self.e2e) != (None, None, None)

    def __str__(self) -> str:
        bounds = (("ttft", self.ttft), ("itl", self.itl), ("e2e", self.e2e))
        return ", ".join(f"{name} {bound / 1e6:,g} ms" for name, bound in bounds if bound is not None)

    @classmethod
    def parse(cls, text: str) -> ServiceLevel:
        """Read a service level such as ttft=500ms,itl=50ms.

        Raises:
            ModelError: If the text has another form, or names a time twice or a bound of 0.
        """
        bounds: dict[str, float] = {}
        for bound in text.split(","):
            match = re.fullmatch(r"(ttft|itl|e2e)=(\d{1,9}(?:\.\d{1,9})?)(us|ms|s)", bound.strip())
            if match is None or match[1] in bounds or not float(match[2]):
                raise ModelError(
                    f"service level {text!r:.60}; write one or more of ttft, itl and e2e, each once and above 0, as in "
                    "ttft=500ms,itl=50ms,e2e=10s"
                )
            bounds[match[1]] = float(match[2]) * _UNITS_NS[match[3]]
        return cls(**bounds)

    def list_excesses(self, times: RequestTimes) -> dict[str, float]:
        """Return the bounds that a request exceeds, by name, with the ratio of the time to the bound."""
        bounds = (
            ("ttft", self.ttft, times.ttft_ns),
            ("itl", self.itl, times.mean_itl_ns),
            ("e2e", self.e2e, times.e2e_ns),
        )
        return {
            name: time_ns / bound for name, bound, time_ns in bounds if bound is not None and time_ns > bound
        }

    def is_met(self, times: RequestTimes) -> bool:
        """Return whether a request kept the service level."""
        return not self.list_excesses(times)

    def holds(self, requests: Sequence[RequestTimes]) -> bool:
        """Return whether a share of at least `SHARE` of the requests kept the service level."""
        return sum(map(self.is_met, requests)) >= SHARE * len(requests)
