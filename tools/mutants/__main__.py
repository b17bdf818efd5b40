"""`python -m tools.mutants`: run all mutants of the shipped kernels, or a sample, and print what noticed them."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import simulate

simulate.install("simulate")

from tools.mutants.campaign import Result, run  # noqa: E402  (the cases import nki)
from tools.mutants.operators import mutants  # noqa: E402
from tools.mutants.source import MODULES, Mutant  # noqa: E402
from tools.mutants.table import as_json, caught_without_numbers, column, mortality, table  # noqa: E402

MORTALITY = 0.98
CAUGHT = 0.97


def sampled(everything: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants in the order of the source: those with the smallest hashes of the seed and their keys.

    When a line of source changes, the draw changes only for mutants of that line. A draw by index would change the
    whole sample.
    """

    def digest(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    chosen = {mutant.key for mutant in sorted(everything, key=digest)[:count]}
    return [mutant for mutant in everything if mutant.key in chosen]


def main() -> int:
    """Run the campaign and print its tables.

    Returns:
        1 if too many mutants survive or too few are caught without comparing numbers; 2 if no mutant is chosen; else
        0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description="break the shipped kernels", allow_abbrev=False
    )
    parser.add_argument("--sample", type=int, metavar="N", help="only N of the mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--file", choices=MODULES, action="append", help="only mutants of this kernel file")
    parser.add_argument("--only", metavar="WORDS", help="only mutants whose key contains these words")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--json", metavar="FILE", help="write every mutant with its fate")
    options = parser.parse_args()
    chosen = [
        mutant
        for mutant in mutants()
        if (not options.file or mutant.module in options.file)
        and (not options.only or options.only in mutant.key)
    ]
    if options.sample is not None:
        chosen = sampled(chosen, options.sample, options.seed)
    if not chosen or options.processes < 1:
        print(
            "error: no mutant is chosen, or --processes is below 1: widen --file or --only, or allow a process",
            file=sys.stderr,
        )
        return 2
    done = 0

    def progress(result: Result) -> None:
        nonlocal done
        done += 1
        if done % 100 == 0:
            print(f"{done} of {len(chosen)}", file=sys.stderr, flush=True)

    results = run(chosen, options.processes, progress)
    print(table(results))
    for result in results:
        if column(result) == "survived" or result.verdict.fate.value in ("poison", "raw", "limit"):
            fate = result.verdict
            print(f"{fate.fate.value} {fate.how}: {result.mutant.key}  (line {result.mutant.line})")
    if options.json:
        Path(options.json).write_text(as_json(results), encoding="utf-8")
    died, alive = mortality(results)
    caught, breaking = caught_without_numbers(results)
    return int(died < MORTALITY * alive or caught < CAUGHT * breaking)


if __name__ == "__main__":
    sys.exit(main())
