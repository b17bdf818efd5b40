"""`make bench`: measure the simulator's speed on this machine and print the tables of benchmarks/speed/README.md."""

from __future__ import annotations

import platform
import sys

import numpy as np

from benchmarks.speed import (
    against_transformers,
    checks,
    dry,
    engine,
    families,
    foreign,
    hostile,
    kernels,
    model,
    replays,
    serving,
    simulator,
)
from benchmarks.speed.measure import Row


def main() -> int:
    """Print a table with each row right after its measurement, then the table of models against transformers.

    Returns 0.
    """
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {_processor()}\n"
    )
    print("| work | measured | ratio | against |")
    print("|---|---:|---:|---|")
    for source in (
        simulator,
        families,
        kernels,
        replays,
        checks,
        model,
        engine,
        serving,
        hostile,
        dry,
        foreign,
    ):
        for row in source.rows():
            print(_line(row), flush=True)
    print()
    for line in against_transformers.table():
        print(line, flush=True)
    return 0


def _line(row: Row) -> str:
    """Format a row as a line of a Markdown table."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {row.work} | {row.measured:.1f} {row.unit} | {ratio} | {row.reference} |"


def _processor() -> str:
    """Return the number and the name of the machine's processors, from /proc/cpuinfo if it exists."""
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
        return f"{len(names)} x {names[0]}"
    except (OSError, IndexError):
        return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
