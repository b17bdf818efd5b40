"""Entries that name a kernel by how far it is from one that is described: steps of a search, faster variants."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.fidelity.case import Case
from benchmarks.fidelity.entry import Entry


def is_late_step(entry: Entry) -> bool:
    """A later step of a search for faster code, which has its obvious improvements; the first two mostly try things."""
    found = re.search(r"optimi[sz]ation step (\d+)", entry.kernel)
    return found is not None and int(found.group(1)) > 2


def as_much_faster(entry: Entry, case: Case) -> Case:
    """The case of the described kernel, as much faster as the entry says the variant is.

    The kernel of such a variant is not published, but its speed-up is part of the description, or of the metrics.
    """
    found = re.search(r"(\d+(?:\.\d+)?)\s*x faster", entry.kernel)
    ratio = found.group(1) if found else entry.metrics.get("ratio_to_baseline", 1.0)
    return replace(case, divisor=case.divisor * max(float(ratio), 1.0))
