"""Compare predicted times of the shipped kernels with the least times that the chips allow, and with public kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

import simulate
from benchmarks.fidelity.sources.clones import recognise_clones
from benchmarks.kernels.behind import find_stored_public, format_public_times
from benchmarks.kernels.convolutions import convolution_works
from benchmarks.kernels.latent import latent_works
from benchmarks.kernels.measure import Bench, Measured, Refused
from benchmarks.kernels.public import best_public
from benchmarks.kernels.recurrent import recurrent_works
from benchmarks.kernels.routed import expert_works
from benchmarks.kernels.speech import speech_works
from benchmarks.kernels.summary import summary
from benchmarks.kernels.table import stored, text
from benchmarks.kernels.works import Work, divided_works, works

TARGETS = ("trn1", "trn2", "trn3")
TABLES = (*((target, 1) for target in TARGETS), ("trn2", 2))
"""The stored tables: chips and physical cores of each rank."""


def list_works(cores: int) -> list[Work]:
    """Return the works of a table in its order: all for one core, or those divided over the cores of a logical core."""
    if cores > 1:
        return [*divided_works()]
    return [
        *works(),
        *expert_works(),
        *latent_works(),
        *convolution_works(),
        *recurrent_works(),
        *speech_works(),
    ]


def measure_works(target: str, cores: int, chosen: Iterable[Work]) -> list[Measured | Refused]:
    """Measure some works on a target and return their rows of the table; `cores` are the physical cores of the rank.

    On several cores, a work that a kernel does not divide gives a `Refused` row; on one core its error is raised.
    """
    bench = Bench(target, cores)
    measure = bench.measure if cores == 1 else bench.measure_if_divided
    return [measure(work) for work in chosen]


def main() -> int:
    """Print the table of each chip, or its summary with --summary; with --write, store the tables. Returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="a chip; may be repeated (default: all)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose title contains TEXT")
    parser.add_argument(
        "--write", action="store_true", help="store the tables; with clones, the times of their kernels"
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="instead of the tables, count the rows that reach 80%% of their floor and list those of matmuls, dense "
        "decoder layers and heads that do not",
    )
    parser.add_argument(
        "--sources",
        action="append",
        default=[],
        metavar="CLONE",
        help="a clone of aws-neuron/nki-library or awslabs/nki-autotune: time its kernels beside ours; may be repeated",
    )
    parser.add_argument(
        "--cores",
        type=int,
        choices=(1, 2),
        help="only the tables on so many physical cores of a logical core",
    )
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write stores whole tables; leave --only out")
    if options.summary and (options.write or options.sources):
        parser.error("--summary prints counts alone; leave --write and --sources out")
    clones = recognise_clones(options.sources)
    simulate.install("simulate")
    for target, cores in TABLES:
        if target not in (options.target or TARGETS) or cores not in (options.cores or cores,):
            continue
        rows = measure_works(
            target, cores, (work for work in list_works(cores) if options.only in work.title)
        )
        if options.summary:
            print(summary(target, rows, cores))
            continue
        public = None
        if clones and cores == 1:
            public = {row.work.title: best_public(row.work, target, clones) for row in rows}
        print(text(target, rows, public, cores))
        if options.write and public is None:
            stored(target, cores).write_text(text(target, rows, cores=cores))
        elif options.write:
            find_stored_public(target).write_text(format_public_times(target, public, clones.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
