"""Error tables of public kernels: each launch, errors by kernel, order of variants, brackets and physical floor.

The bracket of a launch is its time under the dataflow and the serial reading; the floor is its lower bound from the
peak rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.fidelity.sources.bench import Outcome
from benchmarks.fidelity.sources.clones import Clone
from benchmarks.fidelity.sources.source import compare_fields, one_line
from benchmarks.fidelity.table import percent, quantile
from simulate.timing import Reading

_APART = 1.05
"""Variants whose measured times differ by less tell no order: repeated runs of a kernel differ by some per cent."""
_SHOWN = (Reading.program, Reading.scheduled)
_EACH_ITS_OWN = "that counts"
_COUNTS = (
    "The first reading of a kernel is the one that counts: program where its source has the compiler's scheduler "
    "switched off (explicit), scheduled where nothing does (compiler)."
)

Rows = Sequence[Sequence[str]]


def format_source_tables(outcomes: Sequence[Outcome], clones: Mapping[str, Clone]) -> str:
    """Return all tables of public kernels as Markdown."""
    head = (
        "All times are the device's: predicted ones hold start and end of the kernel, as measured ones do, and no host "
        "side. Errors are predicted / measured - 1."
    )
    read = [f"- {clone.repo} at {clone.commit or 'an unknown commit'}" for clone in clones.values()]
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.source.kernel, []).append(outcome)
    sections = ["\n".join([head, "", *read])]
    sections += [_launches(kernel, members) for kernel, members in groups.items()]
    sections += [_errors(groups, outcomes), _variants(groups), _bounds(outcomes), _missing(outcomes)]
    return "\n\n".join(section for section in sections if section) + "\n"


def align_table(rows: Rows, left: int = 1) -> str:
    """Format rows as an aligned Markdown table; row 0 is the header, the first `left` columns are flush left."""
    widths = [max(3, *(len(row[number]) for row in rows)) for number in range(len(rows[0]))]
    rule = ["-" * width if number < left else "-" * (width - 1) + ":" for number, width in enumerate(widths)]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = (
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths))
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _launches(kernel: str, members: Sequence[Outcome]) -> str:
    """Return the table of all launches of a kernel, labelled by the fields in which they differ."""
    varied, same = compare_fields([member.source for member in members])
    rows: list[list[str]] = []
    for member in members:
        times = [f"{member.source.measured_us:,.1f}"]
        for reading in _SHOWN:
            known = reading in member.predicted_us
            times += (
                [f"{member.time_us(reading):,.1f}", _signed(member.error(reading))] if known else ["", ""]
            )
        rows.append([str(member.source.number), _told(member, varied), *times])
    words = [name for name in varied if any(_is_word(member, name) for member in members)]
    head = [
        "entry",
        ", ".join(map(one_line, words)) or "launch",
        "measured us",
        "program",
        "error",
        "scheduled",
        "error",
    ]
    return f"{kernel}: {', '.join(same)}\n\n{align_table([head, *rows], left=2)}"


def _told(outcome: Outcome, names: Sequence[str]) -> str:
    """Return a launch's label: values of the named fields that are no flags, then names of flags that are True."""
    fields = outcome.source.fields()
    values = [one_line(fields.get(name, "-")) for name in names if _is_word(outcome, name)]
    return ", ".join(values + [one_line(name) for name in names if fields.get(name) is True]) or "-"


def _is_word(outcome: Outcome, name: str) -> bool:
    """Return whether a field of the launch is anything but True or False."""
    return not isinstance(outcome.source.fields().get(name), bool)


def _compared(members: Sequence[Outcome]) -> list[tuple[str, Reading | None]]:
    """Return (label, reading) pairs for the readings that a table compares.

    The first pair is the members' main reading, or (`_EACH_ITS_OWN`, None) if they differ. Then follow the readings of
    `_SHOWN` that all members have.
    """
    readings = {member.reading for member in members}
    first = readings.pop() if len(readings) == 1 else None
    remaining = [
        reading
        for reading in _SHOWN
        if reading is not first and all(reading in member.predicted_us for member in members)
    ]
    return [(reading.value if reading else _EACH_ITS_OWN, reading) for reading in (first, *remaining)]


def _errors(groups: Mapping[str, Sequence[Outcome]], outcomes: Sequence[Outcome]) -> str:
    """Return the table of errors by kernel and for all launches: median and 90th percentile of |error|, median error.

    Each compared reading has a row.
    """
    rows = [["kernel", "covered", "schedule by", "reading", "median", "90 %", "bias"]]
    for name, members in [*groups.items(), ("all", outcomes)]:
        covered = [member for member in members if member.covered]
        if not covered:
            rows.append([name, f"0 of {len(members)}", "", "", "", "", ""])
            continue
        by = ", ".join(dict.fromkeys(member.schedule.value for member in covered if member.schedule))
        counts = [name, f"{len(covered)} of {len(members)}", by]
        for label, reading in _compared(covered):
            errors = [member.error(reading) for member in covered]
            absolute = [abs(error) for error in errors]
            figures = [percent(statistics.median(absolute)), percent(quantile(absolute, 0.9))]
            rows.append([*counts, label, *figures, _signed(statistics.median(errors))])
            counts = ["", "", ""]
    return f"{_COUNTS}\n\n{align_table(rows)}"


def pairs(members: Sequence[Outcome]) -> list[tuple[Outcome, Outcome, str]]:
    """Return pairs (shorter, longer, field) of covered launches that differ in one field and clearly in measured time.

    Clearly means by more than the factor `_APART`; shorter and longer refer to measured times.
    """
    ordered = sorted(
        (outcome for outcome in members if outcome.covered), key=lambda outcome: outcome.source.measured_us
    )
    out = []
    for number, longer in enumerate(ordered):
        for shorter in ordered[:number]:
            one, other = shorter.source.fields(), longer.source.fields()
            names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
            if len(names) == 1 and longer.source.measured_us > _APART * shorter.source.measured_us:
                out.append((shorter, longer, names[0]))
    return out


def _variants(groups: Mapping[str, Sequence[Outcome]]) -> str:
    """Return the pairs that each compared reading predicts in another order than measured; "" without pairs."""
    told = [(kernel, *pair) for kernel, members in groups.items() for pair in pairs(members)]
    if not told:
        return ""
    lines = [
        "Pairs of launches of one kernel that differ in one field, more than 5 % apart in measured time:",
        "",
    ]
    for label, reading in _compared([member for pair in told for member in pair[1:3]]):
        wrong = [pair for pair in told if pair[1].time_us(reading) >= pair[2].time_us(reading)]
        lines.append(f"- {label}: {len(told) - len(wrong)} of {len(told)} in the measured order")
        for kernel, shorter, longer, name in wrong:
            measured = f"measured {shorter.source.measured_us:,.1f} < {longer.source.measured_us:,.1f}"
            predicted = f"predicted {shorter.time_us(reading):,.1f} >= {longer.time_us(reading):,.1f}"
            lines.append(f"  - {kernel}, {one_line(name)}: {measured}, {predicted}")
    return "\n".join(lines)


def _bounds(outcomes: Sequence[Outcome]) -> str:
    """Return sentences about launches outside their bracket or below their floor; "" if no launch is covered."""
    covered = [outcome for outcome in outcomes if outcome.covered]
    lines = []
    bounds = (Reading.dataflow, Reading.serial)
    bracketed = [outcome for outcome in covered if all(reading in outcome.predicted_us for reading in bounds)]
    if bracketed:
        below = [
            outcome for outcome in bracketed if outcome.source.measured_us < outcome.time_us(Reading.dataflow)
        ]
        above = [
            outcome for outcome in bracketed if outcome.source.measured_us > outcome.time_us(Reading.serial)
        ]
        inside = len(bracketed) - len(below) - len(above)
        lines.append(f"Measured inside the bracket of dataflow and serial: {inside} of {len(bracketed)}.")
        lines += [f"Measured below dataflow: {_named(below)}."] if below else []
        lines += [f"Measured above serial: {_named(above)}."] if above else []
    if covered:
        predicted = [outcome for outcome in covered if outcome.time_us() < outcome.floor_us]
        measured = [outcome for outcome in covered if outcome.source.measured_us < outcome.floor_us]
        lines.append(f"Predicted below the physical floor: {_named(predicted)}.")
        lines.append(f"Measured below the physical floor, which is then too high: {_named(measured)}.")
    return "\n".join(lines)


def _named(outcomes: Sequence[Outcome]) -> str:
    """Return "entry N" for each outcome, joined by commas, or "none"."""
    return ", ".join(f"entry {outcome.source.number}" for outcome in outcomes) or "none"


def _missing(outcomes: Sequence[Outcome]) -> str:
    """Return the table of launches that are not covered, with reasons; "" if all are covered."""
    lines = [f"| {outcome.source.number} | {outcome.reason} |" for outcome in outcomes if not outcome.covered]
    return "\n".join(["| not covered: entry | because |", "|---:|---|", *lines]) if lines else ""


def _signed(error: float) -> str:
    """Format a relative error as a whole percentage with its sign."""
    return f"{error * 100:+.0f} %"
