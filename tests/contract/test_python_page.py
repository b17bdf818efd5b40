"""The examples of docs/python.md are one program, and each prints what stands below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import simulate

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\s+```text\n(.*?)```)?", PAGE, re.DOTALL)
MARK = "-- the next example --"


def test_every_example_prints_what_stands_below_it(tmp_path: Path) -> None:
    assert len(EXAMPLES) == PAGE.count("```python") and PAGE.count("```text") == sum(
        bool(out) for _, out in EXAMPLES
    )
    file = tmp_path / "example.py"
    file.write_text(f"\nprint({MARK!r})\n".join(program for program, _ in EXAMPLES), encoding="utf-8")
    # A process of its own, because `install` decides once per process.
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split(f"{MARK}\n") == [output for _, output in EXAMPLES]


def test_the_page_names_what_the_simulator_has() -> None:
    functions = set(re.findall(r"`simulate\.(\w+)\(", PAGE))
    assert functions >= {"install", "profile", "occupancy", "hardware"}
    assert all(hasattr(simulate, name) for name in functions)
