"""The report of `nkw compare`: what came back against what was expected and predicted, as text and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nkw.errors import shown
from nkw.parts import Hanging, Part, table
from simulate.bundle.blame import Comparison, compared
from simulate.bundle.comparison import CaseComparison
from simulate.bundle.manifest import MANIFEST
from simulate.bundle.profiled import document_of, parts_of
from simulate.bundle.reading import read_json
from simulate.bundle.result import load
from simulate.bundle.run import digest_of
from simulate.bundle.steps import document_of_launch, document_of_step, parts_of_generation
from simulate.bundle.values import Agreement, OutputComparison

_MOST_SHOWN = 160  # characters of a message from the chip


def compare_bundle(folder: Path) -> Comparison:
    """A bundle against the result that lies in it. Raises InvalidArgument (NKW-BUNDLE) where one cannot be read."""
    bundle, result = load(folder)
    return compared(folder, bundle, result, _is_intact(folder, bundle.digest))


def _is_intact(folder: Path, digest: str) -> bool:
    try:
        return digest_of(folder, dict(read_json(folder, MANIFEST).values)) == digest
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def report(seen: Comparison) -> list[Part]:
    """The parts of the text, for a terminal."""
    packages = seen.result.environment.packages
    where = [
        seen.result.environment.instance or "instance unknown",
        f"launcher {seen.result.launcher or 'none'}",
    ]
    where += [
        f"{name} {packages[name]}"
        for name in ("nki", "neuronx-cc", "torch-neuronx", "nrtpy")
        if name in packages
    ]
    parts: list[Part] = [
        Hanging(f"{_verdict(seen)} ({seen.bundle.target}; {', '.join(map(_short, where))})", style="bold"),
    ]
    if seen.bundle.generated is not None:
        parts += parts_of_generation(seen, _details, _closeness)
    else:
        columns = "case|values|of bound|ulps|us|predicted|inside"
        rows = [_row(each) for each in seen.cases]
        parts.append(table(columns, rows, left=(0, 1), firm=(1, 2, 3, 4, 5, 6)))
        parts += [part for each in seen.cases for part in _details(each)]
    for each in seen.cases:
        if each.profile is not None:
            parts += parts_of(each.case.name, each.profile)
    parts += [Hanging(_short(f"{stage}: {message}")) for stage, message in seen.result.failures]
    for likely in seen.likely:
        concerned = f" ({', '.join(likely.cases)})" if likely.cases else ""
        parts.append(
            Hanging(_short(f"likely {likely.fault.value}{concerned}: {likely.why} (rule {likely.rule})"))
        )
    return parts


def _details(each: CaseComparison) -> list[Part]:
    """Where the outputs of a case differ first, and how it failed."""
    parts: list[Part] = [
        Hanging(f"{each.case.name} {sentence}") for sentence in map(_first, each.outputs) if sentence
    ]
    if each.result is not None and each.result.error is not None:
        kind, message = each.result.error
        parts.append(Hanging(_short(f"{each.case.name} failed at {each.result.stage}: {kind}: {message}")))
    return parts


def _verdict(seen: Comparison) -> str:
    agree = sum(each.agrees for each in seen.tried)
    what = "cases" if seen.bundle.generated is None else "launches"
    if seen.agrees:
        equal = all(each.agreement is Agreement.equal for each in seen.tried)
        return f"all {len(seen.tried)} {what} {'are equal' if equal else 'agree'}"
    untried = len(seen.cases) - len(seen.tried)
    return f"{agree} of {len(seen.tried)} {what} agree" + (f", {untried} not tried" if untried else "")


def _row(each: CaseComparison) -> tuple[str, ...]:
    low, high = (f"{ns / 1e3:.1f}" for ns in each.bracket_ns)
    worst = max(each.outputs, key=_closeness, default=None)
    times = each.result.times if each.result else None
    values = each.agreement.name if each.agreement else (each.result.status if each.result else "not tried")
    inside = {None: "" if times is None else "(host)", True: "yes", False: "NO"}[each.inside]
    return (
        each.case.name,
        values,
        "" if worst is None or not worst.allowed or worst.error is None else f"{_closeness(worst):.2g}",
        "" if worst is None or worst.most_ulps is None else f"{worst.most_ulps:,}",
        "" if times is None else f"{times.median_ns / 1e3:.1f}",
        f"{low} to {high}",
        inside,
    )


def _closeness(each: OutputComparison) -> float:
    return (each.error or 0.0) / each.allowed if each.allowed else each.error or 0.0


def _first(each: OutputComparison) -> str:
    """Where an output differs first; empty for an equal one."""
    if each.agreement is Agreement.equal:
        return ""
    head = f"{each.name} is {each.agreement.value}"
    if each.tile is None:
        return f"{head}: {each.why}"
    said = f"{head}: first tile {each.tile}"
    if each.first is not None:
        index = ", ".join(map(str, each.first.index))
        apart = "NaN or infinite" if each.first.ulps is None else _ulps(each.first.ulps)
        said += f", first element ({index}): {each.first.seen:.9g} for {each.first.expected:.9g}, {apart}"
    said += f"; {each.wrong_tiles} of {each.tiles} tiles"
    if each.agreement is Agreement.wrong:
        said += f", {each.beyond:,} of {each.size:,} elements beyond the bound"
    return f"{said}; {each.why}" if each.why else said


def _ulps(count: int) -> str:
    return f"{count:,} ulp{'' if count == 1 else 's'} apart"


def _short(text: str) -> str:
    text = " ".join(shown(text).split())
    return text if len(text) <= _MOST_SHOWN * 2 else f"{text[: _MOST_SHOWN * 2]} …"


def document(seen: Comparison) -> dict[str, Any]:
    """The comparison as plain values; docs/json.md has the schema."""
    return {
        "target": seen.bundle.target,
        "agrees": seen.agrees,
        "intact": seen.intact,
        "launcher": seen.result.launcher,
        "packages": seen.result.environment.packages,
        "instance": seen.result.environment.instance,
        "cases": [_case(each) for each in seen.cases],
        "steps": [document_of_step(each) for each in seen.steps],
        "failures": [{"stage": stage, "message": message} for stage, message in seen.result.failures],
        "likely": [
            {"fault": each.fault.name, "rule": each.rule, "why": each.why, "cases": list(each.cases)}
            for each in seen.likely
        ],
    }


def _case(each: CaseComparison) -> dict[str, Any]:
    times = each.result.times if each.result else None
    return {
        "name": each.case.name,
        "status": each.result.status if each.result else "not tried",
        "stage": each.result.stage if each.result else None,
        "values": each.agreement.name if each.agreement else None,
        "measured_ns": times.median_ns if times else None,
        "spread_ns": times.spread_ns if times else None,
        "clock": times.clock if times else None,
        "bracket_ns": list(each.bracket_ns),
        "inside": each.inside,
        "outputs": [_output(output) for output in each.outputs],
        "profile": document_of(each.profile) if each.profile else None,
        **document_of_launch(each),
    }


def _output(each: OutputComparison) -> dict[str, Any]:
    first = each.first
    return {
        "name": each.name,
        "values": each.agreement.name,
        "why": each.why,
        "error": _finite(each.error),
        "allowed": each.allowed,
        "most_ulps": each.most_ulps,
        "differing": each.differing,
        "beyond": each.beyond,
        "tile": list(each.tile) if each.tile else None,
        "index": list(first.index) if first else None,
        "seen": _finite(first.seen) if first else None,
        "expected": _finite(first.expected) if first else None,
        "ulps": first.ulps if first else None,
    }


def _finite(value: float | None) -> float | None:
    """A number for JSON, which has no NaN and no infinity."""
    return value if value is not None and abs(value) < float("inf") else None
