"""The page on the life of one request lists files in the order in which a completion enters them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.serve.request_trace import ROOT

PAGE = ROOT / "docs" / "model" / "request.md"


@pytest.mark.slow
def test_files_are_listed_in_the_order_of_their_first_call() -> None:
    """In a process of its own: what other tests have computed is remembered and not entered again."""
    listed = re.findall(r"^  ((?:\w+/)+\w+\.py)\b", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    command = [sys.executable, "-m", "tests.serve.request_trace"]
    entered = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert len(listed) > 30
    assert listed == [name for name in entered if name in listed]
