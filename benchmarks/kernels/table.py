"""The table of a chip as text, one line per work; the stored copies in `stored/` show a slower kernel as a diff."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.kernels.measure import READINGS, Measured, Refused

STORED = Path(__file__).parent / "stored"
GOOD_SHARE = 0.8
"""The share of its floor from which on a row counts as near the limit, in the slower reading."""

_HEAD = f"{'work':<45} {'floor':>7} {'program':>8} {'scheduled':>9} {'share':>5}  {'busiest':<15} bound"
_PUBLIC_HEAD = f"{_HEAD:<108} {'public: program':>16} {'scheduled':>9}"

Public = Mapping[str, float] | str
"""Times in us of a public kernel by reading, or why there are none."""


def line(measured: Measured | Refused) -> str:
    """Return one row: title, floor, times in us by reading, share of the floor, busiest engine or queue, and bound.

    The share is that of the slower reading. A refused work has its title, floor and reason.
    """
    start = f"{measured.work.title:<45} {measured.floor.time_us:>7.1f}"
    if isinstance(measured, Refused):
        return f"{start} {measured.reason}"
    program, scheduled = (measured.times_us[reading] for reading in READINGS)
    busiest = f"{measured.busiest} {measured.busy_share:.0%}"
    return (
        f"{start} {program:>8.1f} {scheduled:>9.1f} {measured.least_share:>5.0%}  {busiest:<15} "
        f"{measured.floor.bound.value}"
    )


def with_public(measured: Measured, public: Public) -> str:
    """Return one row followed by the times of the public kernel in us, or by the reason why there is none."""
    if isinstance(public, str):
        return f"{line(measured):<108} {public}"
    program, scheduled = (public[reading.value] for reading in READINGS)
    return f"{line(measured):<108} {program:>16.1f} {scheduled:>9.1f}"


def text(
    target: str,
    rows: Iterable[Measured | Refused],
    public: Mapping[str, Public] | None = None,
    cores: int = 1,
) -> str:
    """Return the whole table of a chip, headed by the number of rows that reach GOOD_SHARE of their floor.

    Args:
        target: Name of the chip.
        rows: Works with their times.
        public: Times of public kernels by title, or None for a table without them.
        cores: Physical cores of the rank.
    """
    known = list(rows)
    near = sum(isinstance(row, Measured) and row.least_share >= GOOD_SHARE for row in known)
    where = target if cores == 1 else f"{target} on {cores} cores"
    return "\n".join(
        [
            f"# {where}: {near} of {len(known)} rows reach {GOOD_SHARE:.0%} of their floor; times in us",
            _HEAD if public is None else _PUBLIC_HEAD,
            *(
                with_public(row, public[row.work.title])
                if public is not None and isinstance(row, Measured)
                else line(row)
                for row in known
            ),
            "",
        ]
    )


def stored(target: str, cores: int = 1) -> Path:
    """Return the path of a chip's stored table, on one core or on `cores` cores of a logical core."""
    return STORED / (f"{target}.txt" if cores == 1 else f"{target}-lnc{cores}.txt")
