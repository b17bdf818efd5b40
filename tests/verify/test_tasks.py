"""Twelve small tasks: a right kernel, a slow one and wrong ones, each judged rightly.

The slow and the wrong kernels are made from the right one: a part of its source is replaced by another one.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from simulate.kernel_by_name import build_call
from simulate.verification import Verdict, verify
from tests.deep import deep_except

FOLDER = Path(__file__).parent / "tasks"
TASKS = sorted(path.stem for path in FOLDER.glob("*.py"))
TABLES: dict[str, dict[str, Any]] = {name: runpy.run_path(str(FOLDER / f"{name}.py")) for name in TASKS}
WRONG = [(name, change) for name in TASKS for change in TABLES[name]["WRONG"]]
MOST_LINES, COLUMNS = 36, 80  # messages are whole, and the paths of a test run may take lines of their own


def judged(task: str, file: Path, old: str = "", new: str = "") -> Verdict:
    """Return the verdict on a task's kernel, in which a part that it has once is replaced."""
    source = (FOLDER / f"{task}.py").read_text(encoding="utf-8").partition("\n\nARGUMENTS")[0]
    kernel, between, reference = source.partition(f"\n\ndef {task}_reference")
    assert not old or kernel.count(old) == 1, f"{task} has {kernel.count(old)} times: {old}"
    file.write_text(
        (kernel.replace(old, new) if old else kernel) + between + reference + "\n", encoding="utf-8"
    )
    args, keywords = build_call(TABLES[task]["ARGUMENTS"])
    names = runpy.run_path(str(file))
    verdict = verify(names[task], args, keywords=keywords)
    lines = str(verdict).splitlines()
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= COLUMNS, str(verdict)
    return verdict


def test_there_are_twelve_tasks_with_six_kinds_of_wrong_kernels_each() -> None:
    assert len(TASKS) == 12
    assert all(len(TABLES[name]["WRONG"]) >= 6 for name in TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_right_kernel_is_right_and_clean_and_the_slow_one_is_slower(task: str, tmp_path: Path) -> None:
    right = judged(task, tmp_path / "right.py")
    assert right.status == 0, str(right)
    slow = judged(task, tmp_path / "slow.py", *TABLES[task]["SLOW"])
    assert slow.status == 0, str(slow)
    assert right.speed is not None and slow.speed is not None
    assert slow.speed.time_ns > 1.2 * right.speed.time_ns
    assert slow.speed.floor_ns == pytest.approx(right.speed.floor_ns)


@pytest.mark.parametrize(("task", "change"), deep_except(WRONG, 5))
def test_a_wrong_kernel_is_refused_with_its_reason(task: str, change: str, tmp_path: Path) -> None:
    old, new, reason = TABLES[task]["WRONG"][change]
    verdict = judged(task, tmp_path / "wrong.py", old, new)
    assert verdict.status == 1 and not verdict.right, str(verdict)
    assert any(alternative in verdict.reason for alternative in reason.split("|")), verdict.reason
