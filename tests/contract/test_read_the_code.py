"""The trips of docs/read-the-code.md list files in the order of their first calls, with functions that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.contract.code_trips import ROOT

PAGE = (ROOT / "docs" / "read-the-code.md").read_text(encoding="utf-8")


def read_trip(title: str) -> list[tuple[str, list[str]]]:
    """Return the (file, names in backticks) of each line of a trip."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^  ((?:\w+/)+\w+\.py) +(.*)$", section, re.MULTILINE)
    return [(path, re.findall(r"`(\w+)`", words)) for path, words in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "trip", "least"), [("One instruction", "instruction", 15), ("One token", "token", 15)]
)
def test_files_of_a_trip_are_in_the_order_of_their_first_call(title: str, trip: str, least: int) -> None:
    """In a process of its own: calls of other tests would have filled caches."""
    listed = [path for path, _ in read_trip(title)]
    command = [sys.executable, "-m", "tests.contract.code_trips", trip]
    entered = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert len(listed) >= least
    assert listed == [name for name in entered if name in listed]


@pytest.mark.parametrize("title", ["One instruction", "One token"])
def test_a_file_of_a_trip_defines_the_functions_that_are_named(title: str) -> None:
    for path, names in read_trip(title):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert names and re.search(rf"(?:def|class) {names[0]}\b", source), path
