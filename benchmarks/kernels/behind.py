"""Rows of the stored tables whose kernel is slower than the best public kernel for the same work.

A test reads them: each such work must have a reason in `REASONS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.fidelity.sources.clones import Clone
from benchmarks.kernels.measure import READINGS
from benchmarks.kernels.table import STORED, Public, stored

MARGIN = 1.05
"""How many times as long as the public kernel a row may take, in the slower reading of each."""

REASONS = MappingProxyType(
    {
        "prefill output projection": "adds the residual, which the public kernel leaves to another launch",
    }
)
"""Why the rows of a work are behind."""


@dataclass(frozen=True)
class Behind:
    """A row that takes more than MARGIN times as long as the public kernel.

    Each time is the slower of its readings, in us.
    """

    title: str
    time_us: float
    public_us: float

    @property
    def work(self) -> str:
        """The title up to the first comma: the work without shape and size."""
        return self.title.partition(",")[0]

    @property
    def times(self) -> float:
        """The time of the shipped kernel over that of the public one."""
        return self.time_us / self.public_us


def find_stored_public(target: str) -> Path:
    """Return the path of the file with the stored times of public kernels on a chip."""
    return STORED / f"{target}-public.txt"


def format_public_times(target: str, public: Mapping[str, Public], clones: Iterable[Clone]) -> str:
    """Format the times of public kernels in us, one line per work, after a line with the clones' commits.

    Works whose entry in `public` is a reason instead of times are left out.
    """
    commits = ", ".join(f"{clone.repo} at {clone.commit}" for clone in clones)
    rows = [
        f"{title:<46} " + " ".join(f"{times[reading.value]:>9.1f}" for reading in READINGS)
        for title, times in public.items()
        if not isinstance(times, str)
    ]
    return "\n".join([f"# {target}: best public kernels, us, program and scheduled; {commits}", *rows, ""])


def behind(target: str) -> list[Behind]:
    """Return the rows of a chip's stored table that take more than MARGIN times as long as the public kernel.

    The row with the largest ratio comes first. Both stored files of the chip must exist.
    """
    ours, public = _slower(stored(target), first=1), _slower(find_stored_public(target), first=0)
    rows = [Behind(title, ours[title], time_us) for title, time_us in public.items()]
    return sorted((row for row in rows if row.times > MARGIN), key=lambda row: -row.times)


def _slower(table: Path, first: int) -> dict[str, float]:
    """Return the slower of the readings' times in us, by title, read from a stored table.

    `first` is the index of the first time among the columns after the title.
    """
    rows = [
        line.partition("  ") for line in table.read_text().splitlines() if not line.startswith(("#", "work "))
    ]
    return {
        title: max(map(float, columns.split()[first : first + len(READINGS)])) for title, _, columns in rows
    }
