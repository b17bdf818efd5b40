"""The memory of a kernel and its arguments, without a launch of one's own: `simulate.occupancy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nkw.errors import RuleViolation
from simulate.occupancy.uses import Occupancy, occupancies
from simulate.run import Mode, recorded
from simulate.world import World, expect_kernel


def occupancy(
    kernel: Any,
    *arguments: Any,
    target: str | None = None,
    cores: int = 1,
    trips: int | Sequence[int] = (),
    **keywords: Any,
) -> Occupancy:
    """What `kernel(*arguments, **keywords)` has in SBUF and PSUM, also where that does not fit.

    The launch is dry, as for `simulate.profile`, which has the same options. Of several physical cores it is the one
    with the largest share of a memory's usable bytes live at one time, the first of equal ones. Sizes of the occupancy
    are in bytes per partition.

    Raises InvalidArgument for what is no kernel, target or number of cores, and what the launch raises, but for tiles
    that do not fit. All cores of a launch: `occupancies(launch)` of `simulate.occupancy`.
    """
    expect_kernel("simulate.occupancy", kernel)
    world = World(target, 1, cores)
    with recorded(calls=True, refused=True, outputs=False) as launches:
        try:
            world.launch(kernel, [(arguments, keywords)], Mode.dry, trips)
        except RuleViolation:
            if not launches:  # the kernel did not run to its end: there is more wrong than its size
                raise
    return max(occupancies(launches[-1]), key=_share)


def _share(core: Occupancy) -> float:
    return max(memory.peak_bytes / memory.usable_bytes for memory in core.memories)
