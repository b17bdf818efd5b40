"""A comparison as tables and sentences, and as a part of the document of `time --json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from nkw.parts import Hanging, Name, Noted, Part, table
from simulate.profile.comparison.compare import Cause, Comparison
from simulate.profile.comparison.measured import Measured
from simulate.profile.numbers import share, us

_NONE = "no difference"


def report(comparison: Comparison, rows: int = 8) -> list[Part]:
    """The parts of a comparison's text, with at most `rows` causes in each table; changes add up in every table."""
    now, against = comparison.now, comparison.against
    out: list[Part] = [
        Hanging(f"{now.title}: {us(now.length_ns)} us ({now.reading} reading)", style="bold"),
        Hanging(f"against {against.title}: {us(against.length_ns)} us"),
        Hanging(f"change: {verdict(comparison)}", style="bold"),
        Hanging(f"roofline: {_floor(now)}; against {_floor(against)}"),
    ]
    out += ["", _lines(comparison.lines, rows)]
    for head, causes in (("engine or queue", comparison.engines), ("phase", comparison.phases)):
        out += ["", _table(f"critical path, by {head}|against us|us|change us", causes, rows, us)]
    out += ["", _table("HBM tensor|against MB|MB|change MB", comparison.tensors, rows, _mb)]
    return out


def verdict(comparison: Comparison) -> str:
    """How much slower or faster, in us and in per cent of the run that it is compared with."""
    change, whole = comparison.change_ns, comparison.against.length_ns
    if not change:
        return _NONE
    if not _seen(Cause("", whole, comparison.now.length_ns), us):
        return f"less than {us(1)} us"
    part = f", {share(abs(change), whole)}" if whole else ""
    return f"{us(abs(change))} us{part} {'slower' if change > 0 else 'faster'}"


def contents(comparison: Comparison) -> dict[str, Any]:
    """The comparison for `time --json`: times in ns, sizes in bytes."""

    def listed(causes: Sequence[Cause]) -> list[dict[str, Any]]:
        return [{"name": each.name, "against_ns": each.against, "ns": each.now} for each in causes]

    return {
        "against": comparison.against.title,
        "against_ns": comparison.against.length_ns,
        "length_ns": comparison.now.length_ns,
        "change_ns": comparison.change_ns,
        "lines": [
            {"instruction": each.name, "at": _name(each), "against_ns": each.against, "ns": each.now}
            for each in comparison.lines
        ],
        "engines": listed(comparison.engines),
        "phases": listed(comparison.phases),
        "tensors": [
            {"name": each.name, "against_bytes": int(each.against), "bytes": int(each.now)}
            for each in comparison.tensors
        ],
    }


def _lines(causes: Sequence[Cause], rows: int) -> Part:
    changed = [each for each in causes if _seen(each, us)][:rows]
    listed: list[tuple[Part, ...]] = [
        (Name(_name(each), f"{each.name} "), *_three(each, us)) for each in changed
    ]
    notes = [place.text if (place := each.place or each.earlier) else "" for each in changed]
    rest = _rest(causes, changed, us)
    return Noted(
        table("critical path, by line|against us|us|change us", [*listed, *rest]), [*notes, *[""] * len(rest)]
    )


def _table(head: str, causes: Sequence[Cause], rows: int, worded: Callable[[float], str]) -> Part:
    shown = [each for each in causes if _seen(each, worded)][:rows]
    return table(
        head, [*((each.name, *_three(each, worded)) for each in shown), *_rest(causes, shown, worded)]
    )


def _rest(
    causes: Sequence[Cause], shown: Sequence[Cause], worded: Callable[[float], str]
) -> list[tuple[Part, ...]]:
    """Rows for the causes that are not shown, and for the sum of all."""
    hidden = causes[len(shown) :]
    sums = [
        Cause(name, math.fsum(each.against for each in some), math.fsum(each.now for each in some))
        for name, some in ((f"{len(hidden)} more", hidden), ("all", causes))
        if some
    ]
    return [(each.name, *_three(each, worded)) for each in sums]


def _seen(cause: Cause, worded: Callable[[float], str]) -> bool:
    """Whether the change is more than the tables round away."""
    return bool(worded(abs(cause.change)).strip("0."))


def _three(cause: Cause, worded: Callable[[float], str]) -> tuple[str, str, str]:
    change = worded(cause.change)
    return worded(cause.against), worded(cause.now), change if cause.change < 0 else f"+{change}"


def _name(cause: Cause) -> str:
    """The line in the run that is compared; of a line that only one run has, with a word that says so."""
    place = cause.place or cause.earlier
    if place is None:
        return ""
    only = "" if cause.place and cause.earlier else " (new)" if cause.place else " (gone)"
    return f"{place.file}:{place.line}{only}"


def _floor(run: Measured) -> str:
    return f"{us(run.floor_ns)} us ({run.bound} bound), {share(run.floor_ns, run.length_ns)} of the length"


def _mb(size: float) -> str:
    return f"{size / 1e6:.3f}"
