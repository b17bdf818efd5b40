"""Entries that describe a kernel by its relation to another: steps of a search for faster code, and faster variants."""

from __future__ import annotations

import re

from benchmarks.fidelity.case import NotCovered
from benchmarks.fidelity.entry import Entry


def is_late_step(entry: Entry) -> bool:
    """Return whether an entry is step 3 or later of a search for faster code, which has the obvious improvements."""
    match = re.search(r"optimi[sz]ation step (\d+)", entry.kernel)
    return match is not None and int(match.group(1)) > 2


def refuse_bare_speed_up(entry: Entry) -> None:
    """Raise NotCovered for a variant that is described only as faster, by some factor, than the kernel described.

    Its predicted time would be the described kernel's time divided by that factor, so the entry would predict itself.
    """
    match = re.search(r"(\d+(?:\.\d+)?)\s*x faster", entry.kernel)
    ratio = match.group(1) if match else entry.metrics.get("ratio_to_baseline", 1.0)
    if float(ratio) > 1.0:
        raise NotCovered(
            "a variant told apart from the described kernel by its speed-up alone, which would answer itself"
        )
