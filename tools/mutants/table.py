"""Summaries of a campaign's results, as Markdown tables and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tools.mutants.campaign import Result
from tools.mutants.equivalents import reason
from tools.mutants.judge import Fate
from tools.mutants.source import FOLDER, file_of

WITHOUT_NUMBERS = (Fate.refused, Fate.guarded, Fate.python, Fate.raw, Fate.reported)
"""Fates that need no reference."""

DEAD = (*WITHOUT_NUMBERS, Fate.numbers, Fate.poison, Fate.time, Fate.limit)
COLUMNS = ("mutants", "refused", "python", "found", "numbers", "time", "limit", "equivalent", "survived")


def column(result: Result) -> str:
    """Return the table column in which a result is counted.

    `guarded` counts as refused, `poison` as numbers, `raw` as python.
    """
    fate = result.verdict.fate
    if fate in (Fate.refused, Fate.guarded):
        return "refused"
    if fate in (Fate.python, Fate.raw):
        return "python"
    if fate in (Fate.numbers, Fate.poison):
        return "numbers"
    if fate in (Fate.reported, Fate.time, Fate.limit):
        return fate.value
    return "equivalent" if equivalent(result) else "survived"


def equivalent(result: Result) -> str | None:
    """Return why a mutant that nothing noticed is no fault, or None.

    The reason is shown by its calls, or listed in `equivalents`.
    """
    if result.verdict.fate in DEAD:
        return None
    shown = result.verdict.how != "identical" or result.mutant.operator in ("swap", "duplicate")
    if result.verdict.fate is Fate.equal and shown:
        return result.verdict.how
    return reason(result.mutant.key)


def mortality(results: Iterable[Result]) -> tuple[int, int]:
    """Return the number of noticed mutants and the number of all mutants, both without equivalent ones."""
    counted = Counter(column(result) == "survived" for result in results if column(result) != "equivalent")
    return counted[False], counted[True] + counted[False]


def caught_without_numbers(results: Iterable[Result]) -> tuple[int, int]:
    """Return how many mutants that break a rule were caught without comparing numbers, and how many break one.

    Caught are those that are refused or reported. Not caught are those with the fates `poison`, `raw` and `limit`.
    """
    fates = Counter(result.verdict.fate for result in results)
    caught = fates[Fate.refused] + fates[Fate.reported]
    return caught, caught + fates[Fate.poison] + fates[Fate.raw] + fates[Fate.limit]


def table(results: Sequence[Result]) -> str:
    """Return Markdown tables of counts by kernel file, operator and code, and sentences with the two shares."""
    out = []
    for title, key in (("file", lambda r: r.mutant.module), ("operator", lambda r: r.mutant.operator)):
        out += [*_counts(title, results, key), ""]
    codes = Counter(r.verdict.how for r in results if r.verdict.fate in (Fate.refused, Fate.reported))
    out += ["| code | mutants |", "|---|---:|"]
    out += [f"| {code} | {count} |" for code, count in sorted(codes.items(), key=lambda e: (-e[1], e[0]))]
    died, alive = mortality(results)
    caught, breaking = caught_without_numbers(results)
    out += [
        "",
        f"died: {died} of {alive} that are not equivalent, {_share(died, alive)}",
        f"caught without numbers: {caught} of {breaking} that break a rule or an order, {_share(caught, breaking)}",
    ]
    return "\n".join(out) + "\n"


def _counts(title: str, results: Sequence[Result], key: Callable[[Result], str]) -> list[str]:
    """Return the lines of a table of counts by column, with a row for each value of `key`."""
    rows: dict[str, Counter[str]] = {}
    for result in results:
        for row in (key(result), "all"):
            counts = rows.setdefault(row, Counter())
            counts[column(result)] += 1
            counts["mutants"] += 1
    out = [f"| {title} | " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * len(COLUMNS) + "|"]
    for row in [*sorted(set(rows) - {"all"}), *(["all"] if rows else [])]:
        out.append(f"| {row} | " + " | ".join(str(rows[row][name]) for name in COLUMNS) + " |")
    return out


def as_json(results: Sequence[Result]) -> str:
    """Return all mutants with their fates as JSON text."""
    return (
        json.dumps(
            [
                {
                    "mutant": result.mutant.key,
                    "file": file_of(result.mutant.module).relative_to(FOLDER.parent).as_posix(),
                    "line": result.mutant.line,
                    "operator": result.mutant.operator,
                    "fate": result.verdict.fate.value,
                    "how": result.verdict.how,
                    "case": result.verdict.case,
                    "equivalent": equivalent(result),
                }
                for result in results
            ],
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.2f} %" if total else "-"
