"""Times that a bundle brought back become entries of the fidelity bench, and measurements to calibrate with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.bench import outcomes
from benchmarks.fidelity.calibration import measurements as described
from benchmarks.fidelity.entry import read_entries
from nkw.targets import HARDWARE_VARIABLE
from simulate.bundle.entries import DEVICE, HOST
from simulate.cli import main
from tests.calibrate.measured import KERNEL, SMALL, prediction, times

Capture = pytest.CaptureFixture[str]
CHANGED = {"dma_completion_ns": 2.0}


@pytest.fixture(autouse=True)
def _working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(HARDWARE_VARIABLE, "")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.chdir(tmp_path)


def bundle(name: str, words: str, arguments: str) -> Path:
    """Return the folder of a bundle of one kernel."""
    assert main(["bundle", words, *arguments.split(), "--out", name]) == 0
    return Path(name)


def bring_back(folder: Path, median_ns: float, clock: str = "device", **more: Any) -> None:
    """Write the result of a run with such times into a bundle, as docs/bundle.md describes it."""
    made = json.loads((folder / "bundle.json").read_text())
    spread = more.pop("spread_ns", 0.0)
    case = {
        "name": made["cases"][0]["name"],
        "status": "ran",
        "stage": None,
        "error": None,
        "log": None,
        "outputs": [],
        "times": {
            "warmup": 2,
            "repetitions_ns": [],
            "median_ns": median_ns,
            "spread_ns": spread,
            "clock": clock,
        },
        "profile": None,
    }
    result = {
        "schema": 2,
        "bundle": made["digest"],
        "target": made["target"],
        "started": "2026-11-23T08:00:00Z",
        "finished": None,
        "environment": {
            "python": "3.11.2",
            "platform": "Linux",
            "packages": {"nki": "0.7.0"},
            "instance": "trn2.3xlarge",
            "devices": [],
            "variables": {},
        },
        "launcher": "nki",
        "cases": [case | more],
        "failures": [],
    }
    (folder / "result").mkdir(exist_ok=True)
    (folder / "result" / "result.json").write_text(json.dumps(result))


def written(folder: Path, capsys: Capture) -> tuple[list[dict[str, Any]], str]:
    """Return the entries that `compare --measurements` writes for a bundle, and what it says."""
    capsys.readouterr()
    assert main(["compare", str(folder), "--measurements", "measured.json"]) in (0, 1)
    return json.loads(Path("measured.json").read_text()), " ".join(capsys.readouterr().out.split())


def test_a_measured_kernel_of_this_project_is_an_entry_that_fidelity_predicts(capsys: Capture) -> None:
    folder = bundle("m", "nki_kernels:matmul", "bf16[64,64] bf16[64,128]")
    bring_back(folder, 20_000.0, spread_ns=400.0)
    (entry,), report = written(folder, capsys)
    assert "measurements: measured.json, 1 kernel launch" in report
    digest = json.loads((folder / "bundle.json").read_text())["digest"][:12]
    assert entry == {
        "id": f"matmul-{digest}",
        "family": "kernel",
        "kernel": entry["kernel"],
        "shapes": "'a=bf16[64,64]' 'b=bf16[64,128]'",
        "dtype": "bfloat16",
        "target": "trn2",
        "instance": "trn2.3xlarge",
        "cores": 1,
        "latency_us": 20.0,
        "measured": DEVICE,
        "source": f"bundle {digest}, run 2026-11-23T08:00:00Z launched by nki (nki 0.7.0)",
        "confidence": "high",
        "metrics": {"spread_us": 0.4, "repetitions": 0},
    }
    assert entry["kernel"].startswith("nki_kernels") and entry["kernel"].endswith(":matmul")
    (read,) = read_entries("measured.json")
    assert read.flaw == ""
    (outcome,) = outcomes([read])
    assert outcome.covered and outcome.measured_us == 20.0
    predicted = json.loads((folder / "bundle.json").read_text())["cases"][0]["predicted"]
    # A benchmark of trn2 holds 9.1 us of starting and ending a kernel.
    assert outcome.predicted_us is not None
    assert outcome.predicted_us[outcome.reading] == pytest.approx(predicted["scheduled_ns"] / 1e3 + 9.1)


@pytest.mark.parametrize(
    ("clock", "spread_ns", "confidence"),
    [
        *(("device", 1_000.0, "high"), ("device", 1_001.0, "medium"), ("device", 4_000.0, "medium")),
        *(("device", 4_001.0, "low"), ("host", 0.0, "medium"), ("host", 4_001.0, "low")),
    ],
)
def test_confidence_follows_from_clock_and_spread(
    clock: str, spread_ns: float, confidence: str, capsys: Capture
) -> None:
    folder = bundle("m", KERNEL, SMALL[0])
    bring_back(folder, 20_000.0, clock, spread_ns=spread_ns)
    (entry,), _ = written(folder, capsys)
    assert entry["confidence"] == confidence
    assert entry["measured"] == (DEVICE if clock == "device" else HOST)
    assert entry["kernel"] == f"{folder.resolve()}/sources/micro.py:micro"
    (outcome,) = outcomes(read_entries("measured.json"), readings=(), probe=False)
    assert outcome.covered, outcome.reason


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"times": None, "status": "failed", "stage": "compile"}, "it was not timed (failed at compile)"),
        ({"times": None, "status": "skipped"}, "it was not timed (skipped)"),
    ],
)
def test_a_case_without_a_time_is_left_out(more: dict[str, Any], reason: str, capsys: Capture) -> None:
    folder = bundle("m", KERNEL, SMALL[0])
    bring_back(folder, 20_000.0, **more)
    entries, text = written(folder, capsys)
    assert entries == [] and reason in text


def test_a_kernel_that_has_changed_since_is_left_out(capsys: Capture) -> None:
    folder = bundle("m", "nki_kernels:matmul", "bf16[64,64] bf16[64,128]")
    bring_back(folder, 20_000.0)
    made = json.loads((folder / "bundle.json").read_text())
    path = folder / "sources" / Path(*made["cases"][0]["module"].split("."))
    path = path.with_suffix(".py")
    path.write_text(path.read_text() + "\n")
    entries, text = written(folder, capsys)
    assert entries == [] and "here is not the one that was measured" in text


@pytest.mark.parametrize("key", ["bundle", "target"])
def test_a_result_of_another_bundle_is_refused(key: str, capsys: Capture) -> None:
    folder = bundle("m", KERNEL, SMALL[0])
    bring_back(folder, 20_000.0)
    record = folder / "result" / "result.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {key: "trn1"}))
    assert main(["calibrate", "m"]) == 2
    assert "belongs to another bundle" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_bundles_that_came_back_and_their_entries_calibrate_alike(capsys: Capture) -> None:
    predictions = [prediction(argument) for argument in SMALL]
    entries = []
    for number, (arguments, time_ns) in enumerate(zip(SMALL, times(predictions, CHANGED))):
        folder = bundle(f"m{number}", KERNEL, arguments)
        bring_back(folder, time_ns)
        entries += written(folder, capsys)[0]
    folders = [f"m{number}" for number in range(len(SMALL))]
    Path("all.json").write_text(json.dumps(entries))
    chips = []
    for words in ([*folders[:-1], os.path.join(folders[-1], "result")], ["all.json"]):
        assert main(["calibrate", *words, "--json", "found.json"]) == 0
        (chip,) = json.loads(Path("found.json").read_text())["chips"]
        chips.append(chip)
    assert chips[0] == chips[1]
    (number,) = chips[0]["contradictions"]
    assert "dma_completion_ns" in [number["number"], *number["instead"]]


def test_described_kernels_of_the_bench_are_measurements_unless_held_out(tmp_path: Path) -> None:
    base = {"target": "gen2", "instance": "trn1", "confidence": "high", "dtype": "-", "cores": 1}
    base |= {
        "family": "instr",
        "measured": "device trace, single instruction start to end",
        "latency_us": 0.159,
    }
    words = {"kernel": "activation of one element per partition", "shapes": "128x1"}
    items = [{**base, **words, "id": f"n{number}"} for number in range(12)]
    items += [{**base, **words, "id": "n0", "confidence": "low"}, {**base, "family": "nothing", "id": "n0"}]
    Path("described.json").write_text(json.dumps(items))
    measurements, skipped = described(Path("described.json"))
    held_out = [entry.id for entry in read_entries("described.json")[:12] if entry.held_out]
    assert held_out and [entry.name for entry in skipped] == [*held_out, "n0", "n0"]
    assert len(measurements) == 12 - len(held_out)
    assert all(
        measurement.target == "trn1" and 50.0 < measurement.predict() < 500.0 for measurement in measurements
    )
