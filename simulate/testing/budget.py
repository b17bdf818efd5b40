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
from nkw.report import Noted, Part, table
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
    """Error for a kernel that exceeds its budget.

    `folder` has its report, stream, memory maps and trace; None if no files were written.
    """


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a launch; a limit of None does not apply, and at least one limit must be set.

    Attributes:
        time_us: Largest predicted time from the first instruction to the last result, without the kernel's
            start and end.
        hbm_bytes: Most bytes to and from HBM of all ranks together.
        sbuf_bytes: Most bytes per partition of the tiles that are live at the same time, on the fullest core.
        reading: Name of the `simulate.timing.Reading` of time_us.
        target: The chip; None is the chip that the test runs on.
        trips: Trip counts of device loops over registers, as for `simulate.launch`.

    Raises:
        InvalidArgument: NKW-BUDGET. No limit is set, or a value is out of range.
    """

    time_us: float | None = None
    hbm_bytes: int | None = None
    sbuf_bytes: int | None = None
    reading: str = Reading.program.value
    target: str | None = None
    trips: int | Sequence[int] = ()

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in _LIMITS):
            raise _make_refusal(f"no limit is given; give {', '.join(_LIMITS[:-1])} or {_LIMITS[-1]}")
        time = self.time_us
        if time is not None and (
            isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 < time < math.inf
        ):
            raise _make_refusal(f"time_us is {time!r}, not a number of microseconds above 0")
        for name in _LIMITS[1:]:
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise _make_refusal(f"{name} is {count!r}, not a whole number of bytes")
        if self.reading not in [reading.value for reading in Reading]:
            known = ", ".join(reading.value for reading in Reading)
            raise _make_refusal(f"reading is {self.reading!r}; known are {known}")
        if self.target is not None and self.target not in TARGETS:
            raise _make_refusal(f"target is {self.target!r}; known are {', '.join(TARGETS)}")

    @classmethod
    def from_marker(cls, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Budget:
        """Return the budget that the arguments of the pytest marker `nki_budget` state.

        Args:
            arguments: The positional arguments, of which there may be none.
            keywords: The fields of the budget.

        Raises:
            InvalidArgument: NKW-BUDGET. An argument has no name or is not a field of a budget, or a value is
                out of range.
        """
        known = [field_.name for field_ in fields(cls)]
        if arguments:
            raise _make_refusal(
                f"the argument {arguments[0]!r} has no name; write for instance time_us={arguments[0]!r}"
            )
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise _make_refusal(f"a budget has no {unknown[0]}; known are {', '.join(known)}")
        return cls(**keywords)


@dataclass(frozen=True)
class Predicted:
    """Prediction for a launch, with its profile.

    `time_us` is the time from the first instruction to the last result. `hbm_bytes` counts bytes to and from
    HBM on all ranks. `sbuf_bytes` is the peak in bytes per partition, on the core that uses most of SBUF.
    """

    time_us: float
    hbm_bytes: int
    sbuf_bytes: int
    launch: Launch
    profile: Profile


@dataclass(frozen=True)
class BudgetChecker:
    """Checker of kernels against a budget on one chip.

    `target` is used where the budget names none. `folder` returns the folder for the files of a failure; with
    None no files are written.
    """

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
        """Launch `kernel(*arguments, **keywords)` dry on one rank, and check the prediction against the budget.

        Only shapes and dtypes of arrays matter, and integers that bound device loops if there are no trip
        counts.

        Args:
            kernel: The kernel.
            arguments: Its arguments.
            cores: Number of physical cores of the rank (LNC).
            trips: Trip counts of device loops; None for those of the budget.
            keywords: Its keyword arguments.

        Raises:
            BudgetExceeded: A prediction exceeds its limit.
            NkwError: The launch is refused.
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
        """Launch a kernel dry on several ranks, and check the prediction for all of them together against the budget.

        Args:
            kernel: The kernel.
            arguments: Arguments of each rank.
            cores: Number of physical cores of each rank (LNC).
            trips: Trip counts of device loops; None for those of the budget.

        Raises:
            BudgetExceeded: A prediction exceeds its limit.
            NkwError: The launch is refused.
        """
        return self._check(
            kernel, [(tuple(rank_arguments), {}) for rank_arguments in arguments], cores, trips
        )

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
        prediction = predicted(launch, Reading(self.budget.reading))
        report = excess(self.budget, prediction)
        if report:
            folder = None if self.folder is None else self.folder()
            raise BudgetExceeded(report, folder and write_artifacts(folder, report, launches=[launch]))
        return prediction


def predicted(launch: Launch, reading: Reading = Reading.program) -> Predicted:
    """Return the predicted time, traffic and SBUF of a recorded launch, dry or not.

    Args:
        launch: The launch.
        reading: Which of the timing model's readings of undocumented behaviour the time follows.
    """
    seen = profile(launch.streams, launch.hardware, f"{launch.kernel} on {launch.hardware.label}", reading)
    return Predicted(
        seen.length_ns / 1000,
        seen.roofline.hbm_bytes,
        _find_fullest(launch).peak_bytes,
        launch,
        seen,
    )


def excess(budget: Budget, prediction: Predicted) -> str:
    """Return the report of a launch that exceeds its budget, with the largest contributions; empty if it does not."""
    out: list[str] = []
    tables: list[Part] = []
    if budget.time_us is not None and prediction.time_us > budget.time_us:
        more = prediction.time_us - budget.time_us
        out.append(
            f"  time: {prediction.time_us:.3f} us, budget {budget.time_us:g}: {more:.3g} us too many"
            f" ({100 * more / budget.time_us:.1f} %)"
        )
        tables.append(make_path_table(prediction.profile, _ROWS))
    if budget.hbm_bytes is not None and prediction.hbm_bytes > budget.hbm_bytes:
        out.append(_format_excess("HBM traffic", prediction.hbm_bytes, budget.hbm_bytes, "bytes"))
        tables.append(make_traffic_table(prediction.profile, _ROWS))
    if budget.sbuf_bytes is not None and prediction.sbuf_bytes > budget.sbuf_bytes:
        out.append(_format_excess("SBUF", prediction.sbuf_bytes, budget.sbuf_bytes, "bytes per partition"))
        tables.append(_make_sbuf_table(_find_fullest(prediction.launch)))
    if not out:
        return ""
    head = f"{prediction.profile.title} exceeds its budget ({budget.reading} reading)"
    return (
        "\n".join([head, *out]) + "\n" + rendered(line for table in tables for line in ("", table)).rstrip()
    )


def _format_excess(quantity: str, seen: int, limit: int, unit: str) -> str:
    share = f" ({100 * (seen - limit) / limit:.1f} %)" if limit else ""
    return f"  {quantity}: {seen:,d} {unit}, budget {limit:,d}: {seen - limit:,d} too many{share}"


def _find_fullest(launch: Launch) -> Memory:
    """Return the SBUF of the core with the highest peak of live bytes per partition."""
    return max((occupancy.sbuf for occupancy in occupancies(launch)), key=lambda memory: memory.peak_bytes)


def _make_sbuf_table(memory: Memory) -> Noted:
    live = memory.live_at(memory.peak_event)
    shown = memory.largest_sources[:_ROWS]
    sizes = [[use.bytes for use in live if use.source == number] for number in shown]
    sources = [memory.sources[number] for number in shown]
    rows = [
        (str(source), f"{sum(tile_sizes):,d}", str(len(tile_sizes)))
        for source, tile_sizes in zip(sources, sizes)
    ]
    notes = ["" if source.where is None else str(source.where) for source in sources]
    return Noted(table("live at the peak of SBUF|bytes|tiles", rows), notes)


def _make_refusal(sentence: str) -> InvalidArgument:
    return InvalidArgument("NKW-BUDGET", f"nki_budget: {sentence}")
