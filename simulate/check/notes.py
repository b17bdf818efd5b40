"""A note: what an observer saw of the values of one operand or result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """An observation about the values of one operand: its event, its tensor and the observed fact as text."""

    event: int
    tensor: int
    seen: str
