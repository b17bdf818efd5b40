"""`python -m benchmarks.fidelity --measurements FILE [--json OUT]`: predicted against published times."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from simulate.errors import NkwError
from simulate.files import Outputs, imported_files
from simulate.terminal import error, progress
from simulate.timing import Reading


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns 0, or 2 for a file that holds no measurements or cannot be written."""
    options = _parser().parse_args(argv)
    from benchmarks.fidelity.bench import as_json, outcomes
    from benchmarks.fidelity.entry import read_entries
    from benchmarks.fidelity.table import text

    try:
        outputs = Outputs(lambda: (options.measurements, *imported_files()))
        results = outputs.claim(options.json, "results", "NKW-FIDELITY-FILE")
        entries = read_entries(options.measurements)
    except NkwError as refused:
        error(refused)
        return 2
    if options.family:
        entries = [entry for entry in entries if entry.family in options.family]
    main = None if options.reading is None else Reading(options.reading)
    readings = () if options.quick else tuple(Reading)
    found = outcomes(progress(entries, "measurements"), readings, main, probe=not options.quick)
    print(text(found))
    if results is not None:
        try:
            with results.writing() as file:
                file.write(json.dumps(as_json(found), indent=1) + "\n")
        except NkwError as refused:
            error(refused)
            return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity",
        description="Compare predicted times with published measurements, by family and chip.",
    )
    parser.add_argument("--measurements", required=True, metavar="FILE", help="a JSON list of measurements")
    parser.add_argument("--json", metavar="OUT", help="write the outcome of every entry")
    parser.add_argument("--family", action="append", metavar="NAME", help="only this family; may be repeated")
    parser.add_argument(
        "--reading",
        choices=[reading.value for reading in Reading],
        help="whose errors the table shows, for all entries (default: scheduled where a compiler makes the order, else "
        "program)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="no bounds and no share of guesses: half of the time"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
