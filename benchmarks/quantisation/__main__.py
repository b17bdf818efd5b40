"""Measure every scheme of `nkw quantize` on the shipped story model; print the table and, with --write, store it.

python -m benchmarks.quantisation --corpus DIR [--scheme LABEL] [--write]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quantisation.measure import (
    CALIBRATION_TEXTS,
    CASES,
    HELD_OUT_TEXTS,
    TRAIN,
    VALID,
    Measurement,
    check_corpus,
    measure,
    read_sequences,
)
from model.quantize.evaluation import ACTIVATIONS, CACHE, SCHEME, WEIGHTS

STORED = Path(__file__).with_name("stored.json")
RUNS = (WEIGHTS, ACTIVATIONS, SCHEME)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table row by row, and return 0."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.quantisation", description=__doc__
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.txt and valid.txt")
    parser.add_argument("--scheme", help="the label of one row, such as 'gptq g128' (default: all)")
    parser.add_argument("--write", action="store_true", help=f"store the rows in {STORED.name}")
    options = parser.parse_args(argv)
    for sentence in check_corpus(options.corpus):
        print(sentence, file=sys.stderr)
    calibration = read_sequences(options.corpus / TRAIN, CALIBRATION_TEXTS)
    held_out = read_sequences(options.corpus / VALID, HELD_OUT_TEXTS)
    cases = [case for case in CASES if options.scheme in (None, case.label)]
    measured = []
    print(HEADING, flush=True)
    for case in cases:
        measured.append(measure(case, calibration, held_out))
        print(format_row(measured[-1]), flush=True)
    cache = measured[-1].runs[CACHE]
    print(f"loss of the original: {measured[-1].base:.4f} nats on {measured[-1].tokens:,} tokens")
    print(f"cache in fp8 alone: {cache.change:+.4f}, KL {cache.kl:.5f}, same top token {cache.same:.1%}")
    if options.write:
        rows = {**read_stored(), **{row.label: asdict(row) for row in measured}}
        STORED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


HEADING = (
    "| scheme | weights only | KL | same top token | activations only | scheme | KL | same top token |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


def format_row(row: Measurement) -> str:
    """Return a row of the Markdown table: changes of the loss in nats."""
    return f"| {row.label} | {' | '.join(_list_cells(row))} |"


def _list_cells(row: Measurement) -> Iterator[str]:
    for name in RUNS:
        run = row.runs.get(name)
        yield "" if run is None else f"{run.change:+.4f}"
        if name != ACTIVATIONS:
            yield "" if run is None else f"{run.kl:.5f}"
            yield "" if run is None else f"{run.same:.1%}"


def read_stored() -> dict[str, Any]:
    """Return the stored rows by label; empty without the file."""
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
