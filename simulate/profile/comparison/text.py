"""Comparison as tables and sentences, and as an object of the document of `time --json`.

A cause is a line, engine, phase or tensor with its amounts in both runs. A change is visible if it is not 0
after rounding to the digits of the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from nkw.report import Hanging, Name, Noted, Part, table
from simulate.profile.comparison.compare import Cause, Comparison
from simulate.profile.comparison.measured import Measured
from simulate.profile.numbers import format_share, format_us

_NONE = "no difference"


def make_report(comparison: Comparison, rows: int = 8) -> list[Part]:
    """Return the report of a comparison as parts of a text.

    Args:
        rows: Most causes in a table; the others are summed in a row, so that the changes of each table add
            up.
    """
    now, against = comparison.now, comparison.against
    out: list[Part] = [
        Hanging(f"{now.title}: {format_us(now.length_ns)} us ({now.reading} reading)", style="bold"),
        Hanging(f"against {against.title}: {format_us(against.length_ns)} us"),
        Hanging(f"change: {format_verdict(comparison)}", style="bold"),
        Hanging(f"roofline: {_format_floor(now)}; against {_format_floor(against)}"),
    ]
    out += ["", _make_line_table(comparison.lines, rows)]
    for head, causes in (("engine or queue", comparison.engines), ("phase", comparison.phases)):
        out += ["", _make_table(f"critical path, by {head}|against us|us|change us", causes, rows, format_us)]
    out += ["", _make_table("HBM tensor|against MB|MB|change MB", comparison.tensors, rows, _format_mb)]
    return out


def format_verdict(comparison: Comparison) -> str:
    """Return how much slower or faster the run is than the baseline, as "1.234 us, 5.6 % slower".

    Says so if there is no difference, or if it is too small for the digits.
    """
    change, against_ns = comparison.change_ns, comparison.against.length_ns
    if not change:
        return _NONE
    if not _is_visible(Cause("", against_ns, comparison.now.length_ns), format_us):
        return f"less than {format_us(1)} us"
    percentage = f", {format_share(abs(change), against_ns)}" if against_ns else ""
    return f"{format_us(abs(change))} us{percentage} {'slower' if change > 0 else 'faster'}"


def make_contents(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for `time --json`: times in ns, sizes in bytes."""

    def make_rows(causes: Sequence[Cause]) -> list[dict[str, Any]]:
        return [{"name": cause.name, "against_ns": cause.against, "ns": cause.now} for cause in causes]

    return {
        "against": comparison.against.title,
        "against_ns": comparison.against.length_ns,
        "length_ns": comparison.now.length_ns,
        "change_ns": comparison.change_ns,
        "lines": [
            {
                "instruction": cause.name,
                "at": _format_source_line(cause),
                "against_ns": cause.against,
                "ns": cause.now,
            }
            for cause in comparison.lines
        ],
        "engines": make_rows(comparison.engines),
        "phases": make_rows(comparison.phases),
        "tensors": [
            {"name": cause.name, "against_bytes": int(cause.against), "bytes": int(cause.now)}
            for cause in comparison.tensors
        ],
    }


def _make_line_table(causes: Sequence[Cause], rows: int) -> Part:
    """Return the table of the first `rows` lines with a visible change, with their source texts, and the sums."""
    changed = [cause for cause in causes if _is_visible(cause, format_us)][:rows]
    cause_rows: list[tuple[Part, ...]] = [
        (Name(_format_source_line(cause), f"{cause.name} "), *_format_amounts(cause, format_us))
        for cause in changed
    ]
    notes = [
        source_line.text if (source_line := cause.source_line or cause.earlier) else "" for cause in changed
    ]
    sum_rows = _make_sum_rows(causes, changed, format_us)
    return Noted(
        table("critical path, by line|against us|us|change us", [*cause_rows, *sum_rows]),
        [*notes, *[""] * len(sum_rows)],
    )


def _make_table(head: str, causes: Sequence[Cause], rows: int, format_amount: Callable[[float], str]) -> Part:
    """Return a table of the first `rows` causes with a visible change, and the sums.

    Args:
        head: Headings of the columns, separated by "|".
        format_amount: Formats an amount without its unit.
    """
    shown = [cause for cause in causes if _is_visible(cause, format_amount)][:rows]
    return table(
        head,
        [
            *((cause.name, *_format_amounts(cause, format_amount)) for cause in shown),
            *_make_sum_rows(causes, shown, format_amount),
        ],
    )


def _make_sum_rows(
    causes: Sequence[Cause], shown: Sequence[Cause], format_amount: Callable[[float], str]
) -> list[tuple[Part, ...]]:
    """Return a row that sums the causes after the shown ones, and a row that sums all; none for an empty sum.

    Args:
        causes: All causes, in descending order of the absolute change.
        shown: The first of them, which the table shows.
    """
    omitted = causes[len(shown) :]
    sums = [
        Cause(
            name,
            math.fsum(cause.against for cause in causes_of_row),
            math.fsum(cause.now for cause in causes_of_row),
        )
        for name, causes_of_row in ((f"{len(omitted)} more", omitted), ("all", causes))
        if causes_of_row
    ]
    return [(sum_cause.name, *_format_amounts(sum_cause, format_amount)) for sum_cause in sums]


def _is_visible(cause: Cause, format_amount: Callable[[float], str]) -> bool:
    """Return whether the formatted change of a cause has a digit other than 0."""
    return bool(format_amount(abs(cause.change)).strip("0."))


def _format_amounts(cause: Cause, format_amount: Callable[[float], str]) -> tuple[str, str, str]:
    """Return (amount of the baseline, amount now, change with its sign) of a cause, formatted."""
    change = format_amount(cause.change)
    return (
        format_amount(cause.against),
        format_amount(cause.now),
        change if cause.change < 0 else f"+{change}",
    )


def _format_source_line(cause: Cause) -> str:
    """Return the file and line of a cause; "(new)" or "(gone)" follows if only one run has the line."""
    source_line = cause.source_line or cause.earlier
    if source_line is None:
        return ""
    only = "" if cause.source_line and cause.earlier else " (new)" if cause.source_line else " (gone)"
    return f"{source_line.file}:{source_line.line}{only}"


def _format_floor(run: Measured) -> str:
    """Return a run's time at peak rates, what bounds it, and the share of the length, as a part of a sentence."""
    floor_share = format_share(run.floor_ns, run.length_ns)
    return f"{format_us(run.floor_ns)} us ({run.bound} bound), {floor_share} of the length"


def _format_mb(size: float) -> str:
    """Format bytes as megabytes, with three decimals."""
    return f"{size / 1e6:.3f}"
