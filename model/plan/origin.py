"""Origin of a number in the planner's records: its source, and the confidence in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Confidence(Enum):
    """How a number of a record became known, from the surest to the least sure way.

    `documented` by the vendor, `measured` by this project, `fitted` to published runs, `derived` from other numbers, or
    `assumed` without evidence.
    """

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
