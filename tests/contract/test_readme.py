"""The examples of README.md print what it shows, and pages name files that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import module_diagrams

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", README, re.DOTALL)
PAGES = [
    path
    for path in ROOT.rglob("*.md")
    # Notes and the changelog name files of their time, `configs` files of others; `instructions` is generated.
    if not {".venv", "build", "decisions", "configs", "instructions"} & set(path.parts)
    and path.name != "CHANGELOG.md"
]
NAMES = (
    r"\]\((?!https?:)([^)#]+)[^)]*\)",  # a link
    r"`([\w.]+(?:/[\w.-]+)*/)`",  # a folder
    r"`([\w.-]+(?:/[\w.-]+)+\.\w+)`",  # a file in a folder
    r"^ +(\w+(?:/\w+)+\.py)\b",  # a step in a listing
)


def names_in(page: str) -> set[str]:
    """Return the files and folders that a page names."""
    return {name for pattern in NAMES for name in re.findall(pattern, page, re.MULTILINE)}


def test_diagram_of_the_model_equals_its_import_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "model-layers"]
    diagram = (ROOT / "model" / "README.md").read_text(encoding="utf-8").split("```")[1]
    lines = [set(re.findall(r"\w+", line)) for line in diagram.splitlines() if line]
    assert lines == [set(re.findall(r"\w+", layer)) for layer in layers if layer != "(__main__)"]


@pytest.mark.parametrize("page", sorted(module_diagrams.PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_diagrams_of_modules_equal_their_imports(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "written by make docs" in text
    assert text == module_diagrams.update_page(text)


def test_a_module_is_above_those_that_it_imports() -> None:
    """The levels follow from imports that run; an import for type checkers draws no line."""
    lines = [re.findall(r"\w+", line) for line in module_diagrams.format_diagram("model/engine").splitlines()]
    level = {name: number for number, names in enumerate(lines) for name in names}
    assert level["engine"] < level["scheduler"] < level["kv_cache"] < level["request"]
    assert level["buckets"] < level["padded_batch"]  # which names Buckets for the type checker alone


def test_readme_has_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize(("program", "output"), EXAMPLES)
def test_example_prints_what_readme_shows(tmp_path: Path, program: str, output: str) -> None:
    file = tmp_path / "example.py"
    file.write_text(program, encoding="utf-8")
    # A process of its own, because `install` decides once per process; run as a script from the root of the checkout.
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_names_files_that_exist(page: Path) -> None:
    bases = (page.parent, ROOT, ROOT / "simulate")
    missing = {
        name
        for name in names_in(page.read_text(encoding="utf-8"))
        if not any((base / name).exists() for base in bases)
    }
    assert missing == set()


def test_finds_the_names_of_a_page() -> None:
    page = "[a](b/c.md#d) [e](https://f.g) `h/` `i/j.py` `k.py`\n```\n  l/m.py  does\n```"
    assert names_in(page) == {"b/c.md", "h/", "i/j.py", "l/m.py"}


def doubled_rows(page: str) -> set[str]:
    """Return the code spans with which two rows of one table of a page begin."""
    doubled: set[str] = set()
    names: set[str] = set()
    for line in page.splitlines():
        if not line.startswith("|"):
            names = set()
        elif name := re.match(r"\| (`[^`]+`) \|", line):
            if name[1] in names:
                doubled.add(name[1])
            names.add(name[1])
    return doubled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_table_names_a_thing_twice(page: Path) -> None:
    assert doubled_rows(page.read_text(encoding="utf-8")) == set()


def test_finds_a_doubled_row() -> None:
    table = "| name | what |\n|---|---|\n| `a` | one |\n| `b` | two |\n"
    assert doubled_rows(table + "\n" + table) == set()
    assert doubled_rows(table + "| `a` | three |\n") == {"`a`"}
