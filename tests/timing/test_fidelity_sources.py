"""Public sources in the fidelity bench, on clones of a few lines, and on the library where its clone is at hand."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks.fidelity.case import Schedule
from benchmarks.fidelity.sources.bench import predict_sources
from benchmarks.fidelity.sources.clones import AUTOTUNE, LIBRARY, recognise_clones
from benchmarks.fidelity.sources.forked import run_forked
from benchmarks.fidelity.sources.repairs import Repairing
from benchmarks.fidelity.sources.source import read_sources
from nkw.errors import InvalidArgument
from nkw.process import Limits
from simulate.hardware import hardware
from simulate.run.machine import Mode
from simulate.timing import Reading, schedule
from simulate.world import launch
from tests.timing.source_clones import ATTENTION, DECODE, HEADS, KERNEL, MATRICES, NORMED, make, write

CLONE = "NKW_LIBRARY"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("clones"))


def run(
    folder: Path, tmp_path: Path, *entries: object, clones: tuple[str, ...] = ("library", "autotune")
) -> Any:
    known = recognise_clones([str(folder / name) for name in clones])
    return predict_sources(read_sources(write(tmp_path, *entries)), known)


def reasons(folder: Path, tmp_path: Path, entry: Mapping[str, Any], *changed: object) -> list[str]:
    entries = [{**entry, **change} if isinstance(change, dict) else change for change in changed]
    return [outcome.reason for outcome in run(folder, tmp_path, *entries)]


def test_a_time_is_that_of_the_launch_with_start_and_end_of_the_kernel(folder: Path, tmp_path: Path) -> None:
    (predicted,) = run(folder, tmp_path, ATTENTION)
    scope: dict[str, Any] = {}
    exec(KERNEL.replace("@nki.jit", ""), scope)
    dtype, chip = ml_dtypes.bfloat16, hardware("gen3")
    shapes = {"q": (2, 64, 256), "k": (2, 64, 128), "v": (2, 128, 64)}
    keywords = {name: np.empty(shape, dtype) for name, shape in shapes.items()}
    keywords |= {"causal_mask": True, "tp_q": False, "tp_out": False}  # type: ignore[dict-item]
    done = launch(scope["attention_cte"], [((), keywords)], chip, 1, Mode.dry, has_grid=True)
    around_ns = chip.kernel_start_ns + chip.kernel_end_ns
    expected = {
        reading: (schedule(done.streams, done.hardware, reading).length_ns + around_ns) / 1000
        for reading in Reading
    }
    assert predicted.predicted_us == expected and predicted.reading is Reading.program
    assert predicted.error() == expected[Reading.program] / 30.0 - 1.0
    (core,) = predicted.work["cores"]
    assert core["dmas"] == 4 and core["dma_bytes"] == 4 * 128 * 64 * 2 and core["flops"] == 0
    assert predicted.floor_us == pytest.approx(core["dma_bytes"] / done.hardware.hbm_gb_per_s_per_core / 1000)


def test_both_cores_of_a_logical_core_run(folder: Path, tmp_path: Path) -> None:
    one, two = run(folder, tmp_path, ATTENTION, {**ATTENTION, "lnc": 2})
    assert (len(one.work["cores"]), len(two.work["cores"])) == (1, 2)


@pytest.mark.slow
def test_an_mlp_gets_the_arguments_of_its_entry(folder: Path, tmp_path: Path) -> None:
    """Its published file has a docstring that ends twice; the kernel of this clone raises with what it got."""
    narrow = {"kernel": "mlp (decode), fp8 row-quantised weights, column tiling", "norm": "NO_NORM"}
    static = {"quantisation": "STATIC", "weight_dtype": "float8_e4m3", "activation": "SiLU"}
    messages = reasons(
        folder,
        tmp_path,
        DECODE,
        {},
        {"kernel": "mlp (prefill)"},
        {"kernel": "mlp (prefill)", "store_add": True},
        {"fused_add": False, "source": "test_mlp_tkg.py", "quantisation": "NONE", "weight_dtype": "None"},
        narrow,
        {"quantisation": "ROW", "gate_bias": True, "gate_up_column_tiling": False},
        {**static, "down_bias": True, "skip_gate": True, "down_column_tiling": False},
        {"quantisation": "MX"},
        {"activation": "ReLU"},
    )
    common = "its kernel raises ValueError: (1, 2, 256) (256, 128)"
    assert messages == [
        f"{common} bfloat16 RMS_NORM NONE 1100 1011 [False, False]",
        f"{common} bfloat16 RMS_NORM NONE 1100 0011 [False, False]",
        f"{common} bfloat16 RMS_NORM NONE 1100 1011 [False, False]",
        f"{common} bfloat16 RMS_NORM NONE 0100 0011 [False, False]",
        f"{common} float8_e4m3 NO_NORM ROW 1000 1011 [256, False]",
        f"{common} float8_e4m3 RMS_NORM ROW 1110 1001 [256, False]",
        f"{common} float8_e4m3 RMS_NORM STATIC 1101 1110 [1, 1]",
        "quantisation is 'MX', not NONE, STATIC, ROW",
        "activation is 'ReLU', not SiLU",
    ]


@pytest.mark.slow
def test_a_projection_of_queries_keys_and_values_gets_the_arguments_of_its_entry(
    folder: Path, tmp_path: Path
) -> None:
    messages = reasons(
        folder,
        tmp_path,
        HEADS,
        {},
        {"norm": "NO_NORM", "qkv_bias": True, "fused_add": True},
        {"quantisation": "STATIC"},
        {"quantisation": "ROW"},
        {"output_layout": "NBSd"},
    )
    common = "its kernel raises ValueError: (2, 1, 256) (256, 256)"
    assert messages == [
        f"{common} bfloat16 NONE 64 None [False, False, 256, False, False, False]",
        f"{common} bfloat16 NONE 64 None [256, 1, False, False, False, False]",
        f"{common} float8_e4m3 STATIC 64 2 [False, False, 256, False, 3, 1]",
        f"{common} float8_e4m3 ROW 64 None [False, False, 256, False, 256, False]",
        "output_layout is 'NBSd', not BSD",
    ]


@pytest.mark.slow
def test_an_entry_without_a_launch_has_a_reason_and_costs_no_other_one(folder: Path, tmp_path: Path) -> None:
    cases: dict[str, object] = {
        "no builder calls 'conv'": {"kernel": "conv"},
        "no clone of somebody/else is named by --sources": {"repo": "somebody/else"},
        "heads is '2', not a size": {"heads": "2"},
        "heads is True, not a size": {"heads": True},
        "heads is 0, not a size": {"heads": 0},
        "q_len is None, not a size": {"q_len": None},
        "causal is 1, not true or false": {"causal": 1},
        "dtype is 'float33', not float32, bfloat16, float16": {"dtype": "float33"},
        "dtype is ['float32'], not float32, bfloat16, float16": {"dtype": ["float32"]},
        "the launch does not know the field 'sink'": {"sink": True},
        "lnc is 3, not 1 or 2": {"lnc": 3},
        "measured_us is None, no time of a kernel": {"measured_us": None},
        "it is a str, not an object; lnc is None, not 1 or 2; measured_us is None, no time of a kernel": "words",
        "its launch ended without a result, as it does beyond 900 s and 12 GiB": {"heads": 7},
        "its kernel breaks a rule: [NKW-EXIT] the kernel attention_cte called sys.exit('enough') before it returned: "
        "return from it, or raise an Exception": {"heads": 8},
        "": {},
    }
    assert reasons(folder, tmp_path, ATTENTION, *cases.values()) == list(cases)
    (broken,) = reasons(folder, tmp_path, ATTENTION, {"heads": 9})
    assert broken.startswith("its kernel breaks a rule: [NKW-")
    (huge,) = reasons(folder, tmp_path, ATTENTION, {"heads": 10**9, "kv_len": 10**9})
    assert huge.startswith("its kernel raises")


def test_a_target_that_is_no_chip_is_a_reason(folder: Path) -> None:
    (source,) = read_sources(write(folder, ATTENTION))
    clones = recognise_clones([str(folder / "library")])
    (predicted,) = predict_sources([replace(source, target="gen9")], clones)
    assert predicted.reason == "target 'gen9' names no chip"


def test_a_hand_tuned_product_is_the_one_file_of_its_folder(folder: Path, tmp_path: Path) -> None:
    one, two = run(folder, tmp_path, MATRICES, {**MATRICES, "lhs": "M x K"})
    assert one.covered and one.work["cores"][0]["dma_bytes"] == 2048 * 2048 * 2
    assert two.reason == "matmul/lhs_rhs has 2 files kernel_hand*.py, not one"
    (absent,) = run(folder, tmp_path, MATRICES, clones=("library",))
    assert absent.reason == f"no clone of {AUTOTUNE} is named by --sources"


def test_the_reading_that_counts_is_that_of_who_scheduled_the_kernel(folder: Path, tmp_path: Path) -> None:
    predicted = run(folder, tmp_path, ATTENTION, MATRICES, NORMED)
    assert [(outcome.schedule, outcome.reading) for outcome in predicted] == [
        (Schedule.explicit, Reading.program),
        (Schedule.explicit, Reading.program),
        (Schedule.compiler, Reading.scheduled),
    ]
    for outcome in predicted:
        assert outcome.time_us() == outcome.predicted_us[outcome.reading]
    (source,) = read_sources(write(tmp_path, NORMED))
    (by_program,) = predict_sources(
        [source], recognise_clones([str(folder / "autotune")]), (), Reading.program
    )
    assert (by_program.schedule, list(by_program.predicted_us)) == (Schedule.compiler, [Reading.program])


def test_nothing_is_written_into_a_clone_or_imported_here(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, ATTENTION, MATRICES)
    assert not list(folder.rglob("*.pyc"))
    assert not [name for name in sys.modules if name.startswith("nkilib_src")]


def test_a_file_that_no_longer_has_a_mistake_is_taken_as_it_is(tmp_path: Path) -> None:
    finder = Repairing({"nkw_sick": ("x = = 1", "x = 1"), "nkw_sound": ("x = = 1", "x = 1")})
    (tmp_path / "nkw_sick.py").write_text("x = = 1\n")
    (tmp_path / "nkw_sound.py").write_text("x = 2\n")
    (tmp_path / "nkw_other.py").write_text("x = = 1\n")
    values = []
    for name in ("nkw_sick", "nkw_sound"):
        spec = finder.find_spec(name, [str(tmp_path)])
        scope: dict[str, Any] = {}
        exec(spec.loader.get_code(name), scope)
        values.append(scope["x"])
    assert values == [1, 2]
    assert finder.find_spec("nkw_other", [str(tmp_path)]) is None
    assert finder.find_spec("nkw_sick", [str(tmp_path / "none")]) is None


@pytest.mark.slow
def test_a_copy_of_the_process_replies_or_ends() -> None:
    assert run_forked(lambda: {"a": [1, None]}, 60) == {"a": [1, None]}
    assert run_forked(lambda: "x" * 1_000_000, 60) == "x" * 1_000_000  # more than a pipe holds
    assert run_forked(lambda: os._exit(0), 60) is None
    assert run_forked(lambda: 1 / 0, 60) is None
    assert run_forked(lambda: time.sleep(600), 1) is None
    limits = Limits(600, 2**28)
    assert run_forked(lambda: len(bytearray(2**20)), 60, limits) == 2**20
    assert run_forked(lambda: len(bytearray(2**30)), 60, limits) is None


def test_a_folder_that_git_does_not_know_has_no_commit(folder: Path) -> None:
    assert recognise_clones([str(folder / "library")])[LIBRARY].commit == ""
    with pytest.raises(InvalidArgument, match="is not a clone"):
        recognise_clones([str(folder)])


@pytest.mark.skipif(not os.environ.get(CLONE), reason=f"{CLONE} does not name a clone of nki-library")
def test_kernels_of_the_library_run_as_they_stand(tmp_path: Path) -> None:
    """Their times here are no published ones: what is tested is that they run, and the laws of their readings."""
    small = {"heads": 1, "kv_len": 256, "q_len": 256, "head_dim": 128, "lnc": 2, "tp_out": True}
    entries = [
        {**ATTENTION, **small},
        {**ATTENTION, **small, "tp_q": True, "dtype": "float32"},
        {**DECODE, "hidden": 2048, "intermediate": 512},
        {**DECODE, "kernel": "mlp (prefill)", "seq": 512, "hidden": 1024, "intermediate": 448},
        {
            **DECODE,
            "kernel": "mlp (decode), fp8 row-quantised weights, column tiling",
            "hidden": 2048,
            "lnc": 2,
        },
    ]
    predicted = predict_sources(
        read_sources(write(tmp_path, *entries)), recognise_clones([os.environ[CLONE]])
    )
    assert [outcome.reason for outcome in predicted] == [""] * len(entries)
    for outcome in predicted:
        times = outcome.predicted_us
        assert times[Reading.dataflow] <= times[Reading.scheduled] <= times[Reading.program]
        assert outcome.floor_us <= times[Reading.program] <= times[Reading.serial]
