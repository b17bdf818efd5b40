"""The examples of docs/testing.md pass as it says they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", GUIDE, re.DOTALL)
RESULTS = re.findall(r"```text\n(\d+) passed\n```", GUIDE)


@pytest.mark.slow
def test_the_examples_pass(tmp_path: Path) -> None:
    assert len(FILES) == 6
    for name, program in FILES:
        (tmp_path / name).write_text(program, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "simulate.pytest_plugin",
        "-p",
        "no:cacheprovider",
        ".",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{sum(map(int, RESULTS))} passed" in ran.stdout
