"""Report of a calibration: text for a terminal, and the document of `--json`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nkw.report import Hanging, Part
from simulate.calibrate.calibration import Calibration, Contradiction
from simulate.calibrate.numbers import round_number

_MOST_NAMED = 6


def make_parts(calibration: Calibration) -> list[Part]:
    """Return the report of a chip as parts for a terminal: determined numbers, then remarks on all others."""
    before, after = calibration.median_errors
    head = (
        f"{calibration.record.label}: {len(calibration.times_ns)} measured times, median error {before:.1%}"
    )
    out: list[Part] = [
        Hanging(f"{head}, {after:.1%} with the changes below" if calibration.contradictions else head)
    ]
    out += [
        _describe_number(contradiction)
        for contradiction in calibration.contradictions
        if contradiction.determined
    ]
    if not calibration.contradictions:
        out.append("no number of the record is contradicted")
    return [*out, *(Hanging(sentence) for sentence in _list_remarks(calibration))]


def _describe_number(contradiction: Contradiction) -> Part:
    """Return the sentence about a determined number: implied and recorded value, standard error, evidence."""
    return Hanging(
        f"{contradiction.number}: {contradiction.measured:.4g} instead of {contradiction.recorded:g}, "
        f"{math.expm1(contradiction.change):+.1%} with a standard error of "
        f"{math.expm1(contradiction.error):.1%}; {_describe_evidence(contradiction)}"
    )


def _describe_evidence(contradiction: Contradiction) -> str:
    """Return a clause about the kernels that depend on a number: how many, and their median errors before and after."""
    return (
        f"{contradiction.kernels} kernels depend on it, median error {contradiction.before:.1%} before and "
        f"{contradiction.after:.1%} after"
    )


def _list_remarks(calibration: Calibration) -> Iterator[str]:
    """Yield a sentence for each number that is not determined, outlier and skipped kernel; last, on undecided numbers.

    An undecided number is one on which none of the times depends.
    """
    for contradiction in calibration.contradictions:
        if not contradiction.determined:
            names = [str(number) for number in (contradiction.number, *contradiction.instead)]
            yield (
                f"cannot be told apart: {_join_names(names)}; {names[0]} by "
                f"{math.expm1(contradiction.change):+.1%} explains the times: {_describe_evidence(contradiction)}"
            )
    for name in calibration.outliers:
        measured, _, predicted = calibration.times_ns[name]
        yield f"outlier: {name} took {measured / predicted:.3g} times its predicted time, which no change explains"
    for skipped in calibration.skipped:
        yield f"left out: {skipped.name}: {skipped.why}"
    if calibration.undecided:
        yield f"not judged, because none of these times depends on them: {len(calibration.undecided)} numbers"


def _join_names(names: list[str]) -> str:
    """Join the first six names by commas, and add how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def make_document(calibration: Calibration) -> dict[str, Any]:
    """Return the report of a chip as JSON types, with every kernel's times in ns.

    Errors and changes are relative: 0.1 is 10 % more than the recorded number.
    """
    before, after = calibration.median_errors
    return {
        "target": calibration.record.name,
        "median_error_before": before,
        "median_error_after": after,
        "contradictions": [
            {
                "number": str(contradiction.number),
                "determined": contradiction.determined,
                "instead": [str(number) for number in contradiction.instead],
                "recorded": contradiction.recorded,
                "measured": float(
                    round_number(contradiction.number, calibration.record, contradiction.change)
                ),
                "change": math.expm1(contradiction.change),
                "standard_error": math.expm1(contradiction.error),
                "kernels": contradiction.kernels,
                "error_before": contradiction.before,
                "error_after": contradiction.after,
            }
            for contradiction in calibration.contradictions
        ],
        "kernels": [
            {
                "name": name,
                "measured_ns": measured,
                "predicted_ns": predicted,
                "calibrated_ns": calibrated,
                "outlier": name in calibration.outliers,
            }
            for name, (measured, predicted, calibrated) in calibration.times_ns.items()
        ],
        "skipped": [{"name": skip.name, "why": skip.why} for skip in calibration.skipped],
        "undecided": [str(number) for number in calibration.undecided],
    }
