"""The corpus of wrong kernels: one file each, with a switch that heals it and the stored report beside it.

A file has a docstring, CODE, `kernel(…, sick)`, `inputs()` (one tuple of arrays; with RANKS one per rank) and
`answer`, which works the healthy result out in numpy. TARGET, CORES and RANKS say where it runs, ORDERS and SEEDS
how often it is carried out again. The line to blame ends with `# blamed`. A file of class `language_subset` has a
kernel `sick` that lint blames instead, beside the healthy `kernel`.

`python -m tests.faults.corpus` writes the reports anew and prints how many kernels each class has.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import simulate
from simulate.check import Finding, detect, finding_of, gathered, in_order, text
from simulate.check.lint import lint_file
from simulate.errors import NkwError

FOLDER = Path(__file__).parent
FILES = sorted(path for path in FOLDER.glob("*/*.py") if not path.name.startswith("_"))


def load(path: Path) -> ModuleType:
    """The module of one file."""
    simulate.install("simulate")
    spec = importlib.util.spec_from_file_location(f"fault_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blamed_line(path: Path) -> int:
    """The number of the one line that is marked."""
    marked = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# blamed")]
    assert len(marked) == 1, f"{path.name} marks {len(marked)} lines"
    return marked[0]


def run(path: Path, sick: bool) -> tuple[list[Finding], list[Any]]:
    """What is found in one file, and the outputs of every rank if it ran to its end."""
    module = load(path)
    findings: list[Finding] = []
    if hasattr(module, "sick"):
        name = "sick" if sick else "kernel"
        findings = [f for f in lint_file(path) if f.where is not None and f.where.function == name]
        if sick:
            return findings, []
    with gathered(getattr(module, "ORDERS", 0), getattr(module, "SEEDS", 0)) as seen:
        try:
            outputs = _launch(module, sick)
        except NkwError as error:
            return [finding_of(error)], []
    for launch, evidence in seen.launches:
        findings += detect(launch, evidence)
    return in_order(findings), outputs


def _launch(module: ModuleType, sick: bool) -> list[Any]:
    ranks = getattr(module, "RANKS", 1)
    given = module.inputs() if ranks > 1 else [module.inputs()]
    world = simulate.World(getattr(module, "TARGET", "trn2"), ranks, getattr(module, "CORES", 1))
    extra = {} if hasattr(module, "sick") else {"sick": sick}
    return world.launch(module.kernel, [(each, extra) for each in given]).outputs


def answers(path: Path) -> list[Any]:
    """The right outputs of every rank."""
    module = load(path)
    if getattr(module, "RANKS", 1) > 1:
        return list(module.answer(module.inputs()))
    return [module.answer(*module.inputs())]


def same(outputs: list[Any], expected: list[Any]) -> bool:
    """Whether outputs agree bit for bit with what numpy worked out."""
    pairs = zip(outputs, expected, strict=True)
    return all(
        all(map(np.array_equal, got, want)) if isinstance(want, tuple) else np.array_equal(got, want)
        for got, want in pairs
    )


def report(path: Path, findings: list[Finding]) -> str:
    """The report as it is stored: with the file's name, wherever it lies."""
    tail = re.escape(f"{path.parent.name}/{path.name}")
    return re.sub(rf"[^\s(]*{tail}", path.name, text(findings))


def main() -> None:
    """Write the report of every file."""
    for path in FILES:
        findings, _ = run(path, sick=True)
        path.with_suffix(".txt").write_text(report(path, findings))
    for name, count in sorted(Counter(path.parent.name for path in FILES).items()):
        print(f"{count:4d} {name}")
    print(f"{len(FILES):4d} in all")


if __name__ == "__main__":
    main()
