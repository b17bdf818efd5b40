"""What the fidelity bench shows of held-out entries, of brackets, and of times that hold the host side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.bench import build_rows, outcomes
from benchmarks.fidelity.builders import build
from benchmarks.fidelity.case import Schedule
from benchmarks.fidelity.entry import Entry, read_entries
from benchmarks.fidelity.predict import predict
from benchmarks.fidelity.table import Outcome, text
from simulate.hardware import hardware
from simulate.timing import Reading

FILE = Path(__file__).parent / "data" / "measurements.json"
FITTED, HELD_OUT = "fitted-0", "held-out-4"
"""Their SHA-256 begin with 76289c74 and 084d32b3; 33333333 is a fifth of 100000000."""


def entry(name: str) -> Entry:
    """Return a float32 kernel by its compiler, 20 us by `nki.benchmark`."""
    (template,) = [candidate for candidate in read_entries(FILE) if candidate.id == "b"]
    return replace(template, id=name)


def outcome(name: str, predicted: float, low: float, high: float, host_ns: float = 0.0) -> Outcome:
    """Return an outcome that was measured to take 100 us."""
    times = {Reading.dataflow: low, Reading.scheduled: predicted, Reading.serial: high}
    return Outcome(
        entry(name), "", Schedule.compiler, Reading.scheduled, 100.0, times, host_overhead_ns=host_ns
    )


def rows(table: str, first: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]


@pytest.mark.parametrize(
    ("name", "held_out"), [(FITTED, False), (HELD_OUT, True), ("id-436289", True), ("id-283912", False)]
)
def test_the_id_alone_decides_who_is_held_out(name: str, held_out: bool) -> None:
    candidate = entry(name)
    assert candidate.held_out is held_out
    assert replace(candidate, family="dma", latency_us=1.0, kernel="other").held_out is held_out


@pytest.mark.slow
def test_about_a_fifth_is_held_out() -> None:
    """Of n independent draws of a fifth; four standard deviations of sqrt(n 4/25) on either side."""
    count = 10_000
    held_out = sum(entry(f"entry {number}").held_out for number in range(count))
    assert abs(held_out - count / 5) <= 4 * (count * 4 / 25) ** 0.5


def test_held_out_entries_count_by_schedule_and_are_named_nowhere() -> None:
    predicted = [outcome(FITTED, 110.0, 50.0, 150.0), outcome(HELD_OUT, 140.0, 120.0, 150.0)]
    predicted[1] = replace(predicted[1], floor_us=141.0)
    table = text(predicted)
    assert HELD_OUT not in table and FITTED in table
    assert [row[:3] for row in rows(table, "compiler")] == [
        ["all", "2", "25 %"],
        ["fitted", "1", "10 %"],
        ["held out", "1", "40 %"],
    ]
    assert rows(table, "**all**") == [["", "1", "1", "10 %", "10 %", "+10 %", ""]]
    assert rows(table, "mlp")[-1][:2] == [FITTED, "device"]
    assert "1 held-out entries count in the table by schedule and in no other one." in table
    assert "Below the physical floor: 1 held out." in table
    shown = text(predicted, held_out=True)
    assert rows(shown, "**all**")[0][1] == "2" and f"| {HELD_OUT} | device | 100.000 | 140.000 |" in shown
    assert f"Below the physical floor: {HELD_OUT}." in shown and "in no other one" not in shown


def test_ladders_have_fitted_entries_only() -> None:
    rungs = [
        replace(
            prediction, entry=replace(prediction.entry, shapes=str(number)), measured_us=float(number + 1)
        )
        for number, prediction in enumerate(outcome(FITTED, 1.0 + rung, 1.0, 9.0) for rung in range(4))
    ]
    assert "| 4 | 1.00 |" in text(rungs)
    hidden = [*rungs[:3], replace(rungs[3], entry=replace(rungs[3].entry, id=HELD_OUT))]
    assert "| ladder of" not in text(hidden)
    assert "| 4 | 1.00 |" in text(hidden, held_out=True)


def test_measured_times_inside_their_bracket_are_counted() -> None:
    predicted = [
        outcome(FITTED, 110.0, 100.0, 150.0),
        outcome(FITTED, 90.0, 80.0, 100.0),
        outcome(FITTED, 110.0, 100.1, 150.0),
        outcome(FITTED, 90.0, 80.0, 99.9),
        outcome(FITTED, 90.0, 90.0, 90.0),
        outcome(HELD_OUT, 90.0, 80.0, 110.0),
    ]
    assert [row[-2:] for row in rows(text(predicted), "compiler")] == [
        ["3 of 6", "1"],
        ["2 of 5", "1"],
        ["1 of 1", "0"],
    ]
    bare = replace(predicted[0], predicted_us={Reading.scheduled: 110.0})
    assert [row[-2:] for row in rows(text([bare]), "compiler")] == [["", ""]] * 2
    low = replace(predicted[0], entry=replace(predicted[0].entry, confidence="low"))
    assert [row[-2:] for row in rows(text([low]), "compiler")] == [["", ""]] * 2


def test_the_json_has_times_of_held_out_entries_only_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "measurements.json", tmp_path / "out.json"
    (row,) = [row for row in json.loads(FILE.read_text()) if row["id"] == "b"]
    file.write_text(json.dumps([{**row, "id": name} for name in (FITTED, HELD_OUT)]))
    command = ["--measurements", str(file), "--json", str(out), "--quick"]
    assert main(command) == 0
    assert HELD_OUT not in capsys.readouterr().out
    fitted, held_out = json.loads(out.read_text())
    assert held_out == {
        "id": HELD_OUT,
        "family": "mlp",
        "target": "gen3",
        "confidence": "medium",
        "held_out": True,
        "covered": True,
        "schedule": "compiler",
    }
    assert not fitted["held_out"] and fitted["error"] == fitted["time_us"] / fitted["measured_us"] - 1.0
    assert main([*command, "--held-out"]) == 0
    assert HELD_OUT in capsys.readouterr().out
    same, complete = json.loads(out.read_text())
    assert same == fitted and {**complete, "id": FITTED, "held_out": False} == fitted


def test_no_share_of_guesses_is_told_where_none_was_worked_out() -> None:
    for probe, empty in ((True, False), (False, True)):
        predicted = outcomes([entry(FITTED)], (), probe=probe)
        assert (build_rows(predicted)[0]["guessed_share"] is None) is empty
        assert (rows(text(predicted), "**all**")[0][-1] == "") is empty


def test_a_time_says_whether_it_holds_the_host_side() -> None:
    chip, device = hardware("trn2"), entry(FITTED)
    host = replace(device, measured="host, synchronous call, mean of 100")
    times = [predict(build(variant)) for variant in (device, host)]
    assert [time.host_overhead_ns for time in times] == [0.0, chip.host_overhead_ns]
    predicted = outcomes([device, host], ())
    assert [row["host_overhead_ns"] for row in build_rows(predicted)] == [0.0, chip.host_overhead_ns]
    table = text(predicted)
    assert (
        "Times of 1 covered entries are the device's. Times of 1 (mlp 1) are of a synchronous call" in table
    )
    assert sorted(row[1] for row in rows(table, "mlp") if row[0] == FITTED) == ["device", "host call"]
    assert "Times of 1 covered entries are the device's. Times of 0 are of" in text(predicted[:1])
