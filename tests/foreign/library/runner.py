"""Runs the vendor's kernel library, as published, through the simulator, by the library's own tests.

    python tests/foreign/library/runner.py CLONE [--only TEXT] [--check]

CLONE is a clone of aws-neuron/nki-library. A row of `table.toml` names one of its tests and the arguments; the test
makes the inputs, the reference and the tolerance. Each row runs in its own process, forked from one that has
imported the shared modules. Prints one line per row. The exit status is 1 if a row fails without an explanation in the
table, passes in spite of one, or with --check has a finding that `argued.py` does not accept.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Row:
    """One call of one of the library's tests."""

    kernel: str  # under test: file and function below nkilib_src/nkilib
    file: str  # of the test, below test/integration/nkilib
    test: str  # Class.function, or a function
    arguments: str = ""  # Python over the names of that file, as `key=value, …`
    case: str = ""  # or the name of one of the cases that the test's ranges generate
    target: str = "trn2"
    explained: str = ""  # why it cannot pass
    fails_with: str = ""  # words of the failure, where it is explained

    @property
    def label(self) -> str:
        """The row's name in the report."""
        return f"{self.kernel} {self.test.rpartition('.')[2]}({self.arguments or self.case}) {self.target}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row: `passed`, `failed` or `explained`, with its time and memory."""

    row: Row
    status: str
    detail: str
    seconds: float = 0.0
    mib: int = 0
    findings: tuple[str, ...] = ()


def rows(table: Path = HERE / "table.toml") -> list[Row]:
    """Return the rows of a table; raises ValueError for a row that is not well formed."""
    known, table_rows = {f.name for f in fields(Row)}, []
    for entry in _toml(table)["row"]:
        unknown = entry.keys() - known
        if unknown:
            raise ValueError(f"{table.name}: row {entry.get('kernel')} has unknown keys {sorted(unknown)}")
        if bool(entry.get("explained")) != bool(entry.get("fails_with")):
            raise ValueError(f"{table.name}: row {entry.get('kernel')} needs both explained and fails_with")
        table_rows.append(Row(**entry))
    return table_rows


def run(row: Row, check: bool) -> Outcome:
    """Run one row in a forked process; the parent process has imported the shared modules."""
    from benchmarks.fidelity.sources.forked import run_forked

    ended = {"passed": False, "detail": f"ended without a report, or after {TIME_LIMIT_S} s"}
    return _judged(row, run_forked(lambda: _one(row, check), TIME_LIMIT_S) or ended)


def _one(row: Row, check: bool) -> dict[str, Any]:
    from contextlib import nullcontext

    from simulate.check import detect, gathered
    from tests.foreign.library import running

    began, findings = time.perf_counter(), []
    try:
        with gathered() if check else nullcontext() as seen:
            results = running.results(row)
        if check:
            findings = [
                str(finding) for launch, evidence in seen.launches for finding in detect(launch, evidence)
            ]
        passed, detail = (
            bool(results) and all(good for good, _ in results),
            "; ".join(text for _, text in results),
        )
    except BaseException as error:  # any error of a test or a kernel is the result of its row
        passed, detail = False, f"{type(error).__name__}: " + " | ".join(str(error).splitlines()[:3])
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = {"seconds": time.perf_counter() - began, "mib": usage // 1024, "findings": findings}
    return {"passed": passed, "detail": detail or "the test ran nothing", **took}


def _judged(row: Row, result: dict[str, Any]) -> Outcome:
    from tests.foreign.library.argued import argument

    passed, detail = result.pop("passed"), result.pop("detail")
    result["findings"] = tuple(
        finding for finding in result.get("findings", ()) if not argument(row, finding)
    )
    status = "passed" if passed else "failed"
    if row.explained and passed:
        status, detail = "failed", f"passes, though the table says: {row.explained}"
    elif row.explained and row.fails_with in detail:
        status, detail = "explained", row.explained
    elif result["findings"]:
        status = "failed"
    return Outcome(row, status, detail, **result)


def report(outcome: Outcome) -> str:
    """Return one outcome as a line, and a finding per line below it."""
    head = f"{outcome.status:<10s}{outcome.seconds:6.1f} s {outcome.mib:5d} MiB  {outcome.row.label}"
    return "\n".join([f"{head}  {outcome.detail}", *(f"    {finding}" for finding in outcome.findings)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the table on a clone; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Run the vendor's kernel library through the simulator.", allow_abbrev=False
    )
    parser.add_argument("clone", type=Path)
    parser.add_argument("--table", type=Path, default=HERE / "table.toml")
    parser.add_argument("--only", default="", help="rows whose label contains this")
    parser.add_argument("--check", action="store_true", help="look at every launch with the detectors")
    options = parser.parse_args(argv)
    if not (options.clone / "src" / "nkilib_src").is_dir():
        parser.error(f"{options.clone} is no clone of nki-library")
    _prepare(options.clone)
    outcomes = []
    for row in rows(options.table):
        if options.only in row.label:
            outcomes.append(run(row, options.check))
            print(report(outcomes[-1]), flush=True)
    counts = {s: sum(o.status == s for o in outcomes) for s in ("passed", "failed", "explained")}
    slowest, largest = (max((getattr(o, n) for o in outcomes), default=0) for n in ("seconds", "mib"))
    most = f"at most {slowest:.1f} s and {largest} MiB"
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()) + f"; {most}")
    return 0 if outcomes and not counts["failed"] else 1


def _prepare(clone: Path) -> None:
    """Import the modules that all rows share."""
    import logging
    import warnings

    import simulate
    from tests.foreign.library import stand_ins

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork and threads of a BLAS do not mix
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    simulate.install("simulate")
    stand_ins.install(clone.resolve())
    import torch

    torch.set_num_threads(1)


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
