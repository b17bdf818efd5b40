"""Service levels: the longest times that requests may take, as the option `--sla` gives them.

Plans, recommendations and simulated traffic compare the times of requests with a service level.
"""

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
    """Times of one request in ns, as plans, recommendations and traffic provide them."""

    @property
    def ttft_ns(self) -> float:
        """Time from arrival to the first token in ns."""

    @property
    def mean_itl_ns(self) -> float:
        """Mean time between tokens in ns."""

    @property
    def e2e_ns(self) -> float:
        """Time from arrival to the last token in ns."""


@dataclass(frozen=True)
class ServiceLevel:
    """Longest times of a request in ns; None means no limit.

    `ttft` is the time to first token, `itl` the mean time between tokens, and `e2e` the time from arrival to the last
    token.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether at least one of the three times has a limit."""
        return (self.ttft, self.itl, self.e2e) != (None, None, None)

    def __str__(self) -> str:
        bounds = (("ttft", self.ttft), ("itl", self.itl), ("e2e", self.e2e))
        return ", ".join(f"{name} {bound / 1e6:,g} ms" for name, bound in bounds if bound is not None)

    @classmethod
    def parse(cls, text: str) -> ServiceLevel:
        """Return the service level written in a text such as ttft=500ms,itl=50ms; units are us, ms and s.

        Raises:
            ModelError: If the text has another form, names a time twice, or gives a limit of 0.
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
        """Return, by name (ttft, itl, e2e), the ratio of time to limit for each limit that a request exceeds.

        The dict is empty if the request keeps the service level.
        """
        bounds = (
            ("ttft", self.ttft, times.ttft_ns),
            ("itl", self.itl, times.mean_itl_ns),
            ("e2e", self.e2e, times.e2e_ns),
        )
        return {
            name: time_ns / bound for name, bound, time_ns in bounds if bound is not None and time_ns > bound
        }

    def is_met(self, times: RequestTimes) -> bool:
        """Return whether one request exceeds none of the limits."""
        return not self.list_excesses(times)

    def holds(self, requests: Sequence[RequestTimes]) -> bool:
        """Return whether at least 99 % of the requests (`SHARE`) exceed none of the limits; True without requests."""
        return sum(map(self.is_met, requests)) >= SHARE * len(requests)
