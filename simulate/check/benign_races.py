"""Benign races: both cores store the same bytes, so that the order of their writes does not matter.

A kernel on two cores that does not divide its work computes and stores everything twice. Its stores race, and
so do its fences: DMAs that copy a tensor onto itself. But every write stores the value that the bytes have
already. The detector `race` calls the functions of this module and does not report such races as errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulate.check.footprint import Footprint
from simulate.run.stream import READ, Access


@dataclass(frozen=True, slots=True)
class Use:
    """Access of shared HBM by one event of one core, with the bytes that it touches."""

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
    """Return whether two cores write equal values to every byte that both write, so that the order does not matter.

    False if one of the accesses is a read.
    """
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
    """Return whether a race of a read with a write is benign, because the write stores what the reader stored itself.

    The reader must have stored, since the last rendezvous that both cores passed, the same bytes as the other
    core writes. A write by a fence, which copies a tensor onto itself, is always benign: it stores the value
    that the bytes have. A fence that undoes a concurrent write is reported as a race with that write. False
    if both accesses read or both write.

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
