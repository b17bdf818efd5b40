"""Calls on which the simulator is known to be wrong; they are not tried. Empty is the aim.

Each entry names the instruction, what singles the call out, and what is wrong.
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
    """Whether a call is one that the simulator is known to get wrong."""
    return any(known.instruction == instruction and known.concerns(call) for known in KNOWN)
