"""`python -m benchmarks.kernels`: the shipped kernels against what the chips allow."""

from __future__ import annotations

import argparse
import sys

import simulate
from benchmarks.fidelity.sources.clones import recognised
from benchmarks.kernels.measure import Bench
from benchmarks.kernels.public import best_public
from benchmarks.kernels.table import stored, text
from benchmarks.kernels.works import works

TARGETS = ("trn1", "trn2", "trn3")


def main() -> int:
    """Print the tables of the chips; with --write, store them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="a chip; may be repeated (default: all)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose title contains TEXT")
    parser.add_argument("--write", action="store_true", help="store the tables")
    parser.add_argument(
        "--sources",
        action="append",
        default=[],
        metavar="CLONE",
        help="a clone of aws-neuron/nki-library or awslabs/nki-autotune: time its kernels beside ours; may be repeated",
    )
    options = parser.parse_args()
    if options.write and (options.only or options.sources):
        parser.error("--write stores whole tables of the shipped kernels; leave --only and --sources out")
    clones = recognised(options.sources)
    simulate.install("simulate")
    for target in options.target or TARGETS:
        bench = Bench(target)
        rows = [bench.measure(work) for work in works() if options.only in work.title]
        public = {row.work.title: best_public(row.work, target, clones) for row in rows} if clones else None
        found = text(target, rows, public)
        print(found)
        if options.write:
            stored(target).write_text(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
