"""Benign races: both cores leave the same bytes, whichever core writes last.

A kernel on two cores that does not divide its work computes and stores everything twice. Its stores race, and so do its
fences (copies of a result onto itself), but every write gives a byte the same value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulate.check.footprint import Footprint
from simulate.run.stream import READ, Access


@dataclass(frozen=True, slots=True)
class Use:
    """One access of shared HBM by one core."""

    event: int
    access: Access
    passed: int
    """How many rendezvous its core had passed."""
    footprint: Footprint
    fence: bool = False
    """Whether its instruction copies the bytes onto themselves."""

    @property
    def writes(self) -> bool:
        """Whether the access may change bytes."""
        return self.access.kind != READ


def same_values(left: Use, right: Use) -> bool:
    """Whether both cores write, and give every common byte the same value, so that their order does not matter."""
    one, other = left.footprint, right.footprint
    if not (left.writes and right.writes):
        return False
    if one.digest == other.digest and one.same_place(other):
        return True
    places, values = one.contents()
    others, other_values = other.contents()
    _, here, there = np.intersect1d(places, others, assume_unique=True, return_indices=True)
    return np.array_equal(values[here], other_values[there])


def reads_what_it_wrote(left: Use, right: Use, lefts: Sequence[Use], rights: Sequence[Use]) -> bool:
    """Whether one core reads bytes to which it wrote, since the last rendezvous, what the other core writes there.

    A fence writes the value that the bytes have. A fence that undoes a concurrent write races with that write, which is
    reported; a concurrent reader reads the same value before and after the fence.
    """
    if left.writes == right.writes:
        return False
    reading, own, writing = (right, rights, left) if left.writes else (left, lefts, right)
    if writing.fence:
        return True
    since = min(reading.passed, writing.passed)
    places, values = writing.footprint.contents()
    places, at, _ = np.intersect1d(places, reading.footprint.bytes(), assume_unique=True, return_indices=True)
    values = values[at]
    before = [each for each in own if each.writes and each.event < reading.event and each.passed >= since]
    for each in sorted(before, key=lambda each: -each.event):
        written, left_there = each.footprint.contents()
        _, here, there = np.intersect1d(places, written, assume_unique=True, return_indices=True)
        if not np.array_equal(values[here], left_there[there]):
            return False
        places, values = np.delete(places, here), np.delete(values, here)
        if not places.size:
            return True
    return not places.size
