"""The profile of a kernel and its arguments, without a launch of one's own: `simulate.profile`."""

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
    """Where the time of `kernel(*arguments, **keywords)` goes on one rank of `cores` physical cores.

    The launch is dry: it is planned, checked and placed, and no numbers are computed. Of arrays only shapes and dtypes
    matter, and integers that bound device loops. target: the chip, default that of the environment, else trn2. reading:
    what may overlap. trips: trip counts of device loops, as for `simulate.launch`. A parameter of the kernel that has
    one of these names is given by place. Times of the profile are in ns.

    Raises InvalidArgument for what is no kernel, reading, target or number of cores, and what the launch raises. The
    profile of a launch of several ranks: `simulate.profile.profile(launch.streams, launch.hardware)`, imported from
    `simulate.profile`.
    """
    expect_kernel("simulate.profile", kernel)
    world = World(target, 1, cores)
    with recorded(calls=True, outputs=False):  # the profile has calling lines
        launch = world.launch(kernel, [(arguments, keywords)], Mode.dry, trips)
    title = f"{launch.kernel} on {launch.hardware.label}"
    return profile_of_streams(launch.streams, launch.hardware, title, reading)
