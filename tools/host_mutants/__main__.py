"""Break the checker, the engine, the server, plans or traffic in single places, and count how many faults tests notice.

    python -m pytest -m "not deep" --cov=simulate/check --cov=model/engine --cov=model/serve --cov-context=test ...
    python -m tools.host_mutants --sample 60 --seed 1 --coverage .coverage

Each mutant is written to a copy of the project, where the tests that execute its lines run until one fails. Tests that
start the command in another process are not in the coverage record: with `--folders`, a mutant that no recorded test
notices also meets the whole test folders of its package. pytest-cov is needed (`pip install pytest-cov`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tools.host_mutants.operators import HostMutant, draw_sample, generate_mutants

ROOT = Path(__file__).resolve().parents[2]
TEST_FOLDERS = {
    "simulate/check": ["tests/check", "tests/faults", "tests/verify", "tests/testing", "tests/contract"],
    "model/engine": ["tests/engine", "tests/serve", "tests/traffic"],
    "model/serve": ["tests/serve"],
    "model/plan": ["tests/model", "tests/traffic"],
    "model/traffic": ["tests/traffic"],
}
_DEFAULT_PACKAGES = ("simulate/check", "model/engine", "model/serve")
_SECONDS = 900
"""Time limit of the recorded tests of one mutant: a mutant that makes a test hang is noticed by it."""
_FOLDER_SECONDS = 7200
"""Time limit of whole test folders."""
_MOST_TESTS = 400
"""Recorded tests that are tried before the folders."""


@dataclass(frozen=True)
class Fate:
    """What noticed a mutant.

    noticed: "test" if a test failed, "time limit" if the tests ran too long, None if every test passed. detail: the
    failed test, or the number of tests that execute the mutant's lines.
    """

    key: str
    line: int
    noticed: str | None
    detail: str


class CoverageRecord:
    """The tests that execute each line, from a file that pytest-cov wrote with `--cov-context=test`."""

    def __init__(self, path: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(path))
        self._data.read()
        self._files = {Path(name).relative_to(ROOT).as_posix(): name for name in self._data.measured_files()}

    def tests_of(self, mutant: HostMutant) -> list[str]:
        """Return the node ids of the tests that execute a line of the mutant, those with fewest lines first."""
        name = self._files.get(mutant.path)
        if name is None:
            return []
        by_line = self._data.contexts_by_lineno(name)
        lines = range(mutant.line, mutant.end_line + 1)
        contexts = {context for line in lines for context in by_line.get(line, [])}
        tests = {context.rpartition("|")[0] for context in contexts if "|" in context}
        size = dict.fromkeys(tests, 0)
        for recorded in by_line.values():
            for context in recorded:
                test = context.rpartition("|")[0]
                if test in size:
                    size[test] += 1
        return sorted(tests, key=lambda test: (size[test], test))


def judge_mutant(mutant: HostMutant, record: CoverageRecord, folder: Path, with_folders: bool) -> Fate:
    """Run the tests of one mutant in a copy of the project until one fails, and return its fate.

    folder: the copy, whose file is restored afterwards. with_folders: if no recorded test fails, run the test folders
    of the mutant's package too.
    """
    file = folder / mutant.path
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    try:
        recorded = record.tests_of(mutant)[:_MOST_TESTS]
        package = next(name for name in TEST_FOLDERS if mutant.path.startswith(name))
        folders = TEST_FOLDERS[package] if with_folders else []
        for selection, seconds in ((recorded, _SECONDS), (folders, _FOLDER_SECONDS)):
            noticed, detail = _run_tests(selection, folder, seconds) if selection else (None, "")
            if noticed:
                return Fate(mutant.key, mutant.line, noticed, detail)
        return Fate(mutant.key, mutant.line, None, f"{len(recorded)} tests execute the line")
    finally:
        file.write_text(original, encoding="utf-8")


def copy_project(folder: Path) -> None:
    """Copy all files that git tracks or does not ignore to `folder`, because tests read files of any kind."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _run_tests(selection: list[str], folder: Path, seconds: float) -> tuple[str | None, str]:
    """Run tests in the copy and return (what noticed the mutant, detail), or (None, "") if all pass.

    Exits the program if pytest does not know a test: the coverage record is older than the tests.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not deep",
        "-p",
        "no:cacheprovider",
        "--no-header",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*command, "--tb=no", *selection],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return "time limit", f"{seconds} s"
    if process.returncode == 0:
        return None, ""
    if process.returncode == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(f"the coverage record is older than the tests: {output.splitlines()[-1]}")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "test", (failed or output.splitlines()[-1:] or [""])[0][:160]


def main() -> int:
    """Judge a sample of the mutants and print their fates; return 1 if fewer than 90 % are noticed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.host_mutants", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--sample", type=int, default=60, help="number of mutants (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="record of pytest-cov")
    parser.add_argument(
        "--part", default="1/1", metavar="K/N", help="only every N-th mutant, from the K-th on"
    )
    parser.add_argument(
        "--folders", action="store_true", help="also run the test folders of the mutant's package"
    )
    parser.add_argument(
        "--only", action="append", help="only drawn mutants whose key contains this text; may be repeated"
    )
    parser.add_argument(
        "--package",
        action="append",
        choices=TEST_FOLDERS,
        help="draw from this package only; may be repeated (default: checker, engine and server)",
    )
    parser.add_argument("--list", action="store_true", help="print the drawn mutants and end")
    parser.add_argument("--json", type=Path, help="write the fate of every mutant")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    drawn = draw_sample(
        generate_mutants(ROOT, options.package or list(_DEFAULT_PACKAGES)), options.sample, options.seed
    )
    texts = options.only or [""]
    drawn = [mutant for mutant in drawn[first - 1 :: step] if any(text in mutant.key for text in texts)]
    if options.list:
        print(*(f"{mutant.key}  (line {mutant.line})" for mutant in drawn), sep="\n")
        return 0
    record = CoverageRecord(options.coverage)
    fates = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "project"
        copy_project(folder)
        for mutant in drawn:
            fate = judge_mutant(mutant, record, folder, options.folders)
            fates.append(fate)
            print(f"{fate.noticed or 'SURVIVED'}: {fate.key} (line {fate.line}) {fate.detail}", flush=True)
    noticed = sum(fate.noticed is not None for fate in fates)
    print(f"{noticed} of {len(fates)} noticed")
    if options.json:
        options.json.write_text(json.dumps([asdict(fate) for fate in fates], indent=1), encoding="utf-8")
    return int(noticed < 0.9 * len(fates))


if __name__ == "__main__":
    sys.exit(main())
