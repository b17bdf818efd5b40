"""The fidelity bench: measurements are read, matched by their fields, predicted the same every time, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.bench import build_rows, outcomes
from benchmarks.fidelity.builders import build
from benchmarks.fidelity.case import NotCovered, Quantity, chip_of, dtype_of, measured_us, quantity_of
from benchmarks.fidelity.entry import Entry, read_entries
from benchmarks.fidelity.predict import predict
from benchmarks.fidelity.table import kendall, ladders, quantile, text
from nkw.errors import InvalidArgument
from simulate.hardware import Hardware, hardware
from simulate.timing import Reading

FILE = Path(__file__).parent / "data" / "measurements.json"


def entries() -> dict[str, Entry]:
    return {entry.id: entry for entry in read_entries(FILE)}


def test_every_entry_is_predicted_or_has_a_reason() -> None:
    outcomes_by_name = {outcome.entry.id: outcome for outcome in outcomes(read_entries(FILE))}
    assert [name for name, outcome in outcomes_by_name.items() if outcome.covered] == ["a", "b", "c", "e"]
    assert (
        outcomes_by_name["d"].reason
        == "family 'e2e' has no kernel: it is not the time of one kernel on a core"
    )
    for outcome in outcomes_by_name.values():
        if outcome.predicted_us is not None:
            times = outcome.predicted_us
            assert times[Reading.dataflow] <= times[Reading.scheduled] <= times[Reading.program]
            assert outcome.floor_us <= times[Reading.program] <= times[Reading.serial]
            assert outcome.guessed_share is not None and -1.0e-9 <= outcome.guessed_share <= 1.0 + 1.0e-9


def test_a_matmul_is_read_off_at_its_issue_interval() -> None:
    chip = hardware("trn2")
    predicted = predict(build(entries()["a"])).times_us[Reading.program]
    interval_ns = (512 + chip.matmul_issue_overhead_cycles) / chip.tensor_clock_ghz
    assert predicted * 1000 == pytest.approx(interval_ns)


def test_a_collective_is_its_latency_and_payload() -> None:
    chip = hardware("trn1")
    predicted = predict(build(entries()["e"])).times_us[Reading.program] * 1000
    wire_ns = 4096 / chip.collective_mesh_gb_per_s[2]
    assert predicted == pytest.approx(chip.collective_latency_ns[2] + wire_ns + chip.dma_static_trigger_ns)


@pytest.mark.parametrize("descriptors", [1, 127, 128, 129, 535, 536, 3130])
def test_a_trigger_of_hardware_descriptors_has_as_many_as_are_counted(descriptors: int) -> None:
    chip = hardware("trn2")
    size = f"{descriptors * 754 / 1e6} MB"
    entry = replace(
        entries()["a"],
        kernel="DMA_DIRECT2D",
        shapes=size,
        metrics={"descriptors": descriptors},
        measured="start to end",
    )
    beyond = max(descriptors - chip.dma_hwdge_descriptors_free, 0) * chip.dma_hwdge_descriptor_ns
    time_us = predict(build(entry)).times_us[Reading.program]
    assert time_us * 1000 == pytest.approx(chip.dma_hwdge_trigger_ns + beyond)


def test_two_cores_meet_in_every_reading() -> None:
    barrier = replace(
        entries()["a"],
        kernel="core barrier between two cores",
        measured="device trace, single instruction start to end",
    )
    times = predict(build(barrier)).times_us
    assert times[Reading.dataflow] <= times[Reading.scheduled] <= times[Reading.program]


def test_matching_does_not_look_at_the_id_the_source_or_the_time() -> None:
    for entry in entries().values():
        if entry.family == "e2e":
            continue
        other = replace(entry, id="other", source="elsewhere", latency_us=1.0)
        assert predict(build(other)).times_us == predict(build(entry)).times_us


def test_matching_looks_at_shapes_dtype_and_target() -> None:
    entry = entries()["b"]
    time = predict(build(entry)).times_us[Reading.program]
    longer = replace(entry, shapes="M x K x N = 256x128x512")
    assert predict(build(longer)).times_us[Reading.program] > time
    narrower = replace(entry, dtype="bf16")
    assert predict(build(narrower)).times_us[Reading.program] < time
    elsewhere = replace(entry, target="gen2")
    assert predict(build(elsewhere)).times_us[Reading.program] != time


def test_a_profile_holds_the_start_and_end_of_the_kernel_that_a_benchmark_leaves_out() -> None:
    entry, chip = entries()["b"], hardware("trn2")
    profiled = replace(entry, measured="device, profiler total_time (includes kernel preamble and tail)")
    assert (quantity_of(entry), quantity_of(profiled)) == (Quantity.benchmark, Quantity.profiler)
    more = chip.kernel_start_ns + chip.kernel_end_ns - chip.benchmark_overhead_ns
    times = [predict(build(variant)).times_us[Reading.program] * 1000 for variant in (entry, profiled)]
    assert times[1] - times[0] == pytest.approx(more)


def test_a_time_may_stand_in_the_metrics() -> None:
    entry = entries()["c"]
    assert measured_us(entry, chip_of(entry)) == 30.0
    subtracted = replace(entry, latency_us=150.0, notes="subtract about 137 us for launch and read-back")
    assert measured_us(subtracted, chip_of(entry)) == 13.0
    with pytest.raises(NotCovered, match="gives no time"):
        measured_us(replace(entry, metrics={}), chip_of(entry))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"target": "gen9"}, "names no single generation"),
        ({"shapes": "large"}, "do not give M x K x N"),
        ({"dtype": "fp3"}, "is not one the builders know"),
        ({"measured": "by eye"}, "no time of a kernel on the device"),
        ({"family": "weather"}, "has no kernel"),
    ],
)
def test_refuses_what_no_builder_stands_for(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(NotCovered, match=reason):
        build(replace(entries()["b"], **changed))


def test_more_ranks_than_any_instance_has_are_not_covered() -> None:
    rendezvous = replace(entries()["b"], family="collective", kernel="all-reduce", shapes="4096 B total")
    assert len(build(replace(rendezvous, cores=1152)).runs[0].arguments) == 1152
    for cores in (1153, 10**9):
        with pytest.raises(
            NotCovered, match=f"{cores:,} ranks; the largest instance on record has 1,152 cores"
        ):
            build(replace(rendezvous, cores=cores))


def test_a_variant_that_only_its_speed_up_tells_apart_is_not_covered() -> None:
    plain = replace(entries()["b"], family="matmul", kernel="lhsT @ rhs", shapes="128 x 128 x 512")
    time = predict(build(plain)).times_us[Reading.program]
    told = replace(plain, kernel="lhsT @ rhs (optimised variant found by search, 1.250x faster)")
    measured = replace(plain, metrics={"ratio_to_baseline": 1.25})
    for faster in (told, measured):
        with pytest.raises(NotCovered, match="by its speed-up alone"):
            build(faster)
    slower = replace(plain, metrics={"ratio_to_baseline": 0.5})
    assert predict(build(slower)).times_us[Reading.program] == time


@pytest.mark.parametrize(
    ("kernel", "shapes", "dtype", "term"),
    [
        ("EVENT_SEMAPHORE, condition met", "-", "-", lambda chip: chip.semaphore_ns),
        ("LDWEIGHTS, stationary 128x128", "128x128", "bf16", lambda chip: chip.load_weights_latency_ns),
        ("LDWEIGHTS for an fp32 matmul", "128x128", "fp32", lambda chip: chip.load_weights_fp32_latency_ns),
        ("one iteration of a device loop", "-", "-", lambda chip: chip.device_loop_iteration_ns),
        (
            "MATMUL duration, fp32 half-product",
            "moving free size 512",
            "fp32",
            lambda chip: 2 * 512 / chip.tensor_clock_ghz + chip.matmul_latency_ns,
        ),
    ],
)
def test_terms_that_no_event_shows_alone_are_read_from_the_model(
    kernel: str, shapes: str, dtype: str, term: Callable[[Hardware], float]
) -> None:
    entry = replace(
        entries()["a"], kernel=kernel, shapes=shapes, dtype=dtype, measured="single instruction start to end"
    )
    times = predict(build(entry)).times_us
    assert times == dict.fromkeys(Reading, pytest.approx(term(hardware("trn2")) / 1000))


def test_an_array_at_half_rate_takes_twice_as_long() -> None:
    entry = entries()["a"]
    warm = predict(build(entry)).times_us[Reading.program]
    cold = predict(build(replace(entry, kernel="nc_matmul back to back, half rate"))).times_us[
        Reading.program
    ]
    assert cold == pytest.approx(2 * warm)


def test_descriptors_of_one_engine_queue_up_behind_each_other() -> None:
    entry = replace(entries()["a"], family="dma", kernel="one descriptor on one DMA engine", shapes="4096 B")
    chip = hardware("trn2")
    alone = predict(build(entry)).times_us[Reading.program] * 1000
    assert alone == pytest.approx(chip.dma_descriptor_ns + 4096 / chip.dma_engine_bytes_per_ns)
    eight = predict(build(replace(entry, shapes="32 KiB"))).times_us[Reading.program] * 1000
    assert eight == pytest.approx(8 * alone)


FUSED = "fused decode MoE: RMSNorm, router, top-8, expert MLPs; kernels"
ATTENTION = "decode attention block, one token: QKV projections, output projection"


def program_us(entry: Entry) -> float:
    return predict(build(entry), (Reading.program,), Reading.program, probe=False).times_us[Reading.program]


def decode_entry(kernel: str, shapes: str, family: str = "moe", **fields: object) -> Entry:
    told = {"kernel": kernel, "shapes": shapes, "family": family, "dtype": "bf16", "cores": 2} | fields
    return replace(entries()["b"], **told)


@pytest.mark.parametrize("inner", [127, 128, 129, 192])
def test_a_fused_mixture_has_fewer_waits_with_more_sets_of_tiles(inner: int) -> None:
    shapes = f"T=1, H=512, I={inner}, E=16, K=8, LNC=2"
    four = program_us(decode_entry(f"{FUSED}; redundant memsets removed", shapes))
    two = program_us(decode_entry(f"{FUSED}; four waves of two experts, two buffer sets", shapes))
    one = program_us(decode_entry(f"{FUSED}; library implementation", shapes))
    assert four < two < one


@pytest.mark.parametrize("count", [127, 128, 129])
def test_a_router_that_comes_in_one_prepared_load_shortens_a_fused_mixture(count: int) -> None:
    shapes = f"T=1, H=2048, I=192, E={count}, K=8, LNC=2"
    readings = (Reading.program, Reading.serial)
    four, one = (
        predict(
            build(decode_entry(f"{FUSED}; {step}", shapes)), readings, Reading.program, probe=False
        ).times_us
        for step in ("redundant memsets removed", "one router load")
    )
    # In program order the router's load is hidden: the critical path takes as long with one as with four.
    assert one[Reading.serial] < four[Reading.serial] and one[Reading.program] <= four[Reading.program]


@pytest.mark.parametrize(
    "step",
    ["before each matmul", "fused silu", "quantisation added", "7-step shuffle reduction", "scales packed"],
)
def test_every_step_of_a_fused_mixture_with_narrow_weights_has_a_kernel(step: str) -> None:
    shapes = "T=1, H=512, I=192, E=16, K=8, LNC=2"
    assert program_us(decode_entry(f"{FUSED}, fp8 expert weights; {step}", shapes, dtype="fp8 weights")) > 0.0


@pytest.mark.parametrize("inner", [127, 128, 129])
def test_a_mixture_asks_for_as_many_dmas_as_it_says(inner: int) -> None:
    chip, kernel = hardware("trn2"), "mixture-of-experts decode, one token; gate/up rows loaded, {} DMAs"
    shapes = f"T=1, H=512, I={inner}, E=16, K=8"
    other_dmas = 8 * 4 + 4 + 8 + 1 + 4  # gate and up, the token, the weights, the indices, what is stored
    down = 8 * -(-inner // 128)
    less, more = (
        program_us(decode_entry(kernel.format(other_dmas + dmas_per_row * down), shapes, cores=1))
        for dmas_per_row in (1, 4)
    )
    each_us = chip.dma_swdge_gpsimd_ns / 1000
    assert 2 * down * each_us < more - less < 4 * down * each_us
    told = f"{kernel.format(other_dmas + down)}; token as stationary operand"
    assert program_us(decode_entry(told, shapes, cores=1)) > 0.0


def test_slots_of_several_pairs_read_less_than_pairs_do() -> None:
    shapes = "tokens={}, top-8 of 16, H=512, 128 gate/up and 64 down rows"
    pairs = "selected-expert MoE, one indirect load of an expert block per pair"
    once = "selected-expert MoE, each selected expert loaded once per call"

    def moved(kernel: str, tokens: int) -> tuple[float, float]:
        entry = decode_entry(kernel, shapes.format(tokens), target="gen2", dtype="fp8 weights", cores=1)
        prediction = predict(build(entry), (Reading.program,), Reading.program, probe=False)
        return prediction.floor_us, prediction.times_us[Reading.program]

    assert moved(once, 15) == moved(pairs, 15)
    assert moved(once, 16)[0] < moved(pairs, 16)[0]


def test_the_bytes_read_tell_how_an_attention_block_is_divided() -> None:
    shapes = "B=1, H=512, 4 query heads, d=128, KV length 256"
    one, cache = 2 * 128 * 512, 4 * 128 * 256
    once = 10 * one + cache

    def block(step: str, read: float, cores: int) -> float:
        metrics = {"hbm_read_MB": read / 1.0e6}
        return program_us(
            decode_entry(f"{ATTENTION}; {step}", shapes, "decode-layer", metrics=metrics, cores=cores)
        )

    plain = block("tile-wise", once, 1)
    assert block("tile-wise", once + 4 * one, 1) > plain  # keys and values projected two times more
    halves = block("tile-wise", 2 * (4 * one + cache + 2 * one), 2)
    repeated = block("tile-wise", 2 * (6 * one + cache + 2 * one), 2)
    assert halves < repeated < plain
    assert block("row-wide", once, 2) < block(
        "row-wide", once, 1
    )  # prepared rings on the one core that works


def test_predictions_are_the_same_every_time() -> None:
    first, second = (build_rows(outcomes(read_entries(FILE))) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_low_confidence_is_shown_but_does_not_count() -> None:
    predicted = outcomes(read_entries(FILE))
    table = text(predicted, held_out=True)
    assert "| transpose | gen2 | 1 | 1 | | | | |" in table
    assert "| transpose | c |" not in table
    assert "Below the physical floor: none." in table


def test_a_ladder_is_one_kernel_over_shapes() -> None:
    rungs = [
        replace(entries()["b"], id=str(m), shapes=f"M x K x N = {m}x128x512", latency_us=float(m))
        for m in (128, 256, 384, 512)
    ]
    predicted = outcomes(rungs)
    (members,) = ladders(predicted).values()
    assert len(members) == 4
    assert "| 4 | 1.00 |" in text(predicted, held_out=True)
    assert "0 of 1 ladders lie below 0.6." in text(predicted, held_out=True)
    assert ladders(predicted[:3]) == {}


def test_ladders_out_of_order_and_without_one_are_named() -> None:
    rungs = outcomes(
        [
            replace(entries()["b"], id=str(m), shapes=f"M x K x N = {m}x128x512", latency_us=float(m))
            for m in (128, 256, 384, 512)
        ]
    )
    times = [rung.measured_us for rung in rungs]
    backwards = [replace(rung, measured_us=time) for rung, time in zip(rungs, reversed(times))]
    report = text(backwards, held_out=True)
    assert "1 of 1 ladders lie below 0.6: " in report
    assert "(-1.00)." in report
    alike = [replace(rung, predicted_us=rungs[0].predicted_us) for rung in rungs]
    report = text(alike, held_out=True)
    assert "0 of 1 ladders lie below 0.6." in report
    assert "1 of the 1 have no order, because all their predictions are equal." in report


def test_kendall_and_quantiles_of_small_lists() -> None:
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1.0
    assert kendall([(1, 3), (2, 2), (3, 1)]) == -1.0
    assert kendall([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)
    assert quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.9) == pytest.approx(4.6)
    assert quantile([7.0], 0.9) == 7.0


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is no JSON"), ("[" * 100_000, "is no JSON"), ("{}", "holds a dict, not a list")],
    ids=["a brace", "a hundred thousand brackets", "an object"],
)
def test_refuses_a_file_that_is_no_list_of_measurements(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=words):
        read_entries(path)
    path.write_text("[]")
    assert read_entries(path) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cores": 0}, "cores is 0, not a count"),
        ({"cores": "two"}, "cores is 'two', not a count"),
        ({"latency_us": -1}, "latency_us is -1, not a time or null"),
        ({"latency_us": 5e-324}, "latency_us is 5e-324, no time of a kernel: 0.0001 to 1e[+]12"),
        ({"latency_us": 10**13}, "latency_us is 10000000000000, no time of a kernel"),
        ({"latency_us": "fast"}, "latency_us is 'fast', not a time or null"),
        ({"confidence": "sure"}, "confidence is 'sure', not high, medium, low"),
        ({"metrics": [1]}, r"metrics is \[1\], not an object"),
        ({"family": None}, "family is not given"),
        ({"shapes": 7}, "do not give M x K x N"),
        ({"kernel": {}}, "neither one launch nor two"),
    ],
)
def test_a_field_that_makes_no_sense_costs_its_entry_alone_the_prediction(
    tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    rows = [row for row in json.loads(FILE.read_text()) if row["id"] in "ab"]
    path = tmp_path / "measurements.json"
    path.write_text(json.dumps([*rows, rows[1] | changed, "no object", {}]))
    predicted = outcomes(read_entries(path), (), probe=False)
    assert [outcome.covered for outcome in predicted] == [True, True, False, False, False]
    assert re.search(words, predicted[2].reason)
    assert predicted[3].reason.startswith("it is a str, not an object")


def test_fields_that_say_nothing_may_be_absent(tmp_path: Path) -> None:
    rows = [row for row in json.loads(FILE.read_text()) if row["id"] in "ab"]
    for name in ("id", "source", "instance", "confidence", "cores", "notes"):
        rows[1].pop(name, None)
    path = tmp_path / "measurements.json"
    path.write_text(json.dumps(rows))
    complete, bare = outcomes(read_entries(FILE)[1:2], ()), outcomes(read_entries(path)[1:], ())
    assert complete[0].predicted_us == bare[0].predicted_us


@pytest.mark.parametrize("same", ["FP32", "float32", "f32", "fp32 with bf16 matmul"])
def test_a_dtype_has_many_names(same: str) -> None:
    entry = entries()["b"]
    assert (
        dtype_of(replace(entry, dtype=same)) == dtype_of(entry) != dtype_of(replace(entry, dtype="bfloat16"))
    )


@pytest.mark.parametrize(("target", "name"), [("trn2", "trn2"), ("Trn1.32xlarge", "trn1"), ("gen4", "trn3")])
def test_a_chip_may_be_named_by_its_instance(target: str, name: str) -> None:
    assert chip_of(replace(entries()["b"], target=target)).name == name


def test_the_command_prints_the_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["--measurements", str(FILE), "--json", str(out), "--family", "instr"]) == 0
    assert "| instr | gen3 | 1 | 1 |" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())
    assert row["id"] == "a" and row["covered"] and set(row["predicted_us"]) == {r.value for r in Reading}
    assert row["time_us"] == row["predicted_us"][row["reading"]]
    assert row["error"] == row["time_us"] / row["measured_us"] - 1.0
    assert main(["--measurements", str(FILE), "--json", str(out), "--family", "mlp", "--quick"]) == 0
    (quick,) = json.loads(out.read_text())
    assert quick["reading"] == "scheduled" and list(quick["predicted_us"]) == ["scheduled"]
    assert main(["--measurements", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_without_a_file_the_published_measurements_of_the_checkout_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = json.loads((Path(__file__).parents[2] / "notebooks" / "published.json").read_text())
    out = tmp_path / "out.json"
    assert main(["--quick", "--family", "instr", "--json", str(out)]) == 0
    assert [row["id"] for row in json.loads(out.read_text())] == [
        row["id"] for row in published if row["family"] == "instr"
    ]
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["--sources", str(tmp_path)])
    assert left.value.code == 2
    assert "--sources needs --measurements FILE" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "out.json", "No such file or directory"),
    ):
        assert main(["--measurements", str(FILE), "--json", str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"error: [NKW-FIDELITY-FILE] the results cannot be written to {path}: {why}\n"
