"""Error tables: by family and generation, by `Schedule`, by ladder, the worst entries and those that are not covered.

A ladder is a group of entries that differ in one thing only: the kernel for one shape, or the shape for one kernel.
Held-out entries count only in the table by schedule, unless `held_out` is set.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.fidelity.case import Schedule
from benchmarks.fidelity.entry import Entry
from simulate.timing import Reading

LADDER_MIN = 4
LADDER_TAU = 0.6
"""Kendall's tau from which on a ladder keeps its published order."""

_SAME = 1.0e-9
"""Sums of one bracket's two readings may differ in their last digits."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one entry: its times, or the reason why it is not covered.

    reading: the reading whose time is compared with the measurement. predicted_us: times by reading, None if the
    entry is not covered. floor_us: lower bound from the peak rates. guessed_share: elasticity with respect to guessed
    constants, None if it was not computed.
    """

    entry: Entry
    reason: str = ""
    schedule: Schedule | None = None
    reading: Reading = Reading.program
    measured_us: float = 0.0
    predicted_us: dict[Reading, float] | None = None
    floor_us: float = 0.0
    guessed_share: float | None = None
    host_overhead_ns: float = 0.0

    @property
    def covered(self) -> bool:
        """Whether the entry has predicted times."""
        return self.predicted_us is not None

    def time_us(self, reading: Reading | None = None) -> float:
        """Return the predicted time in us under a reading, by default `self.reading`; the entry must be covered."""
        assert self.predicted_us is not None
        return self.predicted_us[reading or self.reading]

    def error(self, reading: Reading | None = None) -> float:
        """Return the relative error: predicted time over measured time, minus 1; the reading is as in `time_us`."""
        return self.time_us(reading) / self.measured_us - 1.0

    @property
    def counts(self) -> bool:
        """Whether the entry enters the summaries: entries of low confidence are only shown."""
        return self.entry.confidence != "low"

    @property
    def bracket_us(self) -> tuple[float, float] | None:
        """Predicted times under the dataflow and the serial reading, a lower and an upper bound.

        None if one is missing.
        """
        times = self.predicted_us or {}
        bounds = times.get(Reading.dataflow), times.get(Reading.serial)
        return None if bounds[0] is None or bounds[1] is None else (bounds[0], bounds[1])


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-b of (measured, predicted) pairs; nan if all measured or all predicted times are equal."""
    concordant = ties_x = ties_y = total = 0
    for i, (x, y) in enumerate(pairs):
        for other_x, other_y in pairs[:i]:
            dx, dy = x - other_x, y - other_y
            total += 1
            ties_x += dx == 0
            ties_y += dy == 0
            concordant += (dx * dy > 0) - (dx * dy < 0)
    scale = math.sqrt((total - ties_x) * (total - ties_y))
    return concordant / scale if scale else math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of values at `share` (0 to 1), interpolated linearly. `values` must not be empty."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def ladders(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Return the groups of at least `LADDER_MIN` distinct measured times whose entries differ in one thing, by title.

    A group has one shape and several kernels, or one kernel and several shapes. Only covered entries of high or medium
    confidence are grouped; an entry may be in two groups.
    """
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if not outcome.covered or not outcome.counts:
            continue
        entry = outcome.entry
        common = (entry.family, entry.target, entry.dtype, entry.source, str(entry.cores))
        groups[("one shape", *common, entry.shapes)].append(outcome)
        groups[("one kernel", *common, entry.kernel, entry.measured)].append(outcome)
    ladders_by_name: dict[str, list[Outcome]] = {}
    for key, members in groups.items():
        if len({member.measured_us for member in members}) < LADDER_MIN:
            continue
        last = key[-1] if key[0] == "one shape" else key[-2]
        ladders_by_name[f"{key[1]} {key[2]} {key[3]}, {key[5]} core(s), {key[0]}: {last[:60]}"] = members
    return ladders_by_name


def text(outcomes: Sequence[Outcome], held_out: bool = False) -> str:
    """Return all tables as Markdown; `held_out` shows held-out entries in every table."""
    shown = [outcome for outcome in outcomes if held_out or not outcome.entry.held_out]
    sections = [_families(outcomes, shown), _schedules(outcomes), _sides(outcomes), _readings(shown)]
    sections += [_ladders(shown), _worst(shown), _below_floor(outcomes, shown), _missing(outcomes)]
    return "\n".join(section for section in sections if section)


def _families(outcomes: Sequence[Outcome], shown: Sequence[Outcome]) -> str:
    """Return the table of errors by family and chip.

    `outcomes` only serves to count the held-out entries that are missing from `shown`.
    """
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in shown:
        groups[outcome.entry.family, outcome.entry.target].append(outcome)
    hidden = len(outcomes) - len(shown)
    lines = [
        "Errors are |predicted / measured - 1| over covered entries of high and medium confidence. Kernels whose order "
        "a compiler makes count by their scheduled reading, all others by program order.",
        *(
            [f"{hidden} held-out entries count in the table by schedule and in no other one."]
            if hidden
            else []
        ),
        "",
        "| family | chip | entries | covered | median | 90 % | bias | on guesses |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (family, target), members in sorted(groups.items()):
        lines.append(f"| {family} | {target} |{_figures(members)}")
    lines.append(f"| **all** | |{_figures(shown)}")
    return "\n".join(lines) + "\n"


def _schedules(outcomes: Sequence[Outcome]) -> str:
    """Return the table by `Schedule`, with one row each for all entries, the fitted ones and the held-out ones."""
    lines = [
        "| schedule by | part | covered | median | 90 % | bias | on guesses | inside bracket | no width |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for schedule in Schedule:
        members = [outcome for outcome in outcomes if outcome.schedule is schedule]
        held_out = [outcome for outcome in members if outcome.entry.held_out]
        fitted = [outcome for outcome in members if not outcome.entry.held_out]
        for subset, chosen in (("all", members), ("fitted", fitted), ("held out", held_out)):
            if chosen:
                lines.append(
                    f"| {schedule.value} | {subset} |{_figures(chosen).split('|', 1)[1]} {_bracketed(chosen)} |"
                )
    lines += [
        "",
        "Inside bracket: how often a measured time lies between the dataflow and the serial reading. No width: how "
        "many of these brackets are one number, as of a term of the cost model.",
    ]
    return "\n".join(lines) + "\n"


def _bracketed(members: Sequence[Outcome]) -> str:
    """Return two table cells: how many measured times are inside their bracket, and how many brackets are one number.

    Both cells are empty if no entry has a bracket.
    """
    brackets = [
        (outcome.bracket_us, outcome.measured_us) for outcome in members if outcome.covered and outcome.counts
    ]
    known = [(*bracket, measured) for bracket, measured in brackets if bracket is not None]
    if not known:
        return "|"
    inside = sum(low <= measured <= high for low, high, measured in known)
    points = sum(math.isclose(low, high, rel_tol=_SAME) for low, high, measured in known)
    return f"{inside} of {len(known)} | {points}"


def _sides(outcomes: Sequence[Outcome]) -> str:
    """Return a sentence with the numbers of covered entries timed on the device and timed from the host."""
    covered = [outcome for outcome in outcomes if outcome.covered]
    host = Counter(outcome.entry.family for outcome in covered if outcome.host_overhead_ns)
    named = ", ".join(f"{family} {count}" for family, count in sorted(host.items()))
    return (
        f"Times of {len(covered) - host.total()} covered entries are the device's. Times of {host.total()}"
        f"{f' ({named})' if named else ''} are of a synchronous call and hold the host side, measured as predicted.\n"
    )


def _readings(outcomes: Sequence[Outcome]) -> str:
    """Return a table by family of the errors in program order and under the scheduled reading, next to each other."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.covered and outcome.counts:
            groups[outcome.entry.family].append(outcome)
    readings = (Reading.program, Reading.scheduled)
    lines = [
        "| median, 90 %, bias | " + " | ".join(reading.value for reading in readings) + " |",
        "|---|---:|---:|",
    ]
    for family, members in sorted(groups.items()):
        cells = []
        for reading in readings:
            errors = [
                outcome.error(reading) for outcome in members if reading in (outcome.predicted_us or ())
            ]
            absolute = [abs(error) for error in errors]
            cells.append(
                f"{percent(statistics.median(absolute))}, {percent(quantile(absolute, 0.9))}, "
                f"{statistics.median(errors) * 100:+.0f} %"
                if errors
                else ""
            )
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figures(members: Sequence[Outcome]) -> str:
    """Return a row's cells: entries, covered, median and 90th percentile of |error|, median error, guessed share."""
    covered = [outcome for outcome in members if outcome.covered]
    counted = [outcome for outcome in covered if outcome.counts]
    head = f" {len(members)} | {len(covered)} |"
    if not counted:
        return head + " | | | |"
    errors = [outcome.error() for outcome in counted]
    absolute = [abs(error) for error in errors]
    shares = [outcome.guessed_share for outcome in counted if outcome.guessed_share is not None]
    guesses = percent(statistics.fmean(shares)) if shares else ""
    return head + (
        f" {percent(statistics.median(absolute))} | {percent(quantile(absolute, 0.9))} |"
        f" {statistics.median(errors) * 100:+.0f} % | {guesses} |"
    )


def _ladders(outcomes: Sequence[Outcome]) -> str:
    """Return the table of Kendall's tau by ladder, and the ladders below `LADDER_TAU`; "" without ladders."""
    ladder_members = sorted(ladders(outcomes).items())
    taus = {
        name: kendall([(member.measured_us, member.time_us()) for member in members])
        for name, members in ladder_members
    }
    if not taus:
        return ""
    lines = [f"| ladder of {LADDER_MIN} or more | entries | Kendall |", "|---|---:|---:|"]
    lines += [f"| {name} | {len(members)} | {taus[name]:.2f} |" for name, members in ladder_members]
    low = [f"{name} ({tau:.2f})" for name, tau in taus.items() if tau < LADDER_TAU]
    equal = sum(math.isnan(tau) for tau in taus.values())
    lines += [
        "",
        f"{len(low)} of {len(taus)} ladders lie below {LADDER_TAU}{': ' if low else ''}{'; '.join(low)}.",
    ]
    if equal:
        lines.append(f"{equal} of the {len(taus)} have no order, because all their predictions are equal.")
    return "\n".join(lines) + "\n"


def _worst(outcomes: Sequence[Outcome], count: int = 5) -> str:
    """Return the table of the `count` entries with the largest |error| in each family."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.covered and outcome.counts:
            groups[outcome.entry.family].append(outcome)
    lines = [
        "| worst of | entry | time of | measured us | predicted us | error |",
        "|---|---|---|---:|---:|---:|",
    ]
    for family, members in sorted(groups.items()):
        for outcome in sorted(members, key=lambda member: -abs(member.error()))[:count]:
            lines.append(
                f"| {family} | {outcome.entry.id} | {'host call' if outcome.host_overhead_ns else 'device'} |"
                f" {outcome.measured_us:.3f} | {outcome.time_us():.3f} |"
                f" {outcome.error() * 100:+.0f} % |"
            )
    return "\n".join(lines) + "\n"


def _below_floor(outcomes: Sequence[Outcome], shown: Sequence[Outcome]) -> str:
    """Return a sentence that names the entries of `shown` predicted below their floor, and counts the held-out ones."""

    def below(outcomes: Sequence[Outcome]) -> list[str]:
        return [
            outcome.entry.id
            for outcome in outcomes
            if outcome.covered and outcome.time_us() < outcome.floor_us
        ]

    names = below(shown)
    hidden = len(below(outcomes)) - len(names)
    names += [f"{hidden} held out"] if hidden else []
    return f"Below the physical floor: {', '.join(names) or 'none'}.\n"


def _missing(outcomes: Sequence[Outcome]) -> str:
    """Return the table of reasons why entries are not covered, with counts; "" if all are covered."""
    reasons = Counter((outcome.entry.family, outcome.reason) for outcome in outcomes if not outcome.covered)
    if not reasons:
        return ""
    lines = ["| not covered | entries | because |", "|---|---:|---|"]
    lines += [f"| {family} | {count} | {reason} |" for (family, reason), count in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def percent(share: float) -> str:
    """Format a share as a percentage, with one decimal below 10 %."""
    return f"{share * 100:.0f} %" if abs(share) >= 0.095 else f"{share * 100:.1f} %"
