"""Calls on which the simulator is known to be wrong; the lockstep skips them. The list should be empty.

Each entry has the instruction, a predicate that selects the calls, and the mistake in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """One known mistake."""

    instruction: str
    concerns: Callable[[Mapping[str, Any]], bool]
    mistake: str


KNOWN: tuple[Known, ...] = ()


def is_known(instruction: str, call: Mapping[str, Any]) -> bool:
    """Return whether a call is one that the simulator is known to get wrong."""
    return any(known.instruction == instruction and known.concerns(call) for known in KNOWN)
