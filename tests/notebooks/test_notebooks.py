"""The notebooks run from top to bottom, print what they show, and use public names only."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest

from tools.notebooks import FOLDER, ROOT, run_notebook, main, printed

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = "2-prefill-and-decode"
"""The notebook that `make test` runs too; `make deep` runs all of them."""


def test_there_are_notebooks() -> None:
    assert QUICK in [path.stem for path in NOTEBOOKS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem == QUICK else pytest.mark.deep)
        for path in NOTEBOOKS
    ],
)
def test_prints_what_is_stored(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    assert printed(run_notebook(path)) == printed(stored), "run: make notebooks"


RESULT = re.compile(
    r"\d[\d,.]*\s*(?:%|percent|per cent|[num]s\b|seconds|microseconds|[KMG]i?B\b|million|billion)"
    r"|\b(?:third|half|halves|quarter|tenth|twelve|twenty|dozen|hundred)\b"
    r"|\b(?:all of them|none of them|everywhere|still|far more|the most|the least|leads|fastest|slowest)\b",
    re.IGNORECASE,
)
"""A quantity with a unit, a fraction, or an order: what a run may change. Code in backquotes is left out."""


def told(text: str) -> list[str]:
    """Return the results that a text tells by itself."""
    return RESULT.findall(re.sub(r"`[^`]*`", "", text))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_results_are_printed_by_cells_and_not_told_by_the_text(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert [told(cell.source) for cell in cells if cell.cell_type == "markdown" and told(cell.source)] == []


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("On the last one it still leads.", ["still", "leads"]),
        ("All of them are too short.", ["All of them"]),
        ("The model is 9 MB, which HBM delivers in 20 us.", ["9 MB", "20 us"]),
        ("One token and 512 on Trainium 1, by `1024 us` in code.", []),
    ],
)
def test_a_result_in_the_text_is_found(text: str, results: list[str]) -> None:
    assert told(text) == results


def test_pages_say_how_many_measurements_are_published_here() -> None:
    count = len(json.loads((FOLDER / "published.json").read_text(encoding="utf-8")))
    for page in (FOLDER / "README.md", ROOT / "benchmarks" / "fidelity" / "README.md"):
        assert re.search(
            rf"\b{count}\s+(?:published|of\s+the) measurements", page.read_text(encoding="utf-8")
        ), page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_uses_public_names_only(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for node in ast.walk(ast.parse("\n".join(cells))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [component for alias in node.names for component in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        private = [name for name in names if name.startswith("_") and not name.endswith("__")]
        assert not private, f"line {node.lineno}: {private}"


@pytest.mark.slow
def test_check_tells_other_text_from_equal_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.ipynb"
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        cells=[nbformat.v4.new_code_cell("print(6 * 7)")],
    )
    nbformat.write(notebook, path)
    assert main(["--check", str(path)]) == 1
    assert "tiny.ipynb: cell 0 prints other text than is stored:\n42" in capsys.readouterr().out
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
