"""Report of `nkw compare`: results against expectations and predictions, as text and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nkw.errors import shown
from nkw.report import Hanging, Part, table
from simulate.bundle.blame import Comparison, compare_cases
from simulate.bundle.comparison import CaseComparison
from simulate.bundle.manifest import MANIFEST
from simulate.bundle.profiled import make_profile_document, make_profile_parts
from simulate.bundle.reading import read_json
from simulate.bundle.result import load
from simulate.bundle.run import compute_digest
from simulate.bundle.steps import make_generation_parts, make_launch_document, make_step_document
from simulate.bundle.values import Agreement, OutputComparison

_MOST_SHOWN = 160  # characters of a chip's message, of which reports show twice as many


def compare_bundle(folder: Path) -> Comparison:
    """Read the bundle in `folder` and the result in `folder`/result, and return their comparison.

    Raises:
        InvalidArgument: (NKW-BUNDLE) If the bundle, its result or an expected output cannot be read.
    """
    bundle, result = load(folder)
    return compare_cases(folder, bundle, result, _is_intact(folder, bundle.digest))


def _is_intact(folder: Path, digest: str) -> bool:
    """Return whether the files of the bundle in `folder` still have the SHA-256 `digest`.

    Returns False too if they cannot be read.
    """
    try:
        return compute_digest(folder, dict(read_json(folder, MANIFEST).values)) == digest
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def make_report(comparison: Comparison) -> list[Part]:
    """Return the report of a comparison for a terminal, as parts of a text.

    It has the verdict, a table of cases or of steps and programs, sentences about differing outputs, device
    profiles, failures and likely faults.
    """
    packages = comparison.result.environment.packages
    origin = [
        comparison.result.environment.instance or "instance unknown",
        f"launcher {comparison.result.launcher or 'none'}",
    ]
    origin += [
        f"{name} {packages[name]}"
        for name in ("nki", "neuronx-cc", "torch-neuronx", "nrtpy")
        if name in packages
    ]
    report_parts: list[Part] = [
        Hanging(
            f"{_format_verdict(comparison)} ({comparison.bundle.target}; {', '.join(map(_shorten, origin))})",
            style="bold",
        ),
    ]
    if comparison.bundle.generated is not None:
        report_parts += make_generation_parts(comparison, _describe_case, _measure_closeness)
    else:
        columns = "case|values|of bound|ulps|us|predicted|inside"
        rows = [_make_row(case) for case in comparison.cases]
        report_parts.append(table(columns, rows, left=(0, 1), firm=(1, 2, 3, 4, 5, 6)))
        report_parts += [detail for case in comparison.cases for detail in _describe_case(case)]
    for case in comparison.cases:
        if case.profile is not None:
            report_parts += make_profile_parts(case.case.name, case.profile)
    report_parts += [
        Hanging(_shorten(f"{stage}: {message}")) for stage, message in comparison.result.failures
    ]
    for diagnosis in comparison.likely:
        concerned = f" ({', '.join(diagnosis.cases)})" if diagnosis.cases else ""
        report_parts.append(
            Hanging(
                _shorten(
                    f"likely {diagnosis.fault.value}{concerned}: {diagnosis.why} (rule {diagnosis.rule})"
                )
            )
        )
    return report_parts


def _describe_case(case: CaseComparison) -> list[Part]:
    """Return a sentence for each output of a case that differs, and one for the case's failure.

    Empty if there is none.
    """
    report_parts: list[Part] = [
        Hanging(f"{case.case.name} {sentence}")
        for sentence in map(_describe_first_difference, case.outputs)
        if sentence
    ]
    if case.result is not None and case.result.error is not None:
        error_type, message = case.result.error
        report_parts.append(
            Hanging(_shorten(f"{case.case.name} failed at {case.result.stage}: {error_type}: {message}"))
        )
    return report_parts


def _format_verdict(comparison: Comparison) -> str:
    """Return how many requested cases agree, as "all 3 cases agree" or "2 of 3 cases agree, 1 not tried"."""
    agree = sum(case.agrees for case in comparison.tried)
    noun = "cases" if comparison.bundle.generated is None else "launches"
    if comparison.agrees:
        equal = all(case.agreement is Agreement.equal for case in comparison.tried)
        return f"all {len(comparison.tried)} {noun} {'are equal' if equal else 'agree'}"
    untried = len(comparison.cases) - len(comparison.tried)
    return f"{agree} of {len(comparison.tried)} {noun} agree" + (f", {untried} not tried" if untried else "")


def _make_row(case: CaseComparison) -> tuple[str, ...]:
    """Return the table row of a case.

    Its cells: name, verdict, error over bound, ulps, measured us, predicted us, and whether the time is
    inside. The error and the ulps are those of the output with the largest error relative to its bound. Cells
    without a number are empty.
    """
    low, high = (f"{ns / 1e3:.1f}" for ns in case.bracket_ns)
    worst = max(case.outputs, key=_measure_closeness, default=None)
    times = case.result.times if case.result else None
    verdict = case.agreement.name if case.agreement else (case.result.status if case.result else "not tried")
    inside = {None: "" if times is None else "(host)", True: "yes", False: "NO"}[case.inside]
    return (
        case.case.name,
        verdict,
        ""
        if worst is None or not worst.allowed or worst.error is None
        else f"{_measure_closeness(worst):.2g}",
        "" if worst is None or worst.most_ulps is None else f"{worst.most_ulps:,}",
        "" if times is None else f"{times.median_ns / 1e3:.1f}",
        f"{low} to {high}",
        inside,
    )


def _measure_closeness(output: OutputComparison) -> float:
    """Return the error of an output divided by its bound; the error itself if the bound is absent or 0."""
    return (output.error or 0.0) / output.allowed if output.allowed else output.error or 0.0


def _describe_first_difference(output: OutputComparison) -> str:
    """Return a sentence about the first difference of an output, its size, and the extent of differences.

    Empty if equal.
    """
    if output.agreement is Agreement.equal:
        return ""
    head = f"{output.name} is {output.agreement.value}"
    if output.tile is None:
        return f"{head}: {output.why}"
    sentence = f"{head}: first tile {output.tile}"
    if output.first is not None:
        index = ", ".join(map(str, output.first.index))
        apart = "NaN or infinite" if output.first.ulps is None else _format_ulps(output.first.ulps)
        sentence += (
            f", first element ({index}): {output.first.seen:.9g} for {output.first.expected:.9g}, {apart}"
        )
    sentence += f"; {output.wrong_tiles} of {output.tiles} tiles"
    if output.agreement is Agreement.wrong:
        sentence += f", {output.beyond:,} of {output.size:,} elements beyond the bound"
    return f"{sentence}; {output.why}" if output.why else sentence


def _format_ulps(count: int) -> str:
    """Return a distance in ulps as "1 ulp apart" or "1,234 ulps apart"."""
    return f"{count:,} ulp{'' if count == 1 else 's'} apart"


def _shorten(text: str) -> str:
    """Return a message from the chip on one line, cut after 320 characters, with control characters escaped."""
    text = " ".join(shown(text).split())
    return text if len(text) <= _MOST_SHOWN * 2 else f"{text[: _MOST_SHOWN * 2]} …"


def make_document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON types, for `nkw compare --json`; docs/json.md has the schema."""
    return {
        "target": comparison.bundle.target,
        "agrees": comparison.agrees,
        "intact": comparison.intact,
        "launcher": comparison.result.launcher,
        "packages": comparison.result.environment.packages,
        "instance": comparison.result.environment.instance,
        "cases": [_make_case_document(case) for case in comparison.cases],
        "steps": [make_step_document(step) for step in comparison.steps],
        "failures": [{"stage": stage, "message": message} for stage, message in comparison.result.failures],
        "likely": [
            {
                "fault": diagnosis.fault.name,
                "rule": diagnosis.rule,
                "why": diagnosis.why,
                "cases": list(diagnosis.cases),
            }
            for diagnosis in comparison.likely
        ],
    }


def _make_case_document(case: CaseComparison) -> dict[str, Any]:
    """Return a compared case as JSON types, with times in ns; null replaces unknown figures."""
    times = case.result.times if case.result else None
    return {
        "name": case.case.name,
        "status": case.result.status if case.result else "not tried",
        "stage": case.result.stage if case.result else None,
        "values": case.agreement.name if case.agreement else None,
        "measured_ns": times.median_ns if times else None,
        "spread_ns": times.spread_ns if times else None,
        "clock": times.clock if times else None,
        "bracket_ns": list(case.bracket_ns),
        "inside": case.inside,
        "outputs": [_make_output_document(output) for output in case.outputs],
        "profile": make_profile_document(case.profile) if case.profile else None,
        **make_launch_document(case),
    }


def _make_output_document(output: OutputComparison) -> dict[str, Any]:
    """Return a compared output as JSON types; null replaces NaN, infinities and unknown figures."""
    first = output.first
    return {
        "name": output.name,
        "values": output.agreement.name,
        "why": output.why,
        "error": _finite(output.error),
        "allowed": output.allowed,
        "most_ulps": output.most_ulps,
        "differing": output.differing,
        "beyond": output.beyond,
        "tile": list(output.tile) if output.tile else None,
        "index": list(first.index) if first else None,
        "seen": _finite(first.seen) if first else None,
        "expected": _finite(first.expected) if first else None,
        "ulps": first.ulps if first else None,
    }


def _finite(number: float | None) -> float | None:
    """Return a number for JSON, None for NaN and infinity."""
    return number if number is not None and abs(number) < float("inf") else None
