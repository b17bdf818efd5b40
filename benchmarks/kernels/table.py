"""The table of a chip as text: one line a work, stored beside this file, so that a slower kernel shows as a diff."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.kernels.measure import Measured
from simulate.timing import Reading

STORED = Path(__file__).parent / "stored"
GOOD_SHARE = 0.8
"""The share of its floor from which on a row counts as near the limit, in the slower reading."""

_HEAD = f"{'work':<50} {'floor':>9} {'program':>9} {'scheduled':>9} {'share':>6}  {'busiest':<14} bound"


def line(measured: Measured) -> str:
    """One row: times in us, the floor's share of the slower reading, the busiest engine or queue with its share."""
    times = " ".join(f"{measured.times_us[each]:>9.1f}" for each in (Reading.program, Reading.scheduled))
    busiest = f"{measured.busiest} {measured.busy_share:.0%}"
    return (
        f"{measured.work.title:<50} {measured.floor_us:>9.1f} {times} {measured.least_share:>6.0%}  "
        f"{busiest:<14} {measured.bound.value}"
    )


def text(target: str, rows: Iterable[Measured]) -> str:
    """The whole table of a chip, with the number of rows near the limit."""
    known = list(rows)
    near = sum(row.least_share >= GOOD_SHARE for row in known)
    return "\n".join(
        [
            f"# {target}: {near} of {len(known)} rows reach {GOOD_SHARE:.0%} of their floor; times in us",
            _HEAD,
            *map(line, known),
            "",
        ]
    )


def stored(target: str) -> Path:
    """The stored table of a chip."""
    return STORED / f"{target}.txt"
