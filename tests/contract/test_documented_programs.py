"""Tests run every Python program and printed output of a page, or this file names the reason why not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTING = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:nkw|python|torchrun|make|pip|curl) ", re.MULTILINE)

RUN_ELSEWHERE = {
    "docs/python.md": "tests/contract/test_python_page.py",
    "docs/testing.md": "tests/testing/test_guide.py",
    "docs/tune.md": "tests/tune/test_tune.py",
    "docs/verify.md": "tests/verify/test_command.py",
    "docs/weight-formats.md": "tests/contract/test_where_a_change_goes.py",
}
"""Pages whose programs and outputs a test runs: the test that reads the page."""

PARSED = {
    "README.md: import openai": "tests/serve/test_readme.py runs it against a server",
    "docs/model/serving.md: answer = client.images.generate(": "needs a server of a diffusion model",
    'docs/model/serving.md: with open("speech.wav", "rb") as file:': "needs a server of a Whisper checkpoint",
    'tests/faults/README.md: @fault("NKW-PARTITIONS-AGREE", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)': (
        "a row of tests/faults/tables, where tests/faults/test_faults.py runs it"
    ),
}
"""Programs that are parsed here and not run: page and first line, and the reason."""

PRELUDES = {
    "docs/model/engine.md": "import model\n",
    "simulate/README.md": (
        "import numpy as np\nimport simulate\nfrom nki_kernels import matmul as kernel\n"
        "a0 = a1 = a = b = np.ones((128, 128), np.float32)\n"
    ),
}
"""Names that the programs of a page take from the sentences around them."""

OUTPUTS = {
    "README.md": "tests/contract/test_readme.py",
    "docs/calibrate.md": "tests/calibrate/test_calibrate.py",
    "docs/weight-formats.md": "tests/contract/test_where_a_change_goes.py",
    **RUN_ELSEWHERE,
}
"""Pages with listings of outputs: the test that compares them."""


def list_pages() -> list[Path]:
    """Return the pages with listings; those of instructions are written from examples that tests run."""
    folders = ("", "*/", "docs/*/", "benchmarks/*/", "tests/*/")
    pages = {page for folder in folders for page in ROOT.glob(f"{folder}*.md")}
    return sorted(page for page in pages if ".venv" not in page.parts and page.parent.name != "instructions")


def read_listings(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each listing of a page."""
    return LISTING.findall(page.read_text(encoding="utf-8"))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


LISTINGS = [(page, language, text) for page in list_pages() for language, text in read_listings(page)]
PYTHON = [
    (page, text)
    for page, language, text in LISTINGS
    if language == "python" and name(page) not in RUN_ELSEWHERE
]


def first_line(text: str) -> str:
    return text.splitlines()[0]


@pytest.mark.parametrize(
    ("page", "text"), PYTHON, ids=[f"{name(page)}: {first_line(text)}" for page, text in PYTHON]
)
def test_a_program_of_a_page_runs(page: Path, text: str, tmp_path: Path) -> None:
    if f"{name(page)}: {first_line(text)}" in PARSED:
        ast.parse(text)
        return
    file = tmp_path / "example.py"
    text = text.replace('model="FOLDER", ', "")  # the default model: its folder ships with the project
    file.write_text(PRELUDES.get(name(page), "") + text, encoding="utf-8")
    # A process of its own, because `install` decides once per process.
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_every_exception_is_needed() -> None:
    titles = {f"{name(page)}: {first_line(text)}" for page, text in PYTHON}
    assert titles >= set(PARSED)
    pages = {name(page) for page, language, _ in LISTINGS if language == "python"}
    assert pages >= set(RUN_ELSEWHERE) | set(PRELUDES)


@pytest.mark.parametrize("page", sorted({name(page) for page, language, _ in LISTINGS if language == "text"}))
def test_a_test_reads_the_outputs_of_a_page(page: str) -> None:
    test = (ROOT / OUTPUTS[page]).read_text(encoding="utf-8")
    assert re.search(rf'"{re.escape(Path(page).name)}"|{re.escape(page)}"', test)


def test_listings_of_commands_are_marked() -> None:
    """A listing without a language is a diagram or a list of files; commands are `sh`, which a test parses."""
    unmarked = [
        f"{name(page)}: {first_line(text)}"
        for page, language, text in LISTINGS
        if not language and PROGRAM.search(text)
    ]
    assert unmarked == []


def test_a_command_in_a_plain_listing_is_noticed() -> None:
    assert PROGRAM.search("nkw time KERNEL\n") and PROGRAM.search("NKW_HARDWARE=a.json nkw run b.py\n")
    assert not PROGRAM.search("   commands\n ↓ serve\nmodel/serve/server.py  accepts\n")
