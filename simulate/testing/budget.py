"""Budgets: limits on the predicted time, the HBM traffic and the SBUF of a kernel.

A dry launch computes no numbers, so a budget is checked in milliseconds, also for shapes too large to compute.
`simulate.pytest_plugin` offers it as the marker and the fixture `nki_budget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nkw.errors import InvalidArgument
from nkw.parts import Noted, Part, table
from nkw.targets import TARGETS
from nkw.terminal import rendered
from simulate.occupancy import Memory, occupancies
from simulate.profile import Profile, profile
from simulate.profile.text import make_path_table, make_traffic_table
from simulate.run import Launch, Mode
from simulate.testing.artifacts import write_artifacts
from simulate.testing.kernel import KernelFailure
from simulate.timing import Reading
from simulate.world import World

_ROWS = 5  # of each table in the report of a failure
_LIMITS = ("time_us", "hbm_bytes", "sbuf_bytes")


class BudgetExceeded(KernelFailure):
    """A kernel is predicted to take more than its budget; `folder` has its stream, memory maps and trace."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of a launch; None: no limit.

    time_us: the predicted length from the first instruction to the last result, under `reading`; starting and ending
    the kernel is not in it. hbm_bytes: bytes to and from HBM of all ranks together. sbuf_bytes: bytes per partition
    of the tiles that are live at one time, on the core where they are most. reading: the name of a
    `simulate.timing.Reading`. target: a chip; None: the one that the test runs on. trips: trip counts of device loops
    over registers, as for `simulate.launch`.

    Raises InvalidArgument for a budget of nothing, and for a value that cannot be one.
    """

    time_us: float | None = None
    hbm_bytes: int | None = None
    sbuf_bytes: int | None = None
    reading: str = Reading.program.value
    target: str | None = None
    trips: int | Sequence[int] = ()

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in _LIMITS):
            raise _refused(f"no limit is given; give {', '.join(_LIMITS[:-1])} or {_LIMITS[-1]}")
        time = self.time_us
        if time is not None and (
            isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 < time < math.inf
        ):
            raise _refused(f"time_us is {time!r}, not a number of microseconds above 0")
        for name in _LIMITS[1:]:
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise _refused(f"{name} is {count!r}, not a whole number of bytes")
        if self.reading not in [reading.value for reading in Reading]:
            known = ", ".join(reading.value for reading in Reading)
            raise _refused(f"reading is {self.reading!r}; known are {known}")
        if self.target is not None and self.target not in TARGETS:
            raise _refused(f"target is {self.target!r}; known are {', '.join(TARGETS)}")

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Budget:
        """The budget that a marker states. Raises InvalidArgument for what is no field of a budget."""
        known = [each.name for each in fields(cls)]
        if arguments:
            raise _refused(
                f"the argument {arguments[0]!r} has no name; write for instance time_us={arguments[0]!r}"
            )
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise _refused(f"a budget has no {unknown[0]}; known are {', '.join(known)}")
        return cls(**keywords)


@dataclass(frozen=True)
class Predicted:
    """The predicted figures of a launch in the terms of its budget, and its profile."""

    time_us: float
    hbm_bytes: int
    sbuf_bytes: int
    launch: Launch
    profile: Profile


@dataclass(frozen=True)
class BudgetChecker:
    """Holds kernels to a budget on one chip; `folder` gives the folder for the files of a failure, None: no files."""

    budget: Budget
    target: str | None = None
    folder: Callable[[], Path] | None = field(default=None, compare=False)

    def __call__(
        self,
        kernel: Any,
        *arguments: Any,
        cores: int = 1,
        trips: int | Sequence[int] | None = None,
        **keywords: Any,
    ) -> Predicted:
        """Hold `kernel(*arguments, **keywords)` on one rank of `cores` physical cores to the budget.

        Of arrays only shape and dtype matter, and integers that bound device loops where there are no trip counts.
        `trips` replaces the budget's trip counts. Raises BudgetExceeded, and what the launch raises.
        """
        return self._check(kernel, [(arguments, keywords)], cores, trips)

    def ranks(
        self,
        kernel: Any,
        arguments: Sequence[tuple[Any, ...]],
        *,
        cores: int = 1,
        trips: int | Sequence[int] | None = None,
    ) -> Predicted:
        """Hold a kernel on several ranks, each with its arguments, to the budget."""
        return self._check(kernel, [(tuple(given), {}) for given in arguments], cores, trips)

    def _check(
        self,
        kernel: Any,
        arguments: list[tuple[tuple[Any, ...], dict[str, Any]]],
        cores: int,
        trips: int | Sequence[int] | None,
    ) -> Predicted:
        world = World(self.budget.target or self.target, len(arguments), cores)
        counts = self.budget.trips if trips is None else trips
        launch = world.launch(kernel, arguments, Mode.dry, counts)
        found = predicted(launch, Reading(self.budget.reading))
        report = excess(self.budget, found)
        if report:
            folder = None if self.folder is None else self.folder()
            raise BudgetExceeded(report, folder and write_artifacts(folder, report, launches=[launch]))
        return found


def predicted(launch: Launch, reading: Reading = Reading.program) -> Predicted:
    """The predicted figures of a recorded launch, dry or not."""
    seen = profile(launch.streams, launch.hardware, f"{launch.kernel} on {launch.hardware.label}", reading)
    return Predicted(
        seen.length_ns / 1000,
        seen.roofline.hbm_bytes,
        _fullest(launch).peak_bytes,
        launch,
        seen,
    )


def excess(budget: Budget, found: Predicted) -> str:
    """The report of a launch that exceeds its budget, with the largest contributions; empty for one that does not."""
    out: list[str] = []
    tables: list[Part] = []
    if budget.time_us is not None and found.time_us > budget.time_us:
        more = found.time_us - budget.time_us
        out.append(
            f"  time: {found.time_us:.3f} us, budget {budget.time_us:g}: {more:.3g} us too many"
            f" ({100 * more / budget.time_us:.1f} %)"
        )
        tables.append(make_path_table(found.profile, _ROWS))
    if budget.hbm_bytes is not None and found.hbm_bytes > budget.hbm_bytes:
        out.append(_over("HBM traffic", found.hbm_bytes, budget.hbm_bytes, "bytes"))
        tables.append(make_traffic_table(found.profile, _ROWS))
    if budget.sbuf_bytes is not None and found.sbuf_bytes > budget.sbuf_bytes:
        out.append(_over("SBUF", found.sbuf_bytes, budget.sbuf_bytes, "bytes per partition"))
        tables.append(_sbuf_table(_fullest(found.launch)))
    if not out:
        return ""
    head = f"{found.profile.title} exceeds its budget ({budget.reading} reading)"
    return (
        "\n".join([head, *out]) + "\n" + rendered(part for table in tables for part in ("", table)).rstrip()
    )


def _over(what: str, seen: int, limit: int, unit: str) -> str:
    share = f" ({100 * (seen - limit) / limit:.1f} %)" if limit else ""
    return f"  {what}: {seen:,d} {unit}, budget {limit:,d}: {seen - limit:,d} too many{share}"


def _fullest(launch: Launch) -> Memory:
    """SBUF of the core that uses most of it."""
    return max((each.sbuf for each in occupancies(launch)), key=lambda memory: memory.peak_bytes)


def _sbuf_table(memory: Memory) -> Noted:
    live = memory.live_at(memory.peak_event)
    shown = memory.largest_sources[:_ROWS]
    sizes = [[use.bytes for use in live if use.source == number] for number in shown]
    sources = [memory.sources[number] for number in shown]
    rows = [(str(each), f"{sum(part):,d}", str(len(part))) for each, part in zip(sources, sizes)]
    notes = ["" if each.where is None else str(each.where) for each in sources]
    return Noted(table("live at the peak of SBUF|bytes|tiles", rows), notes)


def _refused(sentence: str) -> InvalidArgument:
    return InvalidArgument("NKW-BUDGET", f"nki_budget: {sentence}")
