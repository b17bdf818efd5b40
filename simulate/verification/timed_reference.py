"""Wall-clock time that a verdict spends in its reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nkw.child import show_once

SLOW_SECONDS = 2.0
"""Least time in the reference, in seconds, with which a verdict mentions it."""


class TimedReference:
    """Reference that counts its calls and their wall-clock seconds; what it prints is shown on the first call only."""

    def __init__(self, reference: Callable[..., Any], calls: int = 0, seconds: float = 0.0) -> None:
        self.name = getattr(reference, "__name__", type(reference).__name__)
        self.calls, self.seconds = calls, seconds
        self._reference = show_once(reference)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the reference and return its results; a call that raises an error is counted as well."""
        began = time.perf_counter()
        try:
            return self._reference(*args, **keywords)
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - began

    @property
    def remark(self) -> str:
        """Sentence on a reference that took 2 seconds or more in all calls together; empty for a faster one."""
        if self.seconds < SLOW_SECONDS:
            return ""
        return f"slow reference: {self.name} took {self.seconds:,.1f} s in {self.calls} calls"
