"""Device profiles in a bundle's result, compared with the predictions of its cases: engines, DMA queues and lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nkw.errors import InvalidArgument, shown
from nkw.report import Hanging, Part
from simulate.bundle.manifest import Case
from simulate.bundle.reading import resolve_inside
from simulate.bundle.result import RESULT_FOLDER, CaseResult
from simulate.profile.numbers import format_us
from simulate.profile.vendor import DeviceProfile, read_profile
from simulate.profile.vendor.side_by_side import Pair, pair_amounts, pair_lines
from simulate.profile.vendor.text import make_named_table, make_pairs_table, make_records

_MOST_LINES = 8
_TRACE = ".ntff"  # the profiler's recording, which `neuron-explorer view` converts to tables


@dataclass(frozen=True)
class CaseProfile:
    """Measured and predicted times of a case in ns: in total, by engine or DMA queue, and by line.

    If the profile cannot be read, `unread` is the reason, and the other fields are empty.
    """

    total: Pair | None = None
    engines: tuple[Pair, ...] = ()
    lines: tuple[Pair, ...] = ()
    unread: str = ""


def read_case_profile(folder: Path, case: Case, result: CaseResult | None) -> CaseProfile | None:
    """Read the device profile of a case and pair it with the prediction; None if no profile came back.

    If the profile cannot be read, a `CaseProfile` with the reason in `unread` is returned.

    Args:
        folder: Folder of the bundle, with the result in its folder `result`.
    """
    if result is None or result.profile is None:
        return None
    if result.profile.endswith(_TRACE):
        return CaseProfile(unread="only the .ntff came back; neuron-explorer view makes tables of it")
    try:
        profile = read_profile(resolve_inside(folder / RESULT_FOLDER, result.profile))
    except InvalidArgument as broken:
        return CaseProfile(unread=broken.message)
    return _pair_with_prediction(case, profile)


def _pair_with_prediction(case: Case, profile: DeviceProfile) -> CaseProfile:
    """Return the predicted times of a case, each with the measured time.

    An engine's times are summed over cores.
    """
    predicted = case.predicted
    measured: dict[str, float] = {}
    for name, active_ns in (
        *((engine.name, engine.active_ns) for engine in profile.engines),
        *((queue.name, queue.active_ns) for queue in profile.dma.queues),
    ):
        measured[name] = measured.get(name, 0.0) + active_ns
    lines = [((line.file, line.line), line.busy_ns) for line in predicted.lines]
    return CaseProfile(
        Pair("total_time", predicted.program_ns + predicted.overhead_ns, profile.total_ns),
        pair_amounts(predicted.engines, measured, keep_order=True),
        pair_lines(lines, profile) if profile.lines else (),
    )


def make_profile_parts(name: str, case_profile: CaseProfile) -> list[Part]:
    """Return the tables of a case's profile as parts of the report, or the sentence why there are none."""
    if case_profile.total is None:
        return [Hanging(f"{name}: the profile cannot be compared: {shown(case_profile.unread)}")]
    report_parts: list[Part] = [
        "",
        make_pairs_table(f"{name}, active us", (case_profile.total, *case_profile.engines), format_us),
    ]
    if case_profile.lines:
        report_parts += [
            "",
            make_named_table(f"{name}, line, us", case_profile.lines, _MOST_LINES, format_us),
        ]
    return report_parts


def make_profile_document(case_profile: CaseProfile) -> dict[str, Any]:
    """Return the pairs of a case's profile as JSON types, with times in ns."""
    return {
        "unread": case_profile.unread,
        "total": make_records((case_profile.total,), "_ns") if case_profile.total else [],
        "engines": make_records(case_profile.engines, "_ns"),
        "lines": make_records(case_profile.lines, "_ns"),
    }
