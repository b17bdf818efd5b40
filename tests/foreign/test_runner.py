"""The runner of foreign kernels on small kernels of both dialects, and the table where clones are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.foreign.runner import HERE, OWN, Row, main, named_function, report, rows, run, tolerance

TABLES = sorted(HERE.glob("*.toml"), key=lambda table: table.name)
CLONES = "NKW_FOREIGN"
NOW = """
import numpy, nki, nki.isa as nisa, nki.language as nl

@nki.jit
def added(a, b):
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    x, y = nl.load(a), nl.load(b)
    nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
    nl.store(out, x)
    return out
"""
BETA1 = """
import vendor.only.here
import neuronxcc.nki.language as nl

def added(a, b):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(a) + nl.load(b) * {factor})
    return out

stop = 1
raise SystemExit("the file launches its kernel itself")
"""
SHAPE = {"shape": [16, 8], "dtype": "float16"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (
        ("now", NOW),
        ("beta1", BETA1.format(factor=1.0)),
        ("wrong", BETA1.format(factor=1.25)),
    ):
        (tmp_path / "clone").mkdir(exist_ok=True)
        (tmp_path / "clone" / f"{name}.py").write_text(text)
    return tmp_path


def _row(file: str, **more) -> Row:
    beta1 = {} if file == "now" else {"wrap": True, "until": "stop = 1", "absent": ("vendor.only.here",)}
    defaults = {"symbol": "added", "reference": "add", "inputs": [SHAPE, SHAPE], "precision": "float16"}
    return Row(clone="clone", file=f"{file}.py", **{**defaults, **beta1, **more})


@pytest.mark.slow
@pytest.mark.parametrize("file", ["now", "beta1"])
def test_a_kernel_of_either_dialect_passes(folder: Path, file: str) -> None:
    outcome = run(_row(file), folder)
    assert (outcome.status, outcome.ok) == ("passed", True), outcome.detail


@pytest.mark.slow
def test_a_wrong_result_fails_and_says_by_how_much(folder: Path) -> None:
    outcome = run(_row("wrong"), folder)
    assert outcome.status == "failed" and "beyond" in outcome.detail


@pytest.mark.slow
def test_an_error_of_the_kernel_is_the_rows_result(folder: Path) -> None:
    outcome = run(_row("beta1", until=""), folder)
    assert outcome.status == "failed"
    assert run(_row("now", symbol="missing"), folder).detail.startswith("AttributeError")


@pytest.mark.slow
def test_an_explanation_excuses_a_failure_and_is_refused_for_a_pass(folder: Path) -> None:
    explained = {"explained": "it multiplies", "fails_with": "beyond"}
    assert run(_row("wrong", **explained), folder).status == "explained"
    outcome = run(_row("now", **explained), folder)
    assert outcome.status == "failed" and "passes, though" in outcome.detail
    outcome = run(_row("wrong", symbol="missing", **explained), folder)
    assert outcome.status == "failed" and "another way" in outcome.detail


def test_a_clone_that_is_not_there_is_reported_as_absent(folder: Path) -> None:
    outcome = run(_row("elsewhere"), folder)
    assert outcome.status == "absent" and "elsewhere.py" in outcome.detail
    assert report([outcome]).endswith("0 passed, 0 failed, 0 explained, 1 absent")


def _table(folder: Path, file: str, extra: str = "") -> Path:
    table = folder / "table.toml"
    lines = [
        "[[row]]",
        'clone = "clone"',
        f'file = "{file}.py"',
        'symbol = "added"',
        'reference = "add"',
        'precision = "float16"',
        'inputs = [{ shape = [16, 8], dtype = "float16" }, { shape = [16, 8], dtype = "float16" }]',
    ]
    if file != "now":
        lines += ["wrap = true", 'until = "stop = 1"', 'absent = ["vendor.only.here"]']
    table.write_text("\n".join([*lines, extra]))
    return table


@pytest.mark.slow
@pytest.mark.parametrize(("file", "status"), [("now", 0), ("beta1", 0), ("wrong", 1), ("elsewhere", 1)])
def test_the_exit_status_tells_whether_all_is_well(folder: Path, file: str, status: int, capsys) -> None:
    assert main([str(folder), "--table", str(_table(folder, file))]) == status
    assert f"{file}.added" in capsys.readouterr().out


def test_refuses_a_row_with_an_unknown_key(folder: Path) -> None:
    assert len(rows(_table(folder, "now"))) == 1
    with pytest.raises(ValueError, match="unknown keys \\['tolerance'\\]"):
        rows(_table(folder, "now", "tolerance = 1\n"))


def test_refuses_an_explanation_without_the_failure_it_explains(folder: Path) -> None:
    both = 'explained = "why"\nfails_with = "how"\n'
    assert rows(_table(folder, "now", both))[0].fails_with == "how"
    with pytest.raises(ValueError, match="needs both"):
        rows(_table(folder, "now", 'explained = "why"\n'))


def test_refuses_a_folder_that_is_none(folder: Path) -> None:
    with pytest.raises(SystemExit):
        main([str(folder / "nowhere")])


def test_the_tolerance_counts_roundings_and_additions() -> None:
    row = _row("now", roundings=2, terms=8)
    assert tolerance(row, np.array([-3.0, 1.0])) == 3 * (2 * 2.0**-11 + 8 * 2.0**-24)


OWN_TEST = """
import unittest
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit(mode="simulation")
def rounded(a):
    out = nl.ndarray(a.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, nl.copy(nl.load(a), dtype=nl.bfloat16))
    return out

class Rounds(unittest.TestCase):
    def test_keeps_every_bit(self):
        self.assertEqual(rounded(np.full((2, 2), 1 / 3, np.float32))[0, 0], np.float32(1 / 3))

    def test_is_near(self):
        self.assertAlmostEqual(rounded(np.full((2, 2), 1 / 3, np.float32))[0, 0], 1 / 3, 2)

    @unittest.skip("not now")
    def test_is_skipped(self):
        pass
"""


@pytest.mark.slow
def test_a_files_own_test_is_a_row(folder: Path) -> None:
    (folder / "clone" / "own.py").write_text(OWN_TEST)

    def outcome(name: str, **more) -> tuple[str, str]:
        made = run(Row("clone", "own.py", f"Rounds.{name}", **more), folder)
        return made.status, made.detail

    assert outcome("test_is_near") == ("passed", "its own test passes")
    status, detail = outcome("test_keeps_every_bit")
    assert status == "failed" and detail.startswith("AssertionError: ")
    assert outcome("test_keeps_every_bit", precise=False)[0] == "passed"
    assert outcome("test_is_skipped") == ("failed", "its test was skipped")


PAGE = """
.. code-block:: python

   def added(a, b):
       return None

.. code-block:: python

   @nki.jit
   def added(a, b):
       out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
       nl.store(out, nl.add(nl.load(a), nl.load(b)))
       return out
"""


@pytest.mark.slow
def test_a_block_of_a_page_is_a_row(folder: Path) -> None:
    (folder / "clone" / "page.rst").write_text(PAGE)
    settings = {"reference": "add", "inputs": [SHAPE, SHAPE], "precision": "float16"}
    assert run(Row("clone", "page.rst", "added#2", **settings), folder).status == "passed"
    assert run(Row("clone", "page.rst", "added", **settings), folder).status == "failed"


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_a_table_names_a_reference(table: Path) -> None:
    for row in rows(table):
        assert row.reference == OWN or callable(named_function(row.reference))
        assert not isinstance(row.inputs, str) or callable(named_function(row.inputs))


@pytest.mark.deep
@pytest.mark.skipif(not os.environ.get(CLONES), reason=f"{CLONES} does not name a folder with clones")
@pytest.mark.parametrize("table", TABLES)
def test_public_kernels_agree_with_our_references(table: Path, capsys) -> None:
    status = main([os.environ[CLONES], "--table", str(table)])
    assert status == 0, capsys.readouterr().out
