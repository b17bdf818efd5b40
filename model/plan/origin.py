"""Where a number comes from: its source, and how well it is known."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Confidence(Enum):
    """How well a number of a record is known."""

    documented = "documented"
    measured = "measured"
    fitted = "fitted"
    derived = "derived"
    assumed = "assumed"


@dataclass(frozen=True)
class Origin:
    """The source of a number or a fact of a record, and the confidence in it."""

    source: str
    confidence: Confidence
