"""An overlay replaces numbers of the hardware records wherever a chip is asked for, and numbers of times only."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simulate
from nkw.commands import main as nkw
from nkw.errors import InvalidArgument
from nkw.targets import HARDWARE_VARIABLE
from simulate.hardware import TARGETS, Hardware, hardware, use_overlay
from simulate.hardware.overlay import _build_object, is_replaceable
from simulate.timing import schedule
from tests.bytecode_count import CountedName

Capture = pytest.CaptureFixture[str]
GIVEN = {"source": "a test", "confidence": "derived"}


@pytest.fixture(autouse=True)
def _no_overlay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(HARDWARE_VARIABLE, "")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.chdir(tmp_path)


def overlay(content: Any, name: str = "measured.json") -> str:
    """Write a file with this content and return its path."""
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(Path(name).absolute())


def value(number: Any, chip: str = "trn2", name: str = "semaphore_ns", **more: Any) -> dict[str, Any]:
    """Return an overlay of one value."""
    return {chip: {name: {"value": number, **GIVEN, **more}}}


@pytest.mark.parametrize("target", TARGETS)
def test_a_number_of_an_overlay_replaces_that_of_its_chip_only(target: str) -> None:
    before = {chip: hardware(chip) for chip in TARGETS}
    use_overlay(overlay(value(52.5, target, note="two cores")))
    for chip in TARGETS:
        record = hardware(chip)
        assert (record == before[chip]) is (chip != target)
        assert record.semaphore_ns == (52.5 if chip == target else before[chip].semaphore_ns)
    number = hardware(target).provenance["semaphore_ns"]
    assert (number.source, number.confidence.value, number.note) == ("a test", "derived", "two cores")
    assert hardware(target).label == f"{target} with 1 number of measured.json"
    assert pickle.loads(pickle.dumps(hardware(target))) == hardware(target)


def test_generations_and_instances_are_those_of_the_overlaid_chip() -> None:
    path = overlay(
        {"trn1": {**value(52.5)["trn2"], "collective_latency_ns": {"value": {"32": 99e3}, **GIVEN}}}
    )
    use_overlay(path)
    for name in ("gen2", "trn1.32xlarge", "2 x trn1.32xlarge"):
        assert hardware(name).semaphore_ns == 52.5
        assert "2 numbers of measured.json" in hardware(name).label
    assert hardware("trn1.32xlarge").collective_latency_ns[32] == 99e3


def test_a_table_keeps_the_entries_that_an_overlay_does_not_name() -> None:
    before = hardware("trn2").collective_latency_ns
    use_overlay(overlay(value({"8": 12e3}, name="collective_latency_ns")))
    assert hardware("trn2").collective_latency_ns == {**before, 8: 12e3}


def test_whole_numbers_stay_whole_and_times_become_floats() -> None:
    content = {**value(70)["trn2"], "vector_min_interval_cycles": {"value": 80, **GIVEN}}
    use_overlay(overlay({"trn2": content}))
    record = hardware("trn2")
    assert (record.semaphore_ns, type(record.semaphore_ns)) == (70.0, float)
    assert (record.vector_min_interval_cycles, type(record.vector_min_interval_cycles)) == (80, int)


def test_an_overlay_replaces_a_fact_that_decides_values() -> None:
    use_overlay(overlay(value(False, name="matmul_keeps_fp8_subnormals")))
    kept = {chip: hardware(chip).matmul_keeps_fp8_subnormals for chip in TARGETS}
    assert kept == {chip: chip != "trn2" for chip in TARGETS}
    assert hardware("trn2").label == "trn2 with 1 number of measured.json"


def test_an_overlay_without_numbers_changes_nothing() -> None:
    before = hardware("trn2")
    use_overlay(overlay({"trn2": {}}))
    assert hardware("trn2") == before and hardware("trn2").label == "trn2"


def test_every_number_of_times_and_no_other_can_be_replaced() -> None:
    types = {field.name: field.type for field in fields(Hardware) if field.name != "provenance"}
    limits = {name for name in types if not is_replaceable(name)}
    assert {"partitions", "sbuf_usable_bytes_per_partition", "hbm_bytes_per_core", "dma_engines"} <= limits
    assert {"mx", "activity_throttle", "matmul_tile_sizes", "name", "matmul_fp32_passes"} <= limits
    assert all("ghz" not in limit and not limit.endswith(("_ns", "_cycles", "_per_s")) for limit in limits)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ([], "it holds a list, not an object of chips"),
        ({"gen3": {}}, "'gen3' is no known chip; known are trn1, inf2, trn2, trn3"),
        ({"trn2": 3}, "trn2 is a number, not an object of numbers"),
        (value(1.0, name="semaphor_ns"), "trn2, semaphor_ns: a hardware record has no number of this name"),
        (value(8, name="partitions"), "trn2, partitions: it decides which kernels are accepted"),
        (value(True, name="mx"), "trn2, mx: it decides which kernels are accepted"),
        ({"trn2": {"semaphore_ns": 50.0}}, "an entry has value, source and confidence"),
        (
            {"trn2": {"semaphore_ns": {"value": 50.0, "source": "x"}}},
            "an entry has value, source and confidence",
        ),
        (value(50.0, unit="ns"), "an entry has value, source and confidence"),
        (value(50.0, source=3), "its source is a number, not a string"),
        (value(50.0, source=" "), "its source is empty"),
        (
            value(50.0, confidence="sure"),
            "its confidence is 'sure'; it must be one of documented, derived, guessed",
        ),
        (value("50"), "its value is a string, not a number"),
        (value(True), "its value is true or false, not a number"),
        (value(None), "its value is null, not a number"),
        (value(float("nan")), "its value is nan, which is not finite"),
        (value(float("inf")), "its value is inf, which is not finite"),
        (value(0), "its value is 0; it must be above 0"),
        (value(-1.5), "its value is -1.5; it must be above 0"),
        (value(0, name="matmul_keeps_fp8_subnormals"), "its value is 0; it must be true or false"),
        (value("no", name="matmul_keeps_fp8_subnormals"), "its value is 'no'; it must be true or false"),
        (value(64.5, name="vector_min_interval_cycles"), "its value is 64.5; it must be a whole number"),
        (
            value(1.01, name="dma_compute_fraction"),
            "its value is 1.01; it must be at most 1, since it is a share",
        ),
        (value(45.0 * 1000.01), "1000 times off the record's 45; check its unit"),
        (value(45.0 / 1000.01), "1000 times off the record's 45; check its unit"),
        (value(10**400), "1000 times off the record's 45; check its unit"),
        (value(3.0, name="collective_latency_ns"), "not an object by number of ranks: 2, 4, 8, 32"),
        (value({}, name="collective_latency_ns"), "not an object by number of ranks"),
        (
            value({"3": 1.0}, name="collective_latency_ns"),
            "'3' is no entry of the record's table: 2, 4, 8, 32",
        ),
        (value({"8": -1.0}, name="collective_latency_ns"), "8 ranks: its value is -1.0; it must be above 0"),
        ('{"trn2": {}, "trn2": {}}', "the key 'trn2' occurs twice in one object"),
    ],
)
def test_what_is_no_overlay_is_refused_in_one_sentence(content: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        use_overlay(overlay(content))
    assert refused.value.code == "NKW-HARDWARE" and message in str(refused.value)
    assert not os.environ[HARDWARE_VARIABLE]


@pytest.mark.parametrize(
    "content",
    [
        value(45e3),
        value(0.045),
        value(1.0, name="dma_compute_fraction"),
        value(45),
        value(1.0, name="vector_bitwise_32bit_elements_per_cycle"),
        value(False, name="matmul_keeps_fp8_subnormals"),
        {},
    ],
)
def test_values_at_the_limits_are_taken(content: Any) -> None:
    use_overlay(overlay(content))
    assert hardware("trn2")


def test_a_file_that_is_not_there_is_refused_where_a_chip_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HARDWARE_VARIABLE, "absent.json")
    message = r"absent\.json cannot be used: it cannot be read: No such file or directory$"
    with pytest.raises(InvalidArgument, match=message):
        simulate.World("trn2")


def adds(a: Any, b: Any) -> Any:
    import nki.isa as nisa
    import nki.language as nl

    left, right = (nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf) for _ in range(2))
    nisa.dma_copy(dst=left, src=a)
    nisa.dma_copy(dst=right, src=b)
    nisa.tensor_tensor(dst=left, data1=left, data2=right, op=nl.add)
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=left)
    return out


def test_a_world_of_an_overlay_replays_no_program_recorded_without_it() -> None:
    from simulate.replay import ReplayCache

    simulate.install("simulate")
    cache, ones = ReplayCache(), np.ones((4, 8), np.float32)
    lengths = []
    for name in ("", overlay(value(5000.0, name="dma_completion_ns"))):
        os.environ[HARDWARE_VARIABLE] = name
        world = simulate.World("trn2", replays=cache)
        for _ in range(2):
            done = world.launch(adds, [((ones, ones), {})], simulate.Mode.replay)
        lengths.append(schedule(done.streams, done.hardware).length_ns)
    assert (cache.report.recorded, cache.report.hits) == (2, 2)
    # Two loads that overlap, and a store.
    assert lengths[1] - lengths[0] == pytest.approx(2 * (5000.0 - 316.0), rel=0.01)


KERNEL = ("nki_kernels:rmsnorm", "f32[128,512]", "f32[1,512]", "1e-5")


@pytest.mark.parametrize(
    "words",
    [
        ("time", *KERNEL),
        ("memory", *KERNEL),
        ("run", *KERNEL),
        ("check", *KERNEL),
        ("verify", *KERNEL),
        ("targets",),
        ("plan", "MODEL", "--tp", "1", "--instance", "trn2.3xlarge", "--prompt", "8", "--generate", "2"),
    ],
)
def test_commands_read_an_overlay_and_their_reports_say_so(words: tuple[str, ...], capsys: Capture) -> None:
    from model.loading.shipped import PRETRAINED

    command = [str(PRETRAINED) if word == "MODEL" else word for word in words]
    path = overlay(value(3160.0, name="dma_completion_ns"))
    assert nkw([*command, "--json", "plain.json"]) == 0
    assert "measured.json" not in "".join(capsys.readouterr())
    assert nkw([*command, "--json", "changed.json", "--hardware", path]) == 0
    out, err = capsys.readouterr()
    assert "trn2 with 1 number of measured.json" in " ".join((out + err).split())
    named = " with 1 number of measured.json"
    plain, changed = (
        json.loads(Path(name).read_text().replace(named, "")) for name in ("plain.json", "changed.json")
    )
    assert "hardware" not in plain and changed.pop("hardware") == path
    assert (plain == changed) is (words[0] not in ("time", "verify", "plan"))


@pytest.mark.parametrize("command", ["time", "targets", "plan", "generate", "fidelity"])
def test_commands_refuse_what_is_no_overlay(command: str, capsys: Capture) -> None:
    words = {"time": KERNEL, "plan": ("config.json",)}.get(command, ())
    root = Path(__file__).resolve().parents[2]
    os.chdir(root if command == "fidelity" else Path.cwd())
    assert nkw([command, *words, "--hardware", "absent.json"]) == 2
    assert "absent.json cannot be used" in " ".join(capsys.readouterr().err.split())


def test_an_overlay_without_predicted_times_is_refused(capsys: Capture) -> None:
    path = overlay(value(52.5))
    assert nkw(["generate", "--backend", "numpy", "--hardware", path]) == 2
    assert "--hardware needs the simulate backend; numpy predicts no times" in capsys.readouterr().err


def test_processes_inherit_an_overlay_named_in_another_folder() -> None:
    Path("there").mkdir()
    overlay(value(52.5), "there/measured.json")
    use_overlay("there/measured.json")
    code = "from simulate.run import target_hardware as t; print(t().semaphore_ns)"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env={**os.environ, "PYTHONPATH": root}, capture_output=True
    )
    assert done.stdout == b"52.5\n", done.stderr


def test_a_repeated_name_is_found_without_comparing_all_pairs_of_names() -> None:
    names = [CountedName(f"name{number}") for number in range(2000)]
    CountedName.comparisons = 0
    with pytest.raises(InvalidArgument, match="the key 'name1999' occurs twice in one object"):
        _build_object([(name, 0) for name in [*names, CountedName("name1999")]], "measured.json")
    assert CountedName.comparisons <= len(names), "every name but the repeated one is new"
    assert _build_object([(name, 0) for name in names], "measured.json") == dict.fromkeys(names, 0)
