"""The command `python -m benchmarks.fidelity [--measurements FILE] [--sources CLONE]...`.

It predicts the time of each measurement in FILE and prints tables of the errors; `--json` writes one object per entry.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fidelity.sources.clones import Clone, recognise_clones
from nkw.errors import NkwError, shown
from nkw.files import STDOUT, Outputs, list_imported_files
from nkw.terminal import error, progress
from simulate.hardware import TARGETS, hardware, use_overlay
from simulate.options import HARDWARE
from simulate.timing import Reading

_PUBLISHED = str(Path(__file__).resolve().parents[2] / "notebooks" / "published.json")


def main(argv: Sequence[str] | None = None, prog: str = "python -m benchmarks.fidelity") -> int:
    """Print the error tables, and write the JSON outcome where `--json` says.

    Returns:
        0; or 2, with the error on stderr, if FILE holds no measurements, a `--sources` folder is not a known clone,
        the overlay is invalid, or the JSON cannot be written.
    """
    parser = _parser(prog)
    options = parser.parse_args(argv)
    if options.measurements is None:
        if options.sources:
            parser.error("--sources needs --measurements FILE, an object with times of the clone's kernels")
        options.measurements = _PUBLISHED
    try:
        if options.hardware is not None:
            use_overlay(options.hardware)
        clones = recognise_clones(options.sources)
        read = [file for clone in clones.values() for file in clone.files()]
        outputs = Outputs(lambda: (options.measurements, *read, *list_imported_files()))
        to_stdout = options.json == STDOUT
        results = None if to_stdout else outputs.claim(options.json, "results", "NKW-FIDELITY-FILE")
        table, rows = _sources(options, clones) if clones else _descriptions(options)
    except NkwError as refused:
        error(refused)
        return 2
    overlaid = [chip.label for chip in map(hardware, TARGETS) if chip.replaced]
    table += "".join(f"\n\nPredictions are those of {label}." for label in overlaid)
    print(shown(table, len(table)), file=sys.stderr if to_stdout else sys.stdout)
    if to_stdout:
        print(json.dumps(rows, indent=1))
    if results is not None:
        try:
            with results.writing() as file:
                file.write(json.dumps(rows, indent=1) + "\n")
        except NkwError as refused:
            error(refused)
            return 2
    return 0


Found = tuple[str, list[dict[str, Any]]]


def _descriptions(options: argparse.Namespace) -> Found:
    """Return the table and the JSON rows for FILE, a list of measurements whose kernels are described in words.

    Only the families named by `--family` are predicted.
    """
    from benchmarks.fidelity.bench import build_rows, outcomes
    from benchmarks.fidelity.entry import read_entries
    from benchmarks.fidelity.table import text

    entries = read_entries(options.measurements)
    if options.family:
        entries = [entry for entry in entries if entry.family in options.family]
    main, readings = _readings(options)
    results = outcomes(progress(entries, "measurements"), readings, main, probe=not options.quick)
    return text(results, options.held_out), build_rows(results, options.held_out)


def _sources(options: argparse.Namespace, clones: Mapping[str, Clone]) -> Found:
    """Return the table and the JSON rows for FILE, an object with times of public kernels, which are run from `clones`.

    Only the kernels named by `--family` are predicted.
    """
    from benchmarks.fidelity.sources.bench import build_source_rows, predict_sources
    from benchmarks.fidelity.sources.source import read_sources
    from benchmarks.fidelity.sources.table import format_source_tables

    sources = read_sources(options.measurements)
    if options.family:
        sources = [source for source in sources if source.kernel in options.family]
    main, readings = _readings(options)
    results = predict_sources(progress(sources, "launches"), clones, readings, main)
    return format_source_tables(results, clones), build_source_rows(results, clones)


def _readings(options: argparse.Namespace) -> tuple[Reading | None, tuple[Reading, ...]]:
    """Return the reading whose times are compared with the measurements, and all readings to compute.

    Returns:
        The first is None without `--reading`: each entry then uses the reading of its `Schedule`. The second is empty
        with `--quick`.
    """
    main = None if options.reading is None else Reading(options.reading)
    return main, () if options.quick else tuple(Reading)


def _parser(prog: str) -> argparse.ArgumentParser:
    """Build the argument parser; `prog` is the command's name in the usage line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare predicted times with published measurements, by family and chip.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--measurements",
        metavar="FILE",
        help="a JSON list of measurements (default: notebooks/published.json of the checkout); with --sources, an "
        "object with times of public kernels",
    )
    parser.add_argument(
        "--sources",
        action="append",
        default=[],
        metavar="CLONE",
        help="run the kernels of FILE from this clone, as it stands; may be repeated, one per repository",
    )
    parser.add_argument(
        "--json",
        metavar="OUT",
        help="write the outcome of every entry; - is stdout, and the table goes to stderr then",
    )
    parser.add_argument(
        "--family",
        action="append",
        metavar="NAME",
        help="only this family, or with --sources this kernel; may be repeated",
    )
    parser.add_argument(
        "--reading",
        choices=[reading.value for reading in Reading],
        help="whose errors the table shows, for all entries (default: scheduled where a compiler makes the order, else "
        "program)",
    )
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="show held-out entries as the fitted ones in tables and JSON; nothing may be fitted to them afterwards",
    )
    HARDWARE.add_to(parser)
    parser.add_argument(
        "--quick", action="store_true", help="no bounds and no share of guesses: half of the time"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
