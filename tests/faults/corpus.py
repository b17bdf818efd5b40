"""Access to the corpus of wrong kernels (see README.md).

A wrong kernel has one fault, a switch that repairs it, and a stored report. `python -m tests.faults.corpus` writes
all reports again and prints the number of kernels in each class.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import simulate
from nkw.errors import NkwError
from simulate.check import Finding, convert_launch_error, detect, format_text, gathered, sort_findings
from simulate.check.lint import lint_file
from simulate.level import Level
from tests.faults.table import Program

FOLDER = Path(__file__).parent
TABLES = sorted((FOLDER / "tables").glob("*.py"))
_HEADING = re.compile(r"^== (\w+)\n", re.MULTILINE)

PARSED = Level.resolve("0.6")
"""The last level whose compiler parses kernels: rules about Python, which `language_subset` breaks, hold at it."""


def load(path: Path) -> ModuleType:
    """Import a file as a new module, without reusing an earlier import."""
    simulate.install("simulate")
    spec = importlib.util.spec_from_file_location(f"fault_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Fault:
    """One wrong kernel: a file, or one row of a table of faults."""

    fault_class: str
    name: str
    path: Path
    row: Program | None = None

    def program(self) -> Program:
        """Return the fault's launch; its file is imported again each time, so no state of an earlier launch remains."""
        if self.row is not None:
            return self.row
        module = load(self.path)
        inputs, answer = module.inputs, module.answer
        if getattr(module, "RANKS", 1) == 1:
            inputs, answer = lambda: [module.inputs()], lambda rank_inputs: [module.answer(*rank_inputs[0])]
        return Program(
            module.CODE,
            module.kernel,
            inputs,
            answer,
            getattr(module, "TARGET", "trn2"),
            getattr(module, "CORES", 1),
            getattr(module, "ORDERS", 0),
            getattr(module, "SEEDS", 0),
            not hasattr(module, "sick"),
        )

    def blamed_line(self) -> int:
        """Return the number of the one line that is marked as the fault."""
        lines, first = self.path.read_text().splitlines(), 1
        if self.row is not None:
            lines, first = inspect.getsourcelines(self.row.kernel)
        marked = [n for n, line in enumerate(lines, first) if line.rstrip().endswith("# blamed")]
        assert len(marked) == 1, f"{self.name} marks {len(marked)} lines"
        return marked[0]

    def report(self, findings: list[Finding]) -> str:
        """Return findings as text as it is stored: file names without folders.

        For a row of a table, line numbers are counted from the marked line, so that earlier rows do not change them.
        """
        tail = re.escape(f"{self.path.parent.name}/{self.path.name}")
        text = re.sub(rf"[^\s(]*{tail}", self.path.name, format_text(findings))
        if self.row is None:
            return text
        blamed = self.blamed_line()

        def relative(seen: re.Match[str]) -> str:
            distance = int(seen[1]) - blamed
            return f"{self.path.name}:blamed" + (f"{distance:+d}" if distance else "")

        return re.sub(rf"{re.escape(self.path.name)}:(\d+)", relative, text)

    def stored(self) -> str:
        """Return the stored report, which the wrong kernel must get."""
        text = self.path.with_suffix(".txt").read_text()
        return text if self.row is None else reports(text)[self.name]

    def run(self, sick: bool) -> tuple[list[Finding], list[Any]]:
        """Launch the wrong kernel if `sick`, else the repaired one.

        Returns:
            The findings; and the outputs of each rank, an empty list if the kernel did not run to its end.
        """
        program = self.program()
        findings: list[Finding] = []
        if not program.switched:
            name = "sick" if sick else "kernel"
            findings = [
                f for f in lint_file(self.path, PARSED) if f.where is not None and f.where.function == name
            ]
            if sick:
                return findings, []
        rank_inputs, extra = program.inputs(), {"sick": sick} if program.switched else {}
        with gathered(program.orders, program.seeds) as seen:
            try:
                world = simulate.World(program.target, len(rank_inputs), program.cores)
                outputs = world.launch(program.kernel, [(inputs, extra) for inputs in rank_inputs]).outputs
            except NkwError as error:
                return [convert_launch_error(error)], []
        for launch, evidence in seen.launches:
            findings += detect(launch, evidence)
        return sort_findings(findings), outputs


def reports(stored: str) -> dict[str, str]:
    """Return the reports in a table's stored text, by the names of its rows."""
    fields = _HEADING.split(stored)
    assert not fields[0]
    return dict(zip(fields[1::2], fields[2::2]))


def _rows(path: Path) -> list[Fault]:
    rows = [(name, row) for name, row in vars(load(path)).items() if isinstance(row, Program)]
    return [Fault(path.stem, name, path, row) for name, row in rows]


FAULTS = [
    Fault(path.parent.name, path.stem, path) for path in sorted(FOLDER.glob("*/*.py")) if path not in TABLES
]
FAULTS += [row for path in TABLES for row in _rows(path)]


def same(outputs: list[Any], expected: list[Any]) -> bool:
    """Return whether outputs equal the expected ones bit by bit."""
    pairs = zip(outputs, expected, strict=True)
    return all(
        all(map(np.array_equal, got, want)) if isinstance(want, tuple) else np.array_equal(got, want)
        for got, want in pairs
    )


def main() -> None:
    """Write all reports and print the number of faults in each class."""
    written: dict[Path, str] = {}
    for fault in FAULTS:
        findings, _ = fault.run(sick=True)
        heading = "" if fault.row is None else f"== {fault.name}\n"
        file = fault.path.with_suffix(".txt")
        written[file] = written.get(file, "") + heading + fault.report(findings)
    for file, text in written.items():
        file.write_text(text)
    for name, count in sorted(Counter(fault.fault_class for fault in FAULTS).items()):
        print(f"{count:4d} {name}")
    print(f"{len(FAULTS):4d} in all")


if __name__ == "__main__":
    main()
