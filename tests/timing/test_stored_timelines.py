"""The stored timelines of the shipped kernels are those of today; a difference is shown as text."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import nki_kernels
from tools.timelines import FOLDER, TARGETS, Case, cases, timeline, timelines, write

MOST_LINES = 200
SHOWN = 40  # lines of a difference


def difference(stored: str, fresh: str) -> str:
    """Return what changed, with both lengths; empty if nothing did."""
    before, after = stored.splitlines(), fresh.splitlines()
    if before == after:
        return ""
    changed = list(difflib.unified_diff(before, after, "stored", "today", lineterm="", n=1))
    more = [f"... {len(changed) - SHOWN} lines more"] if len(changed) > SHOWN else []
    head = f"{end_us(stored)} us stored, {end_us(fresh)} us today; if that is meant, run `make timelines`"
    return "\n".join([head, *changed[:SHOWN], *more])


def end_us(text: str) -> str:
    """Return the last end or result in a timeline."""
    moments = [line.split()[1:3] for line in text.splitlines()[1:]]
    return max((word for words in moments for word in words), key=float, default="nothing")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_kernels_timeline_is_the_stored_one(case: Case, target: str) -> None:
    path = FOLDER / f"{case.name}-{target}.txt"
    stored = path.read_text(encoding="utf-8") if path.is_file() else ""
    changed = difference(stored, timeline(case, target))
    assert not changed, f"{case.name} on {target}: {changed}"


def test_every_shipped_kernel_has_a_timeline_and_nothing_else_has() -> None:
    shipped = {name for name in nki_kernels.__all__ if not name.endswith("_reference")}
    assert {case.name for case in cases()} == shipped | {"tile_by_tile"}
    stored = {path.name for path in FOLDER.iterdir()}
    assert stored == {f"{case.name}-{target}.txt" for case in cases() for target in TARGETS}


def test_stored_timelines_are_short_and_name_no_place_of_a_machine() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < MOST_LINES
        assert "/" not in text and ".py" not in text


@pytest.mark.slow
def test_timelines_of_kernels_that_are_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "gone-trn1.txt").write_text("", encoding="utf-8")
    write(tmp_path)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == timelines()


def test_a_difference_names_both_lengths_the_lines_and_the_command() -> None:
    head = "    start us       end us     ready us  track                  event\n"
    stored = head + "      0.0000       0.0080       0.3720  Sync                   dma_copy #0\n"
    later = stored.replace("0.3720", "0.4720")
    assert difference(stored, stored) == ""
    assert difference(stored, later).splitlines() == [
        "0.3720 us stored, 0.4720 us today; if that is meant, run `make timelines`",
        "--- stored",
        "+++ today",
        "@@ -1,2 +1,2 @@",
        " " + head.rstrip("\n"),
        "-" + stored.splitlines()[1],
        "+" + later.splitlines()[1],
    ]
    long = head + "".join(later.splitlines(keepends=True)[1:] * 60)
    assert difference("", long).startswith("nothing us stored, 0.4720 us today")
    assert difference("", long).endswith("lines more")
