"""What `time --against PROFILE` does with the launches of its run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nkw.errors import InvalidArgument
from simulate.memory import MemoryRegion
from simulate.occupancy.sweep import live_bytes
from simulate.profile.profile import Profile
from simulate.profile.vendor.records import DeviceProfile
from simulate.profile.vendor.side_by_side import SideBySide, side_by_side
from simulate.profile.vendor.trace import measured_events
from simulate.run import Launch


def pairs(measured: DeviceProfile, profiles: Sequence[Profile], first: Launch) -> SideBySide:
    """The measurement beside the one profile that all launches share. Raises InvalidArgument for different launches."""
    if len(profiles) > 1:
        raise InvalidArgument(
            "NKW-AGAINST",
            f"a profile is of one kernel, and this run makes {len(profiles)} different launches; give the kernel by "
            "name with its shapes",
        )
    return side_by_side(profiles[0], measured, live_bytes(first, MemoryRegion.sbuf))


def measured_slices(before: object) -> Iterable[dict[str, Any]]:
    """The slices of a device profile for a trace; none of anything else."""
    return measured_events(before.path) if isinstance(before, DeviceProfile) else ()
