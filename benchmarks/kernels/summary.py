"""Counts of a chip's rows that reach GOOD_SHARE of their floor, computed from unrounded times; for `--summary`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kernels.measure import Measured, Refused
from benchmarks.kernels.table import GOOD_SHARE
from benchmarks.kernels.works import dense_works


def summary(target: str, rows: Sequence[Measured | Refused], cores: int = 1) -> str:
    """Return how many rows reach GOOD_SHARE of their floor, then one line for each row of `dense_works` that does not.

    The counts are of the rows of `dense_works`, which are the first 208 of a table on one core, and of all rows. A
    row's share is that of its slower reading; a refused row never reaches its floor.
    """
    dense_titles = {work.title for work in dense_works()}
    dense = [row for row in rows if row.work.title in dense_titles]
    below = [row for row in dense if not reaches(row)]
    label = target if cores == 1 else f"{target} on {cores} cores"
    lines = [
        f"{label}: {count(dense)} rows of matmuls, dense decoder layers and heads reach {GOOD_SHARE:.0%} of their "
        f"floor, {count(rows)} of all rows"
    ]
    lines += [f"  {share_text(row):>6}  {row.work.title}" for row in below]
    return "\n".join(lines)


def reaches(row: Measured | Refused) -> bool:
    """Return whether a row reaches GOOD_SHARE of its floor in the slower reading."""
    return isinstance(row, Measured) and row.least_share >= GOOD_SHARE


def count(rows: Sequence[Measured | Refused]) -> str:
    """Return how many of some rows reach GOOD_SHARE, as "N of M"."""
    return f"{sum(map(reaches, rows))} of {len(rows)}"


def share_text(row: Measured | Refused) -> str:
    """Return a row's share with two decimals, so that 79.9 % does not look like 80 %, or "none" if it is refused."""
    return f"{row.least_share:.2%}" if isinstance(row, Measured) else "none"
