"""The notebooks run from top to bottom, print what they show, and use public names only."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from tools.notebooks import FOLDER, executed, main, printed

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_prints_what_is_stored(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    assert printed(executed(path)) == printed(stored), "run: make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_uses_public_names_only(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for node in ast.walk(ast.parse("\n".join(cells))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names for part in each.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        private = [name for name in names if name.startswith("_") and not name.endswith("__")]
        assert not private, f"line {node.lineno}: {private}"


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
