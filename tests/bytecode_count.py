"""Counts the work of Python code without a clock: executed bytecodes, and comparisons of strings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_bytecodes(action: Callable[[], object]) -> int:
    """Return how many bytecodes a call executes, including those of all Python functions that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


class CountedName(str):
    """A string that counts its comparisons with other strings, for work that NumPy and Python do in C."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)
