"""Runs unchanged kernels of public repositories in the simulator and compares the results.

    python tests/foreign/runner.py FOLDER [--table TABLE] [--only TEXT]

FOLDER holds clones under the names that the table gives (`table.toml`; `sdk.toml` has the SDK's documentation). Each
kernel runs in its own process. Prints one line per row and exits 1 if a row fails that the table does not
explain, or explains although it passes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import types
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME_LIMIT_S = 600
OWN = "own"
_FRACTION_BITS = {"float32": 23, "bfloat16": 7, "float16": 10, "float8_e4m3": 3}


@dataclass(frozen=True)
class Row:
    """One kernel: its file, its call, and the reference of its results."""

    clone: str  # the folder under FOLDER
    file: str
    symbol: str
    reference: str = (
        OWN  # a function of references.py; OWN: symbol is a unit test of the file, which compares itself
    )
    inputs: Any = ()  # tables {shape, dtype, kind, low, high}, or the name of a function of references.py
    arguments: dict[str, Any] = field(
        default_factory=dict
    )  # passed by keyword, to the kernel and the reference
    expressions: dict[str, str] = field(
        default_factory=dict
    )  # to the kernel only: Python over the names of its file
    seed: int = 0
    target: str = "trn2"
    precise: bool = True  # False: narrow floats are kept as float32, as simulators before 0.4 had it
    grid: tuple[int, ...] = ()
    wrap: bool = False  # the symbol is a plain function that the repository wraps in nki.baremetal
    until: str = ""  # run the file up to the line that starts so: what follows launches the kernel itself
    absent: tuple[str, ...] = ()  # modules the file imports for other parts, replaced by empty ones
    precision: str = "float32"  # the coarsest dtype that values take on their way
    roundings: int = 1  # how many times a value is rounded to it
    terms: int = 0  # additions in float32 on the longest path
    explained: str = ""  # why it cannot run
    fails_with: str = ""  # and what its failure says then

    @property
    def label(self) -> str:
        """The row's name in the report."""
        shown = ", ".join(f"{key}={value}" for key, value in (self.arguments | self.expressions).items())
        return f"{Path(self.file).stem}.{self.symbol}" + (f"({shown})" if shown else "")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row: `passed`, `failed`, `explained` or `absent`, and a sentence."""

    row: Row
    status: str
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the outcome lets the run as a whole pass."""
        return self.status != "failed"


def rows(table: Path) -> list[Row]:
    """Return the rows of a table; raises ValueError for a row that is not well formed."""
    known = {f.name for f in fields(Row)}
    table_rows = []
    for entry in _toml(table)["row"]:
        unknown = entry.keys() - known
        if unknown:
            raise ValueError(f"{table.name}: row {entry.get('symbol')} has unknown keys {sorted(unknown)}")
        if bool(entry.get("explained")) != bool(entry.get("fails_with")):
            raise ValueError(f"{table.name}: row {entry.get('symbol')} needs both explained and fails_with")
        tuples = {key: tuple(entry[key]) for key in ("grid", "absent") if key in entry}
        table_rows.append(Row(**{**entry, **tuples}))
    return table_rows


def run(row: Row, folder: Path, python: str = sys.executable) -> Outcome:
    """Run one row in a fresh process."""
    clone = folder / row.clone
    if not (clone / row.file).is_file():
        return Outcome(row, "absent", f"no {row.clone}/{row.file} in the folder")
    order = json.dumps({"row": row.__dict__, "clone": str(clone)})
    environment = {
        **os.environ,
        "NEURON_PLATFORM_TARGET_OVERRIDE": row.target,
        "NKI_BACKEND": "simulate",
        "NKI_PRECISE_FP": str(int(row.precise)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [python, str(HERE / "runner.py"), "--one"]
    try:
        done = subprocess.run(
            command, input=order, capture_output=True, text=True, env=environment, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return _judged(row, False, f"not finished after {TIME_LIMIT_S} s")
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        result = json.loads(last[0])
        return _judged(row, result["passed"], result["detail"])
    except (json.JSONDecodeError, KeyError, TypeError):
        error = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return _judged(row, False, error[0])


def _judged(row: Row, passed: bool, detail: str) -> Outcome:
    if not row.explained:
        return Outcome(row, "passed" if passed else "failed", detail)
    if passed:
        return Outcome(row, "failed", f"passes, though the table says: {row.explained}")
    if row.fails_with not in detail:
        return Outcome(row, "failed", f"fails in another way than explained: {detail}")
    return Outcome(row, "explained", row.explained)


def tolerance(row: Row, expected: np.ndarray) -> float:
    """Return half a unit in the last place of the largest result, for each rounding and each float32 addition."""
    unit = 2.0 ** -(_FRACTION_BITS[row.precision] + 1)
    relative = row.roundings * unit + row.terms * 2.0 ** -(_FRACTION_BITS["float32"] + 1)
    return relative * float(np.abs(expected).max())


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table, with a count at the end."""
    width = max((len(o.row.label) for o in outcomes), default=0)
    lines = [f"{o.status:<10s}{o.row.label:<{width}s}  {o.detail}" for o in outcomes]
    counts = {
        status: sum(o.status == status for o in outcomes)
        for status in ("passed", "failed", "explained", "absent")
    }
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the table over a folder of clones; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Run the kernels of public repositories through the simulator.", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, nargs="?", help="the folder with the clones")
    parser.add_argument("--table", type=Path, default=HERE / "table.toml")
    parser.add_argument("--only", default="", help="rows whose label contains this")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        return _one(json.load(sys.stdin))
    if options.folder is None or not options.folder.is_dir():
        parser.error("FOLDER is not a folder with clones")
    outcomes = []
    for row in rows(options.table):
        if options.only in row.label:
            outcomes.append(run(row, options.folder))
            print(report(outcomes[-1:]).splitlines()[0], flush=True)
    print("\n" + report(outcomes).splitlines()[-1])
    return (
        0 if outcomes and all(o.ok for o in outcomes) and any(o.status != "absent" for o in outcomes) else 1
    )


# -- in the process of one row ------------------------------------------------------------------------------


def _one(order: dict[str, Any]) -> int:
    sys.path.insert(0, str(ROOT))
    row = Row(**order["row"])
    try:
        passed, detail = _compared(row, Path(order["clone"]))
    except Exception as error:  # whatever the kernel raises is this row's result
        passed, detail = False, f"{type(error).__name__}: " + " | ".join(str(error).splitlines()[:3])
    print(json.dumps({"passed": passed, "detail": detail}))
    return 0


def _compared(row: Row, clone: Path) -> tuple[bool, str]:
    import simulate

    simulate.install("simulate")
    module = _module(row, clone)
    if row.reference == OWN:
        # Those tests draw from numpy's global generator.
        np.random.seed(row.seed)  # noqa: NPY002
        return _run_unit_test(module, row.symbol)
    kernel = getattr(module, row.symbol.partition("#")[0])
    if row.wrap:
        from neuronxcc import nki

        kernel = nki.baremetal(kernel)
    elif row.file.endswith(".rst"):
        import nki

        kernel = nki.jit(kernel)
    if row.grid:
        kernel = kernel[tuple(row.grid)]
    inputs = _inputs(row)
    expected = named_function(row.reference)(*(_copy(value) for value in inputs), **row.arguments)
    evaluated = {key: eval(text, module.__dict__) for key, text in row.expressions.items()}
    results = kernel(*inputs, **row.arguments, **evaluated)
    results, expected = (value if isinstance(value, tuple) else (value,) for value in (results, expected))
    worst = []
    for result, wanted in zip(results, expected, strict=True):
        seen = np.asarray(result).astype(np.float64)
        if seen.shape != wanted.shape:
            return False, f"shape {seen.shape}, expected {wanted.shape}"
        bound = tolerance(row, wanted)
        errors = np.abs(seen - wanted)
        beyond = int(np.count_nonzero(~(errors <= bound)))
        worst.append(f"error {np.max(errors):.3g} of {bound:.3g} allowed")
        if beyond:
            return False, f"{worst[-1]}, {beyond} of {errors.size} beyond"
    return True, "; ".join(worst)


def _run_unit_test(module: types.ModuleType, symbol: str) -> tuple[bool, str]:
    """Run a unit test of the file; the last line of its failure is the detail."""
    case, _, method = symbol.partition(".")
    result = unittest.TestResult()
    getattr(module, case)(method).run(result)
    troubles = [text for _, text in (*result.failures, *result.errors)]
    if not troubles and result.testsRun == 1 and not result.skipped:
        return True, "its own test passes"
    lines = [line for line in "".join(troubles).splitlines() if line and not line.startswith(" ")]
    return False, lines[-1] if lines else "its test was skipped"


def _module(row: Row, clone: Path) -> types.ModuleType:
    for name in row.absent:
        components = name.split(".")
        for depth in range(1, len(components) + 1):
            empty = sys.modules.setdefault(
                ".".join(components[:depth]), types.ModuleType(components[depth - 1])
            )
            if depth > 1:
                setattr(sys.modules[".".join(components[: depth - 1])], components[depth - 1], empty)
    path = clone / row.file
    sys.path[:0] = [str(path.parent), str(clone / "src"), str(clone)]
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".rst":
        source = _page(source, row.symbol)
    if row.until:
        source = source[: source.index(f"\n{row.until}")]
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def _page(text: str, symbol: str) -> str:
    """Return the Python block of a page that defines the symbol, after the imports that its blocks need."""
    from tests.foreign.names import rst_blocks

    name, _, number = symbol.partition("#")
    blocks = [block for block in rst_blocks(text) if re.search(rf"^def {name}\(", block, re.MULTILINE)]
    imports = (
        "import math\nimport numpy as np\nimport nki\nimport nki.isa as nisa\nimport nki.language as nl\n"
    )
    return imports + blocks[int(number or 1) - 1]


def named_function(name: str) -> Any:
    """Return a function of references.py, or of another module beside it: `module.function`."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"tests.foreign.{module or 'references'}"), function)


def _inputs(row: Row) -> tuple[Any, ...]:
    random = np.random.default_rng(row.seed)
    if isinstance(row.inputs, str):
        return named_function(row.inputs)(random)
    return tuple(_array(random, entry) if isinstance(entry, dict) else entry for entry in row.inputs)


def _array(random: np.random.Generator, entry: dict[str, Any]) -> np.ndarray:
    from tests.foreign.references import numpy_dtype

    shape, distribution = tuple(entry["shape"]), entry.get("kind", "uniform")
    low, high = entry.get("low", -1.0), entry.get("high", 1.0)
    if distribution == "integers":
        values = random.integers(low, high + 1, shape)
    elif distribution == "normal":
        values = random.standard_normal(shape)
    else:
        assert distribution == "uniform", f"kind={distribution}"
        values = random.uniform(low, high, shape)
    return values.astype(numpy_dtype(entry.get("dtype", "float32")))


def _copy(value: Any) -> Any:
    return (
        value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind not in "iu" else value
    )


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
