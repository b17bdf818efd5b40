"""Comparison of the launches of `time` with the device profile that `--against` names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nkw.errors import InvalidArgument
from simulate.memory import MemoryRegion
from simulate.occupancy.sweep import live_bytes
from simulate.profile.profile import Profile
from simulate.profile.vendor.records import DeviceProfile
from simulate.profile.vendor.side_by_side import SideBySide, side_by_side
from simulate.profile.vendor.trace import read_trace_events
from simulate.run import Launch


def pair_launches(measured: DeviceProfile, profiles: Sequence[Profile], first: Launch) -> SideBySide:
    """Return the measurement with the profile that all launches of the run share.

    Args:
        profiles: Profiles of the distinct launches.
        first: First launch of the run, whose use of SBUF is compared too.

    Raises:
        InvalidArgument: If the run makes different launches.
    """
    if len(profiles) > 1:
        raise InvalidArgument(
            "NKW-AGAINST",
            f"--against takes a profile of a single launch, this run makes {len(profiles)} different launches; "
            "give the kernel by name with its shapes",
        )
    return side_by_side(profiles[0], measured, live_bytes(first, MemoryRegion.sbuf))


def read_measured_slices(baseline: object) -> Iterable[dict[str, Any]]:
    """Return the trace events of the device profile `baseline`; empty if the baseline is no device profile."""
    return read_trace_events(baseline.path) if isinstance(baseline, DeviceProfile) else ()
