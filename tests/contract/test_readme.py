"""The examples of README.md do what it says they do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", README, re.DOTALL)
LINKS = sorted(
    set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
    | set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*/)`", README))
)


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


@pytest.mark.parametrize("target", LINKS)
def test_readme_names_files_that_exist(target: str) -> None:
    assert (ROOT / target).exists()
