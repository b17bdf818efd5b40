"""`time --against` a device profile: predicted, measured and their ratio, in text, JSON and trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulate.cli import main
from simulate.profile import Profile, profile
from simulate.profile.vendor import read_profile, side_by_side
from simulate.profile.vendor.read import is_device_profile
from simulate.profile.vendor.side_by_side import Pair
from tests.profile.device_profiles import KERNEL, METADATA, TABLES, instruction, write_profile
from tests.profile.test_profile_text import SCRIPT
from tests.timing import kernels

Capture = pytest.CaptureFixture[str]
DEFINED = SCRIPT[: SCRIPT.rindex("doubled(")]
LINES = {line.split("(")[0].strip(): number for number, line in enumerate(DEFINED.split("\n"), 1)}
LOAD, ADD, STORE = LINES["tile = nl.load"], LINES["nisa.tensor_tensor"], LINES["nisa.dma_copy"]
SHAPE = "f32[128,64]"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "script.py").write_text(DEFINED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    return "script.py:doubled"


@pytest.fixture
def measured(tmp_path: Path) -> str:
    """Write a device profile of the kernel, with line numbers of the script, and return its path."""
    rows = [
        instruction("Sync", "DMA", 0, 20, LOAD, dma_trigger_start_ts=100, dma_trigger_end_ts=300),
        instruction("Vector", "TENSOR_TENSOR", 300, 400, ADD, id=3),
        instruction("Vector", "COPY", 400, 450, 999),
    ]
    tables = {**TABLES, "Instruction": rows}
    return str(write_profile(tmp_path / "profile", tables, without=["ActiveTime"]))


def rows_of(out: str, head: str) -> dict[str, tuple[str, str, str]]:
    """Return a table of the text by the names of its rows."""
    block = out[out.index(f"\n{head}") + 1 :].split("\n\n")[0].splitlines()[1:]
    rows = {}
    for line in block:
        if not line.startswith("  "):
            name, *values = line.rsplit(None, 3)
            rows[name] = tuple(values)
    return rows  # type: ignore[return-value]


def test_a_measurement_stands_beside_the_prediction(script: str, measured: str, capsys: Capture) -> None:
    assert main(["time", script, SHAPE, "--json", "plain.json"]) == 0
    capsys.readouterr()
    plain = json.loads(Path("plain.json").read_text())["profiles"][0]
    assert main(["time", script, SHAPE, "--against", measured, "--json", "new.json"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    measurement = json.loads(Path("new.json").read_text())["measurement"]

    total_ns = plain["length_ns"] + plain["overhead_ns"]
    times = {time_pair["name"]: time_pair for time_pair in measurement["times"]}
    assert times["total_time"] == {
        "name": "total_time",
        "predicted_ns": total_ns,
        "measured_ns": pytest.approx(500.0),
        "ratio": pytest.approx(500.0 / total_ns),
    }
    assert times["total_exec_time"]["predicted_ns"] == plain["length_ns"]
    busy = {track["name"]: track["busy_ns"] for track in plain["tracks"] if track["busy_ns"]}
    engines = {engine["name"]: engine for engine in measurement["engines"]}
    assert {name: pair["predicted_ns"] for name, pair in engines.items() if name in busy} == busy
    assert engines["Vector"]["measured_ns"] == 150.0
    bounds = {bound["name"]: bound["time_ns"] for bound in plain["bounds"]}
    assert {bound["name"]: bound["predicted_ns"] for bound in measurement["bounds"]} == bounds
    assert {bound["name"]: bound["measured_ns"] for bound in measurement["bounds"]} == {
        "memory_bound": pytest.approx(171.0),
        "memory_bound_ideal": 65536 / 200,
        "memory_bound_ideal_no_reloads": 65536 / 200,
        "compute_bound": 0.0,
        "compute_bound_ideal_flops": 8192 / 81920,
        "compute_bound_ideal_useful_flops": (8192 - 1024) / 81920,
        "perfect_pipeline": pytest.approx(171.0),
    }
    held_ns = {f"script.py:{row['line']}": row["held_ns"] for row in plain["lines"]}
    lines = {line["name"]: line for line in measurement["lines"]}
    assert lines[f"script.py:{LOAD}"]["measured_ns"] == 20 + 200
    assert lines[f"script.py:{ADD}"]["predicted_ns"] == held_ns[f"script.py:{ADD}"]
    assert lines[f"script.py:{STORE}"]["measured_ns"] is None
    assert lines["script.py:999"] == {
        "name": "script.py:999",
        "predicted_ns": None,
        "measured_ns": 50.0,
        "ratio": None,
    }
    tensors = {
        tensor["name"]: (tensor["predicted_bytes"], tensor["measured_bytes"])
        for tensor in measurement["tensors"]
    }
    assert tensors == {"a": (32768, 32768), "out": (32768, 32768)}

    shown = rows_of(out, "the vendor's bounds, us")
    assert list(shown) == list(bounds)
    assert shown["memory_bound"][:2] == (f"{bounds['memory_bound'] / 1000:.3f}", "0.171")
    assert rows_of(out, "line, us")["script.py:999"] == ("-", "0.050", "-")
    assert rows_of(out, "DMA, MB")["hbm_read_bytes"] == ("0.033", "0.033", "1.00")
    assert "tile = nl.load(a)" in out and "the profiler warns: DMA descriptors are missing" in out


def test_a_summary_in_json_has_no_lines(script: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"n_1": TABLES["Summary"][0]}))
    assert main(["time", script, SHAPE, "--against", "summary.json", "--trace", "t.json"]) == 0
    out = capsys.readouterr().out
    assert "\nline, us" not in out and "\nHBM tensor" not in out
    assert rows_of(out, "time, us")["total_time"][1] == "0.500"
    assert "note: the profile names no peaks; the bounds take those of trn2" in out
    bounds = rows_of(out, "the vendor's bounds, us")
    assert bounds["perfect_pipeline"][1] == bounds["compute_bound"][1] == "-"  # it has no engines
    assert bounds["memory_bound"][1] == "0.171"
    assert "measured core" not in Path("t.json").read_text()


def test_both_runs_are_in_one_trace(script: str, measured: str, capsys: Capture) -> None:
    assert main(["time", script, SHAPE, "--against", measured, "--trace", "both.json"]) == 0
    events = json.loads(Path("both.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(named.values()) == ["NeuronCore", "measured core 0"]
    (process,) = (pid for pid, name in named.items() if name == "measured core 0")
    threads = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["pid"] == process and event["name"] == "thread_name"
    }
    slices = [
        (threads[event["tid"]], event["name"], event["ts"], event["dur"])
        for event in events
        if event["pid"] == process and event["ph"] == "X"
    ]
    assert slices == [
        ("Sync", "DMA", 0.0, 0.02),
        ("DMA q Sync", "a", 0.03, 0.1),
        ("DMA q Sync", "out", 0.24, 0.06),
        ("Vector", "TENSOR_TENSOR", 0.3, 0.1),
        ("Vector", "COPY", 0.4, 0.05),
    ]
    counters = {event["name"] for event in events if event["pid"] == process and event["ph"] == "C"}
    assert counters == {"pending DMAs", "SBUF average fullness", "PSUM average fullness"}
    (leaves,) = (event for event in events if event["pid"] == process and event["ph"] == "s")
    (arrives,) = (event for event in events if event["pid"] == process and event["ph"] == "f")
    assert (leaves["name"], leaves["id"], leaves["ts"]) == ("FLOW_DEPENDENCE", arrives["id"], 0.129)
    assert (threads[leaves["tid"]], threads[arrives["tid"]], arrives["ts"]) == ("DMA q Sync", "Vector", 0.3)
    assert leaves["id"] not in {event["id"] for event in events if event["pid"] != process and "id" in event}
    alone = [event for event in events if event["pid"] != process]
    assert main(["time", script, SHAPE, "--trace", "alone.json"]) == 0
    assert json.loads(Path("alone.json").read_text())["traceEvents"] == alone


@pytest.mark.parametrize(("total_ns", "status"), [(1e9, 0), (1.0, 1)])
def test_a_limit_holds_the_prediction_against_the_measurement(
    total_ns: float, status: int, script: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"total_time": total_ns / 1e9}))
    assert main(["time", script, SHAPE, "--against", "summary.json", "--fail-above", "2%"]) == status
    assert bool(status) == ("slower by more than 2 %: 19.8" in capsys.readouterr().err)


def test_a_profile_is_of_one_kernel(script: str, measured: str, tmp_path: Path, capsys: Capture) -> None:
    calls = "\ndoubled(np.zeros((128, 64), np.float32))\n"
    (tmp_path / "twice.py").write_text(DEFINED + 2 * calls)
    assert main(["time", "--against", measured, "--", "twice.py"]) == 0
    capsys.readouterr()
    (tmp_path / "twice.py").write_text(DEFINED + calls + calls.replace("64", "32"))
    assert main(["time", "--against", measured, "--", "twice.py"]) == 2
    assert capsys.readouterr().err.endswith(
        "[NKW-AGAINST] --against takes a profile of a single launch, this run makes 2 different launches; give the "
        "kernel by name with its shapes\n"
    )


def test_a_broken_profile_ends_the_command_before_the_run(
    script: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = write_profile(tmp_path / "broken")
    (folder / "Instruction.parquet").write_bytes(b"PAR1")
    assert main(["time", script, SHAPE, "--against", str(folder), "--json", "x.json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and not Path("x.json").exists()
    assert f"error: [NKW-PROFILE-FILE] {folder} is no profile of" in captured.err


@pytest.mark.parametrize("option", ["--json", "--trace", "--html"])
def test_no_output_takes_the_place_of_a_table(
    option: str, script: str, measured: str, capsys: Capture
) -> None:
    table = Path(measured) / "Instruction.parquet"
    before = table.read_bytes()
    assert main(["time", script, SHAPE, "--against", measured, option, str(table)]) == 2
    assert "this command reads that file" in capsys.readouterr().err
    assert table.read_bytes() == before


@pytest.mark.parametrize("padding", [0, (1 << 20) - 200, 1 << 20])
def test_a_long_json_of_neuron_profile_is_known_by_its_summary(padding: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    instructions = [{"timestamp": 1, "operands": "x" * padding}]
    path.write_text(json.dumps({"summary": [TABLES["Summary"][0]], "instruction": instructions}))
    assert is_device_profile(path) and read_profile(path).notes
    path.write_text(
        json.dumps({"schema": 1, "command": "time", "measurement": ["total_time", "x" * padding]})
    )
    assert not is_device_profile(path)


ONE_TIME = {"Summary": TABLES["Summary"]}


def two_cores() -> Profile:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512), cores=2)
    return profile(launch.streams, launch.hardware)


def test_cores_are_paired_by_number(tmp_path: Path) -> None:
    predicted = two_cores()
    rows = [instruction("Vector", "COPY", 0, 5 + core, pcore_idx=core) for core in (0, 1)]
    measured = side_by_side(
        predicted, read_profile(write_profile(tmp_path / "two", {**ONE_TIME, "Instruction": rows}))
    )
    pairs = {engine.name: engine for engine in measured.engines}
    for core in (0, 1):
        busy = predicted.timeline.busy_ns[f"rank 0 core {core} Vector"]
        assert pairs[f"core {core} Vector"] == Pair(f"core {core} Vector", busy, 5 + core)
    assert measured.bounds == () and measured.notes == ()


def test_a_profile_that_tells_no_cores_apart_is_noted(tmp_path: Path) -> None:
    rows = [instruction("Vector", "COPY", 0, 5)]
    measured = side_by_side(
        two_cores(), read_profile(write_profile(tmp_path / "one", {**ONE_TIME, "Instruction": rows}))
    )
    assert measured.notes == ("the profile does not tell cores apart; its engines are listed at core 0",)


@pytest.mark.parametrize(
    ("instance", "note"),
    [
        ("trn2.48xlarge", None),
        ("trn2u.48xlarge", None),
        ("", None),
        ("trn1.2xlarge", "trn1.2xlarge"),
        ("inf2.xlarge", "inf2.xlarge"),
    ],
)
def test_another_chip_than_the_predicted_one_is_noted(
    instance: str, note: str | None, tmp_path: Path
) -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    tables = {**TABLES, "Metadata": [{**METADATA, "instance_type": instance}]}
    measured = side_by_side(
        profile(launch.streams, launch.hardware), read_profile(write_profile(tmp_path / "p", tables))
    )
    assert measured.notes == ((f"measured on {note}, predicted for trn2",) if note else ())


def test_of_several_ranks_only_times_and_engines_are_compared(tmp_path: Path) -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512), ranks=2)
    predicted = profile(launch.streams, launch.hardware)
    measured = side_by_side(predicted, read_profile(write_profile(tmp_path / "p")))
    assert (
        measured.dma_bytes == measured.lines == measured.tensors == measured.bounds == measured.counts == ()
    )
    pairs = {engine.name: engine for engine in measured.engines}
    assert pairs["Vector"] == Pair("Vector", predicted.timeline.busy_ns["rank 0 Vector"], 40.0)
    assert measured.notes == (
        "the prediction has several ranks, the profile one: only times and engines are compared",
    )


def test_files_of_one_name_are_apart_by_their_folder(tmp_path: Path) -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    rows: list[Any] = [
        instruction("Vector", "COPY", 0, 5, 7),
        instruction("Vector", "COPY", 5, 7, nki_source_location=f"{KERNEL.replace('work', 'other')}:7"),
    ]
    folder = write_profile(tmp_path / "two", {"Instruction": rows, "Metadata": [METADATA]})
    measured = side_by_side(profile(launch.streams, launch.hardware), read_profile(folder))
    names = {line.name: line.measured for line in measured.lines if line.measured}
    assert names == {"work/script.py:7": 5.0, "other/script.py:7": 2.0}


@pytest.mark.parametrize(
    ("predicted", "measured", "ratio"),
    [(2.0, 3.0, 1.5), (0.0, 3.0, None), (None, 3.0, None), (2.0, None, None)],
)
def test_a_ratio_is_measured_over_predicted(
    predicted: float | None, measured: float | None, ratio: float | None
) -> None:
    assert Pair("x", predicted, measured).ratio == ratio
