"""Entries that name a kernel by how far it is from one that is described: steps of a search, faster variants."""

from __future__ import annotations

import re

from benchmarks.fidelity.case import NotCovered
from benchmarks.fidelity.entry import Entry


def is_late_step(entry: Entry) -> bool:
    """Tell whether an entry is step 3 or later of a search for faster code, which has its obvious improvements."""
    match = re.search(r"optimi[sz]ation step (\d+)", entry.kernel)
    return match is not None and int(match.group(1)) > 2


def described_itself(entry: Entry) -> None:
    """Refuse a variant of which nothing is published but by how much it is faster than the kernel described.

    Its predicted time would be the described kernel's divided by that figure: the entry's own words would answer it.
    """
    match = re.search(r"(\d+(?:\.\d+)?)\s*x faster", entry.kernel)
    ratio = match.group(1) if match else entry.metrics.get("ratio_to_baseline", 1.0)
    if float(ratio) > 1.0:
        raise NotCovered(
            "a variant told apart from the described kernel by its speed-up alone, which would answer itself"
        )
