"""A short campaign of bad input; `make deep` runs it for ten minutes, `python -m tests.hostile` as long as asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deep import deep_except
from tests.hostile.campaign import tried
from tests.hostile.cases import KINDS
from tests.hostile.judge import Case, faults

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases run in copies of this process")


@pytest.mark.slow
@pytest.mark.parametrize("maker", deep_except(KINDS, 3), ids=lambda maker: maker.__name__)
def test_bad_input_is_refused_in_order(maker) -> None:
    number = KINDS.index(maker)
    _, problems = tried(number, maker)
    assert not problems, f"python -m tests.hostile --seed {number} --case {number}: {problems}"


def test_a_case_is_what_its_number_says() -> None:
    first, second = (tried(1, KINDS[1])[0] for _ in range(2))
    assert first.words == second.words


@pytest.mark.parametrize(
    ("does", "fault"),
    [
        (lambda words: 1 // 0, "status 70"),
        (lambda words: 1, "status 1"),
        (lambda words: os.kill(os.getpid(), 9), "status -9"),
        (lambda words: 2, "0 lines on stderr"),
        (lambda words: os.write(2, b"error: a\nb\n") and 2, "2 lines on stderr"),
        (lambda words: os.write(2, b"error: \x1b[31m\n") and 2, "a control character on stderr"),
        (lambda words: os.write(2, b"error: " + b"x" * 2000 + b"\n") and 2, "a line of 2007 characters"),
        (lambda words: os.write(2, b"warning\n") and 0, "1 lines on stderr"),
        (lambda words: Path("input").write_text("gone") and 0, "input is not what it was"),
        (lambda words: Path(".out.part").write_text("rest") and 0, ".out.part is not what it was"),
        (lambda words: Path("out").write_text("[Infinity]") and 0, "the document is not JSON"),
    ],
)
def test_the_judge_sees_every_fault(tmp_path: Path, does, fault: str) -> None:
    (tmp_path / "input").write_text("weights")
    problems = faults(Case("sick", does, [], json_output=tmp_path / "out"), tmp_path)
    assert any(problem.startswith(fault) for problem in problems), problems


def test_the_judge_is_silent_on_what_is_in_order(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("weights")
    sound = Case("sound", lambda words: os.write(2, b"error: one sentence\n") and 2, [])
    assert faults(sound, tmp_path) == []
    writes = Case(
        "writes", lambda words: Path("out").write_text("[1]") and 0, [], json_output=tmp_path / "out"
    )
    assert faults(writes, tmp_path) == []
