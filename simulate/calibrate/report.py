"""The report of a calibration: text for a terminal, and the document of `--json`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nkw.parts import Hanging, Part
from simulate.calibrate.calibration import Calibration, Contradiction
from simulate.calibrate.numbers import rounded

_MOST_NAMED = 6


def parts(found: Calibration) -> list[Part]:
    """The parts of the text of one chip."""
    before, after = found.median_errors
    head = f"{found.record.label}: {len(found.times_ns)} measured times, median error {before:.1%}"
    out: list[Part] = [Hanging(f"{head}, {after:.1%} with what follows" if found.contradictions else head)]
    out += [_number(each) for each in found.contradictions if each.determined]
    if not found.contradictions:
        out.append("no number of the record is contradicted")
    return [*out, *(Hanging(each) for each in _sentences(found))]


def _number(each: Contradiction) -> Part:
    """A number that is determined, and with what evidence."""
    return Hanging(
        f"{each.number}: {each.measured:.4g} instead of {each.recorded:g}, {math.expm1(each.change):+.1%} with a "
        f"standard error of {math.expm1(each.error):.1%}; {_evidence(each)}"
    )


def _evidence(each: Contradiction) -> str:
    return f"{each.kernels} kernels depend on it, median error {each.before:.1%} before and {each.after:.1%} after"


def _sentences(found: Calibration) -> Iterator[str]:
    for each in found.contradictions:
        if not each.determined:
            names = [str(number) for number in (each.number, *each.instead)]
            yield (
                f"cannot be told apart: {_listed(names)}; {names[0]} by {math.expm1(each.change):+.1%} would do: "
                f"{_evidence(each)}"
            )
    for name in found.outliers:
        measured, _, predicted = found.times_ns[name]
        yield f"outlier: {name} took {measured / predicted:.3g} times its predicted time, and no number says why"
    for skipped in found.skipped:
        yield f"left out: {skipped.name}: {skipped.why}"
    if found.undecided:
        yield f"not judged, because none of these times depends on them: {len(found.undecided)} numbers"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def document(found: Calibration) -> dict[str, Any]:
    """What the text says of one chip, with every kernel's times; errors and changes are parts of 1."""
    before, after = found.median_errors
    return {
        "target": found.record.name,
        "median_error_before": before,
        "median_error_after": after,
        "contradictions": [
            {
                "number": str(each.number),
                "determined": each.determined,
                "instead": [str(number) for number in each.instead],
                "recorded": each.recorded,
                "measured": float(rounded(each.number, found.record, each.change)),
                "change": math.expm1(each.change),
                "standard_error": math.expm1(each.error),
                "kernels": each.kernels,
                "error_before": each.before,
                "error_after": each.after,
            }
            for each in found.contradictions
        ],
        "kernels": [
            {
                "name": name,
                "measured_ns": measured,
                "predicted_ns": predicted,
                "calibrated_ns": calibrated,
                "outlier": name in found.outliers,
            }
            for name, (measured, predicted, calibrated) in found.times_ns.items()
        ],
        "skipped": [{"name": each.name, "why": each.why} for each in found.skipped],
        "undecided": [str(each) for each in found.undecided],
    }
