"""Tables and command of public sources in the fidelity bench."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.case import Schedule
from benchmarks.fidelity.sources.bench import Outcome, predict_sources
from benchmarks.fidelity.sources.clones import AUTOTUNE, LIBRARY
from benchmarks.fidelity.sources.source import Source, compare_fields, read_sources
from benchmarks.fidelity.sources.table import align_table, format_source_tables, pairs
from simulate.timing import Reading
from tests.timing.source_clones import ATTENTION, MATRICES, make, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("clones"))


def outcome(number: int, measured: float, program: float, **arguments: Any) -> Outcome:
    lnc = arguments.pop("lnc", 1)
    source = Source(number, "k", LIBRARY, "gen3", lnc, measured, arguments)
    times = {Reading.dataflow: 0.5 * program, Reading.serial: 2.0 * program, Reading.program: program}
    return Outcome(source, "", Reading.program, times, 0.25 * program, schedule=Schedule.explicit)


def test_variants_differ_in_one_field_and_by_more_than_five_per_cent() -> None:
    members = [
        outcome(0, 100.0, 90.0, rows=1, wide=True),
        outcome(1, 105.0, 80.0, rows=2, wide=True),  # at the limit: no order
        outcome(2, 105.1, 80.0, rows=3, wide=True),  # above it, and predicted the other way round
        outcome(3, 200.0, 190.0, rows=1, wide=True, lnc=2),
        outcome(4, 300.0, 290.0, rows=9, wide=False),  # differs in two fields from all
    ]
    variants = [(one.source.number, other.source.number, name) for one, other, name in pairs(members)]
    assert variants == [(0, 2, "rows"), (0, 3, "lnc")]
    text = format_source_tables(members, {})
    assert "- program: 1 of 2 in the measured order" in text
    assert "  - k, rows: measured 100.0 < 105.1, predicted 90.0 >= 80.0" in text


def test_the_table_counts_errors_bracket_and_floor() -> None:
    members = [
        outcome(0, 100.0, 110.0, rows=1),
        outcome(1, 100.0, 80.0, rows=2),
        outcome(2, 100.0, 201.0, rows=3),  # dataflow says 100.5
        outcome(3, 100.0, 401.0, rows=4),  # the floor is 100.25
        outcome(4, 100.0, 49.0, rows=5),  # serial says 98
        Outcome(Source(5, "k", LIBRARY, "gen3", 1, 1.0, {"rows": 6}), "it is absent"),
    ]
    text = format_source_tables(members, {})
    assert "Measured inside the bracket of dataflow and serial: 2 of 5." in text
    assert "Measured below dataflow: entry 2, entry 3.\nMeasured above serial: entry 4." in text
    assert "Predicted below the physical floor: none." in text
    assert "Measured below the physical floor, which is then too high: entry 3." in text
    assert "| 5 | it is absent |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| all")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "5 of 6",
        "explicit",
        "program",
        "51 %",
        "221 %",
        "+10 %",
    ]
    too_short = replace(outcome(6, 100.0, 90.0), floor_us=91.0)
    assert "Predicted below the physical floor: entry 6." in format_source_tables([too_short], {})


def test_errors_count_by_the_reading_of_each_kernel() -> None:
    """The error is +10 % as written and -10 % as a compiler has it; of the other kernel +30 and -20 %."""
    by_author = outcome(0, 100.0, 110.0, rows=1)
    by_author = replace(by_author, predicted_us={**by_author.predicted_us, Reading.scheduled: 90.0})
    other = outcome(1, 100.0, 130.0, rows=1)
    by_compiler = replace(
        other,
        source=replace(other.source, kernel="other"),
        schedule=Schedule.compiler,
        reading=Schedule.compiler.reading,
        predicted_us={**other.predicted_us, Reading.scheduled: 80.0},
    )
    slower = replace(
        by_compiler, source=replace(by_compiler.source, measured_us=200.0, arguments={"rows": 2})
    )
    text = format_source_tables([by_author, by_compiler, slower], {})
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if " by" not in line
    ]
    told = {(row[2], row[3]): row[4] for row in rows if len(row) == 7 and row[1].startswith("1 of")}
    assert told == {("explicit", "program"): "10 %"}
    (totals,) = [row for row in rows if len(row) == 7 and row[0] == "other"]
    assert totals[1:4] == ["2 of 2", "compiler", "scheduled"]
    after = [row[3:5] for row in rows[rows.index(totals) :] if len(row) == 7]
    assert [label for label, _ in after] == ["scheduled", "program", "that counts", "program", "scheduled"]
    assert after[2] == ["that counts", "20 %"]  # of 10, 20 and 60 %
    assert "- scheduled: 0 of 1 in the measured order" in text


def test_times_of_sources_are_the_device_s() -> None:
    assert format_source_tables([outcome(0, 1.0, 1.0)], {}).startswith("All times are the device's")


def test_fields_that_differ_tell_launches_apart() -> None:
    sources = [outcome(0, 1.0, 1.0, rows=1, wide=True).source, outcome(1, 1.0, 1.0, rows=2, wide=True).source]
    assert compare_fields(sources) == (["rows"], ["lnc 1", "wide True"])
    assert compare_fields(sources[:1]) == ([], ["lnc 1", "rows 1", "wide True"])
    lines = align_table([["a", "b"], ["word", "1"]]).splitlines()
    assert lines == ["| a    |   b |", "| ---- | --: |", "| word |   1 |"]


def test_text_of_a_file_reaches_the_terminal_without_its_control_characters(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, {**ATTENTION, "kernel": "a\x1b[31m\nb", "\x1bx": "\x1by"})
    text = format_source_tables(predict_sources(read_sources(file), {}), {})
    assert "\x1b" not in text and "a\\x1b[31m b" in text


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write(tmp_path, ATTENTION, {**MATRICES, "odd": math.nan}), tmp_path / "out.json"
    words = ["--measurements", str(file), "--sources", str(folder / "library"), "--json", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "attention_cte: lnc 1, heads 2, kv_len 128" in printed and f"- {LIBRARY} at " in printed
    first, second = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert first["covered"] and set(first["predicted_us"]) == {reading.value for reading in Reading}
    assert first["time_us"] == first["predicted_us"][first["reading"]]
    assert first["error"] == first["time_us"] / first["measured_us"] - 1.0
    assert (first["schedule"], first["host_overhead_ns"]) == ("explicit", 0.0)
    assert first["launch"] == {"lnc": 1, **{name: ATTENTION[name] for name in list(ATTENTION)[2:-1]}}
    assert not second["covered"] and "no clone of" in second["reason"]
    assert second["launch"]["odd"] == "nan"
    write(tmp_path, ATTENTION, MATRICES)
    quick = [*words, "--sources", str(folder / "autotune"), "--family", MATRICES["kernel"], "--quick"]
    assert main([*quick, "--reading", "scheduled"]) == 0
    (row,) = json.loads(out.read_text())
    assert row["kernel"] == MATRICES["kernel"] and list(row["predicted_us"]) == ["scheduled"]


def test_a_bad_clone_or_file_is_one_sentence_and_exit_status_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, library = str(write(tmp_path, ATTENTION)), str(folder / "library")
    listed = tmp_path / "list.json"
    listed.write_text("[]")
    other = tmp_path / "other.json"
    other.write_text('{"entries": 3}')
    inside = folder / "library/src/nkilib_src/nkilib/core/mlp/mlp.py"
    known = f"{LIBRARY} (src/nkilib_src/nkilib) or {AUTOTUNE} (kernel_library)"
    shape, clone = "NKW-FIDELITY-FILE", "NKW-FIDELITY-CLONE"
    no_object = "is not an object with a list `entries`, which --sources needs: give a file of public sources"
    needs_clones = (
        "holds times of public sources, not a list of measurements: name their clones with --sources"
    )
    written = f"[{shape}] the results cannot be written to"
    for words, message in (
        ([file], f"[{shape}] {file} {needs_clones}"),
        ([str(listed), "--sources", library], f"[{shape}] {listed} {no_object}"),
        ([str(other), "--sources", library], f"[{shape}] {other} {no_object}"),
        (
            [file, "--sources", str(tmp_path)],
            f"[{clone}] {tmp_path} is not a clone of a repository with measured kernels: give one of {known}",
        ),
        (
            [file, "--sources", file],
            f"[{clone}] {file} is not a clone of a repository with measured kernels: give one of {known}",
        ),
        (
            [file, *("--sources", library) * 2],
            f"[{clone}] {library} is a second clone of {LIBRARY}: name only one of them",
        ),
        ([file, "--sources", library, "--json", file], f"{written} {file}: this command reads that file"),
        (
            [file, "--sources", library, "--json", str(inside)],
            f"{written} {inside}: this command reads that file",
        ),
    ):
        assert main(["--measurements", *words]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", f"error: {message}\n")
