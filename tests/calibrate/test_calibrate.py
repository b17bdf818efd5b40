"""Kernels timed on a chip with other numbers than the record's: `nkw calibrate` finds these numbers and no others."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nkw.errors import InvalidArgument
from nkw.targets import HARDWARE_VARIABLE
from simulate.calibrate.calibration import calibrate, find_elasticities
from simulate.calibrate.measurement import Measurement
from simulate.calibrate.numbers import Parameter
from simulate.cli import main
from simulate.hardware import hardware, use_overlay
from tests.calibrate.measured import SMALL, entries, measured, prediction, times

Capture = pytest.CaptureFixture[str]

KERNELS = (
    *("f32[128,512] 0 512 0 0 0 0", "f32[128,512] 4 512 0 0 0 0", "f32[128,8192] 0 512 0 0 0 0"),
    *("f32[128,512] 0 512 16 0 0 0", "f32[128,512] 0 64 40 0 0 0", "f32[128,512] 0 512 0 12 0 0"),
    *("f32[128,512] 0 64 0 30 0 0", "bf16[128,512] 0 64 0 0 60 0", "f32[128,512] 0 64 0 0 0 10"),
    *("f32[128,512] 0 512 0 0 0 6", "f32[128,512] 2 256 8 8 8 4", "f32[128,512] 0 64 10 10 10 0"),
)
"""DMAs, and chains on Vector, Scalar, Tensor and GpSimd, short and long, alone and together."""
CHANGED = {"vector_clock_ghz": 0.8, "scalar_table_function_sbuf_latency_ns": 1.5}


@pytest.fixture(autouse=True)
def _no_overlay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(HARDWARE_VARIABLE, "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("wild", [1.0, 10.0])
def test_two_numbers_are_found_within_per_cent_and_no_others_whatever_one_wild_time_says(wild: float) -> None:
    measurements = measured(KERNELS, CHANGED)
    measurements[3] = Measurement(
        measurements[3].name, "trn2", wild * measurements[3].measured_ns, 0.0, measurements[3].predict
    )
    calibration = calibrate("trn2", measurements)
    assert {
        str(contradiction.number): contradiction.determined for contradiction in calibration.contradictions
    } == dict.fromkeys(CHANGED, True)
    for contradiction in calibration.contradictions:
        assert contradiction.measured / contradiction.recorded == pytest.approx(
            CHANGED[str(contradiction.number)], rel=0.02
        )
        assert contradiction.after < 0.005 < contradiction.before and contradiction.kernels >= 4
    assert calibration.outliers == ((measurements[3].name,) if wild > 1.0 else ())
    assert calibration.record == hardware("trn2")


@pytest.mark.slow
@pytest.mark.parametrize("wild", [1.0, 8.0])
def test_times_as_predicted_contradict_nothing(wild: float) -> None:
    measurements = measured(KERNELS, {})
    measurements[5] = Measurement(
        measurements[5].name, "trn2", wild * measurements[5].measured_ns, 0.0, measurements[5].predict
    )
    calibration = calibrate("trn2", measurements)
    assert calibration.contradictions == () and calibration.overlay("a test") == {}
    assert calibration.outliers == ((measurements[5].name,) if wild > 1.0 else ())


@pytest.mark.parametrize("seed", range(4))
def test_elasticities_of_few_numbers_among_many_take_few_predictions(seed: int) -> None:
    generator = random.Random(seed)
    numbers = [Parameter(f"number_{index:02}_ns") for index in range(32)]
    truth = {parameter: generator.uniform(0.05, 0.9) for parameter in generator.sample(numbers, 3)}
    counts: list[int] = []

    def growth(some: Sequence[Parameter]) -> float:
        counts.append(len(some))
        return sum(truth.get(parameter, 0.0) for parameter in some)

    assert find_elasticities(growth, numbers) == {number: truth.get(number, 0.0) for number in numbers}
    # Of each that counts at most two groups of every size, halved five times.
    assert len(counts) <= 1 + 3 * 2 * 5 < 32
    assert find_elasticities(growth, []) == {}


@pytest.mark.parametrize(("elasticity", "count"), [(0.0049, 0), (0.0051, 2)])
def test_together_numbers_are_slight_where_each_is(elasticity: float, count: int) -> None:
    numbers = [Parameter("semaphore_ns"), Parameter("vector_clock_ghz")]
    elasticities = find_elasticities(
        lambda some: elasticity * len(some) / 2 if len(some) == 2 else elasticity, numbers
    )
    assert sum(by != 0.0 for by in elasticities.values()) == count
    assert list(elasticities.values()) == ([elasticity, -elasticity] if count else [0.0, 0.0])


@pytest.mark.slow
def test_numbers_that_always_act_together_are_named_and_not_written() -> None:
    calibration = calibrate("trn2", measured(SMALL, {"dma_completion_ns": 2.0}))
    (contradiction,) = calibration.contradictions
    named = {str(number) for number in (contradiction.number, *contradiction.instead)}
    assert not contradiction.determined and {"dma_static_first_ns", "dma_completion_ns"} <= named
    assert calibration.overlay("a test") == {}


@pytest.mark.parametrize("count", [3, 4])
def test_fewer_times_than_four_are_refused(count: int) -> None:
    measurements = measured(SMALL[:count], {})
    if count == 4:
        assert calibrate("trn2", measurements).contradictions == ()
        return
    with pytest.raises(InvalidArgument, match="3 measured times of trn2 can be used, and at least 4 tell"):
        calibrate("trn2", measurements)


@pytest.mark.slow
def test_the_page_shows_the_report_of_a_chip_with_one_slower_number(capsys: Capture) -> None:
    page = (Path(__file__).parents[2] / "docs/calibrate.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    slower = {"scalar_table_function_sbuf_latency_ns": 1.5}
    Path("measured.json").write_text(json.dumps(entries(KERNELS, slower)))
    assert main(["calibrate", "measured.json"]) == 0
    assert capsys.readouterr().out == f"{shown}\n"


@pytest.mark.slow
def test_an_overlay_is_written_that_makes_predictions_what_was_measured(capsys: Capture) -> None:
    Path("measured.json").write_text(json.dumps(entries(KERNELS, CHANGED)))
    assert main(["calibrate", "measured.json", "--out", "overlay.json", "--json", "found.json"]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "vector_clock_ghz: 0.768 instead of 0.96, -20.0%" in report
    assert "overlay: overlay.json, 2 numbers" in report
    written = json.loads(Path("overlay.json").read_text())["trn2"]
    assert set(written) == set(CHANGED)
    assert written["vector_clock_ghz"]["source"].startswith("nkw calibrate of measured.json: ")
    (chip,) = json.loads(Path("found.json").read_text())["chips"]
    assert {contradiction["number"] for contradiction in chip["contradictions"]} == set(written)

    predictions = [prediction(argument) for argument in KERNELS]
    wanted = times(predictions, CHANGED)
    use_overlay("overlay.json")
    assert [prediction() for prediction in predictions] == pytest.approx(wanted, rel=0.005)

    # A second calibration begins with the overlay, has nothing to add, and keeps its numbers.
    assert main(["calibrate", "measured.json", "--hardware", "overlay.json", "--out", "again.json"]) == 0
    again = json.loads(Path("again.json").read_text())["trn2"]
    assert {name: number["value"] for name, number in again.items()} == {
        name: number["value"] for name, number in written.items()
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[", "is no JSON"),
        ("{}", "is neither the folder of a bundle nor a list of measurements"),
        ("[]", "the results contain no usable measurement of a kernel"),
    ],
)
def test_files_without_measurements_are_refused(content: str | None, message: str, capsys: Capture) -> None:
    if content is not None:
        Path("measured.json").write_text(content)
    assert main(["calibrate", "measured.json"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_words_of_the_fidelity_bench_need_a_checkout(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if not (Path(entry) / "benchmarks").is_dir()]
    )
    for name in [module for module in sys.modules if module.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    Path("measured.json").write_text('[{"family": "matmul", "target": "trn2"}]')
    assert main(["calibrate", "measured.json"]) == 2
    assert "run this in the top folder of a checkout" in " ".join(capsys.readouterr().err.split())


def test_the_overlay_does_not_take_the_place_of_a_file_that_is_read(capsys: Capture) -> None:
    Path("measured.json").write_text("[]")
    assert main(["calibrate", "measured.json", "--out", "measured.json"]) == 2
    assert "this command reads that file" in capsys.readouterr().err


WRONG: dict[str, list[Any]] = {
    "kernel": [None, 3, "nowhere.py:kernel", "no colon", "x" * 10_000],
    "shapes": [None, [], "f32[128", "'f32[8,8]", "f32[8,8]", "f32[8,8] 0 0 0 0 0 0 0", "nan[1] 0 0 0 0 0 0"],
    "target": [None, 7, "trn9", "gen5"],
    "cores": [0, 3, True, "1", 1.5],
    "latency_us": [None, 0, -1.0, float("nan"), float("inf"), "3", True, 1e300],
    "measured": [None, "somehow", 3],
    "metrics": [{"spread_us": -1}, {"spread_us": "1"}, {"spread_us": float("nan")}, {"spread_us": True}],
}


@pytest.mark.parametrize("field", WRONG)
def test_an_entry_that_makes_no_sense_is_left_out_with_the_reason(field: str, capsys: Capture) -> None:
    good = entries(SMALL, {})
    bad = [{**good[0], "id": f"bad {number}", field: invalid} for number, invalid in enumerate(WRONG[field])]
    Path("measured.json").write_text(json.dumps([*bad, *good]))
    assert main(["calibrate", "measured.json", "--json", "found.json"]) == 0
    document = json.loads(Path("found.json").read_text())
    assert [entry["name"] for entry in document["skipped"]] == [entry["id"] for entry in bad]
    assert all(entry["why"] and "\n" not in entry["why"] for entry in document["skipped"])
    assert len(document["chips"][0]["kernels"]) == len(SMALL)


def wild(seed: int, capsys: Capture) -> None:
    """Calibrate with entries whose fields have wild values."""
    generator = random.Random(seed)
    good = entries(SMALL[:2], {})
    measurements: list[Any] = [
        entry | {name: generator.choice(values)} for entry in good for name, values in WRONG.items()
    ]
    measurements += generator.sample([None, [], {}, 3, "text", {"family": "kernel"}], generator.randrange(3))
    generator.shuffle(measurements)
    content = json.dumps(measurements)
    if generator.random() < 0.3:
        position = generator.randrange(len(content))
        content = (
            content[:position]
            + generator.choice(['"', "}", "\x00", "9" * 400, "[" * 5000])
            + content[position + 1 :]
        )
    Path("measured.json").write_text(content)
    status = main(["calibrate", "measured.json"])
    captured = capsys.readouterr()
    assert status in (0, 2) and "Traceback" not in captured.err
    assert status == 0 or len(captured.err) < 2000


@pytest.mark.parametrize("seed", range(12))
def test_entries_with_wild_values_give_one_sentence_or_a_calibration(seed: int, capsys: Capture) -> None:
    wild(seed, capsys)


@pytest.mark.deep
def test_two_thousand_files_of_wild_entries_give_one_sentence_or_a_calibration(capsys: Capture) -> None:
    for seed in range(2_000):
        wild(seed, capsys)
