"""Function `simulate.occupancy`: the memory that a kernel needs for given arguments, from a dry launch."""

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
    """Return the occupancy of SBUF and PSUM by `kernel(*arguments, **keywords)`, even if it does not fit.

    The launch is dry, as for `simulate.profile`, which has the same keywords. Of several physical cores, it
    describes the core with the largest live share of a memory's usable bytes, the first among equals. Sizes
    are in bytes per partition.

    Raises:
        InvalidArgument: If the kernel, target or number of cores is invalid. Errors of the launch pass
            through, except for tiles that do not fit.

    For all cores of a launch use `occupancies(launch)` of `simulate.occupancy`.
    """
    expect_kernel("simulate.occupancy", kernel)
    world = World(target, 1, cores)
    with recorded(calls=True, refused=True, outputs=False) as launches:
        try:
            world.launch(kernel, [(arguments, keywords)], Mode.dry, trips)
        except RuleViolation:
            if not launches:  # the kernel did not run to its end, so its size is not the only error
                raise
    return max(occupancies(launches[-1]), key=_compute_share)


def _compute_share(core: Occupancy) -> float:
    """Return the larger of two shares: most live bytes over usable bytes in SBUF and in PSUM; above 1 if too many."""
    return max(memory.peak_bytes / memory.usable_bytes for memory in core.memories)
