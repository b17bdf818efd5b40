"""Device profiles that came back with a bundle, beside the predictions of its cases: engines, DMA queues and lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nkw.errors import InvalidArgument, shown
from nkw.parts import Hanging, Part
from simulate.bundle.manifest import Case
from simulate.bundle.reading import within
from simulate.bundle.result import RESULT_FOLDER, CaseResult
from simulate.profile.numbers import us
from simulate.profile.vendor import DeviceProfile, read_profile
from simulate.profile.vendor.side_by_side import Pair, pair_amounts, pair_lines
from simulate.profile.vendor.text import make_named_table, make_pairs_table, make_records

_MOST_LINES = 8
_TRACE = ".ntff"  # the profiler's own recording, which its `view` turns into tables


@dataclass(frozen=True)
class CaseProfile:
    """One case: its length, active times of engines and queues, and held times of lines; in ns.

    `unread` says why there are none.
    """

    total: Pair | None = None
    engines: tuple[Pair, ...] = ()
    lines: tuple[Pair, ...] = ()
    unread: str = ""


def profile_of(folder: Path, case: Case, result: CaseResult | None) -> CaseProfile | None:
    """The profile of a case, read; None where none came back."""
    if result is None or result.profile is None:
        return None
    if result.profile.endswith(_TRACE):
        return CaseProfile(unread="only the .ntff came back; neuron-explorer view makes tables of it")
    try:
        found = read_profile(within(folder / RESULT_FOLDER, result.profile))
    except InvalidArgument as broken:
        return CaseProfile(unread=broken.message)
    return _paired(case, found)


def _paired(case: Case, found: DeviceProfile) -> CaseProfile:
    """Engines of all cores of the profile are added up, as those of the prediction are."""
    own = case.predicted
    measured: dict[str, float] = {}
    for name, active_ns in (
        *((each.name, each.active_ns) for each in found.engines),
        *((each.name, each.active_ns) for each in found.dma.queues),
    ):
        measured[name] = measured.get(name, 0.0) + active_ns
    lines = [((each.file, each.line), each.busy_ns) for each in own.lines]
    return CaseProfile(
        Pair("total_time", own.program_ns + own.overhead_ns, found.total_ns),
        pair_amounts(own.engines, measured, keep_order=True),
        pair_lines(lines, found) if found.lines else (),
    )


def parts_of(name: str, seen: CaseProfile) -> list[Part]:
    """The parts of the text."""
    if seen.total is None:
        return [Hanging(f"{name}: the profile cannot be compared: {shown(seen.unread)}")]
    found: list[Part] = ["", make_pairs_table(f"{name}, active us", (seen.total, *seen.engines), us)]
    if seen.lines:
        found += ["", make_named_table(f"{name}, line, us", seen.lines, _MOST_LINES, us)]
    return found


def document_of(seen: CaseProfile) -> dict[str, Any]:
    """As plain values."""
    return {
        "unread": seen.unread,
        "total": make_records((seen.total,), "_ns") if seen.total else [],
        "engines": make_records(seen.engines, "_ns"),
        "lines": make_records(seen.lines, "_ns"),
    }
