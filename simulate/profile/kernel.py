"""`simulate.profile`: the profile of a kernel and its arguments, from a dry launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulate.profile.profile import Profile
from simulate.profile.profile import profile as profile_of_streams
from simulate.run import Mode, recorded
from simulate.timing import Reading
from simulate.world import World, expect_kernel


def profile(
    kernel: Any,
    *arguments: Any,
    target: str | None = None,
    cores: int = 1,
    reading: Reading = Reading.program,
    trips: int | Sequence[int] = (),
    **keywords: Any,
) -> Profile:
    """Predict where the time of `kernel(*arguments, **keywords)` goes on a rank of `cores` physical cores.

    The launch is dry: it is planned, checked and placed, and no numbers are computed. Of arrays only shapes
    and dtypes matter, and integers that bound device loops.

    Args:
        target: The chip; by default that of the environment, else trn2.
        reading: What the schedule lets overlap.
        trips: Trip counts of device loops, as for `simulate.launch`.

    Returns:
        The profile, with times in ns.

    Raises:
        InvalidArgument: If the kernel, reading, target or number of cores is invalid. Errors of the launch
            pass through.

    Kernel parameters with the names of keywords of this function are passed by position. For a launch of
    several ranks use `profile(launch.streams, launch.hardware)` of the package `simulate.profile`.
    """
    expect_kernel("simulate.profile", kernel)
    world = World(target, 1, cores)
    with recorded(calls=True, outputs=False):  # the profile has calling lines
        launch = world.launch(kernel, [(arguments, keywords)], Mode.dry, trips)
    title = f"{launch.kernel} on {launch.hardware.label}"
    return profile_of_streams(launch.streams, launch.hardware, title, reading)
