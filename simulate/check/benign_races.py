"""Benign races: both cores store the same bytes, so that the order of their writes does not matter.

A kernel on two cores that does not divide its work computes and stores everything twice. Its stores race, and so do its
fences, which copy a tensor onto itself. But every write stores the value that the bytes have already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulate.check.footprint import Footprint
from simulate.run.stream import READ, Access


@dataclass(frozen=True, slots=True)
class Use:
    """Access of shared HBM by one core."""

    event: int
    access: Access
    passed: int
    """Number of rendezvous that the core had passed."""
    footprint: Footprint
    is_fence: bool = False
    """Whether the instruction copies the bytes onto themselves."""

    @property
    def writes(self) -> bool:
        """Whether the access may change bytes."""
        return self.access.mode != READ


def write_same_values(first: Use, second: Use) -> bool:
    """Return whether two cores write the same value to every common byte, so that their order does not matter."""
    if not (first.writes and second.writes):
        return False
    if first.footprint.digest == second.footprint.digest and first.footprint.is_same_view(second.footprint):
        return True
    offsets, stored = first.footprint.contents()
    second_offsets, second_stored = second.footprint.contents()
    _, in_first, in_second = np.intersect1d(offsets, second_offsets, assume_unique=True, return_indices=True)
    return np.array_equal(stored[in_first], second_stored[in_second])


def reads_what_it_wrote(
    first: Use, second: Use, first_uses: Sequence[Use], second_uses: Sequence[Use]
) -> bool:
    """Return whether a core reads the bytes that it stored itself since the last rendezvous, while another writes them.

    The race is benign if the other core writes the same bytes. A write by a fence is benign as well: it stores the
    value
    that the bytes have. A fence that undoes a concurrent write races with that write, which is reported.

    Args:
        first: An access of the first core.
        second: An access of the second core to the same tensor.
        first_uses: All accesses of the first core to the tensor.
        second_uses: All accesses of the second core to the tensor.
    """
    if first.writes == second.writes:
        return False
    reading, uses, writing = (second, second_uses, first) if first.writes else (first, first_uses, second)
    if writing.is_fence:
        return True
    since = min(reading.passed, writing.passed)
    offsets, expected = writing.footprint.contents()
    offsets, common, _ = np.intersect1d(
        offsets, reading.footprint.bytes(), assume_unique=True, return_indices=True
    )
    expected = expected[common]
    earlier = [use for use in uses if use.writes and use.event < reading.event and use.passed >= since]
    for use in sorted(earlier, key=lambda use: -use.event):
        written, stored = use.footprint.contents()
        _, unconfirmed, in_use = np.intersect1d(offsets, written, assume_unique=True, return_indices=True)
        if not np.array_equal(expected[unconfirmed], stored[in_use]):
            return False
        offsets, expected = np.delete(offsets, unconfirmed), np.delete(expected, unconfirmed)
        if not offsets.size:
            return True
    return not offsets.size
