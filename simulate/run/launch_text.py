"""Texts about a launch: a short report of outputs, instructions and memory for a terminal, and a summary as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from nkw.report import Hanging, Name, Part, table
from nkw.terminal import report_of
from simulate.memory import MemoryRegion
from simulate.run.arguments import list_leaves
from simulate.run.launch import Launch
from simulate.run.machine import capacity_bytes

_ROWS = 12
"""Largest number of rows of a table."""


@report_of.register(Launch)
def report(launch: Launch) -> list[Part]:
    """Return the parts of a launch's report: outputs, instruction counts, use of SBUF and PSUM, warnings."""
    out: list[Part] = [Hanging(launch.title, style="bold")]
    results = [
        (f"{rank}", f"{number}", f"{value.shape} {value.dtype}")
        for rank, outputs in enumerate(launch.outputs)
        for number, value in enumerate(map(np.asarray, list_leaves(outputs)))
    ]
    if results:
        out += ["", table("rank|result|shape and dtype", results[:_ROWS], left=(2,))]
        out += _count_omitted(len(results))
    counts = Counter(event.op for stream in launch.streams for event in stream).most_common()
    out += ["", table("instruction|count", [(Name(op), f"{count:,}") for op, count in counts[:_ROWS]])]
    out += _count_omitted(len(counts))
    memories = [
        (
            region.value.upper(),
            f"{launch.high_water_bytes(region):,}",
            f"{capacity_bytes(launch.hardware, region):,}",
        )
        for region in (MemoryRegion.sbuf, MemoryRegion.psum)
    ]
    out += ["", table("memory|high-water mark|usable bytes per partition", memories)]
    return [*out, *(Hanging(f"warning: {text}") for text in launch.warnings)]


def summary(launch: Launch) -> dict[str, Any]:
    """Return a JSON object with the kernel, target, mode, warnings, and numbers of ranks, cores and instructions."""
    ranks = len({stream.rank for stream in launch.streams})
    return {
        "kernel": launch.kernel,
        "target": launch.hardware.name,
        "mode": launch.mode.value,
        "ranks": ranks,
        "cores": len(launch.streams),
        "instructions": sum(map(len, launch.streams)),
        "warnings": list(launch.warnings),
    }


def _count_omitted(count: int) -> list[Part]:
    """Return the line "and N more" if a table of `count` rows is cut after the first 12, else no line."""
    return [f"and {count - _ROWS} more"] if count > _ROWS else []
