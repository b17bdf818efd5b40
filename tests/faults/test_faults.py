"""Every wrong kernel gets exactly its report; healed, it gets none and computes what numpy computes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.faults.corpus import FILES, answers, blamed_line, load, report, run, same

ids = [f"{path.parent.name}/{path.stem}" for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_the_wrong_kernel_is_reported(path: Path) -> None:
    findings, _ = run(path, sick=True)
    assert [finding.code for finding in findings] == [load(path).CODE]
    assert findings[0].where is not None
    assert findings[0].where.line == blamed_line(path)
    assert report(path, findings) == path.with_suffix(".txt").read_text()


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_the_healed_kernel_is_silent_and_right(path: Path) -> None:
    findings, outputs = run(path, sick=False)
    assert findings == []
    assert same(outputs, answers(path))


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent.name == "deadlock"], ids=lambda p: p.stem
)
def test_a_deadlock_leaves_no_thread(path: Path) -> None:
    before = set(threading.enumerate())
    run(path, sick=True)
    assert set(threading.enumerate()) == before


def test_every_report_belongs_to_a_kernel() -> None:
    stored = {path.with_suffix(".py") for path in FILES[0].parent.parent.glob("*/*.txt")}
    assert stored == set(FILES)
