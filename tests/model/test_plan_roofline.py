"""Rooflines against published figures, and the laws that any roofline obeys."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest

from benchmarks.stacks.shares import plan_shares, publish_shares
from model.device import chip
from model.errors import ModelError
from model.plan import roofline
from model.plan.document import build_document
from model.plan.memory import compute_footprint
from model.plan.origin import Confidence
from model.plan.plan import Request, make_plan
from model.plan.roofline import ACCELERATORS, LEAST, USUAL, Bound, parse_accelerator
from model.plan.sizes import load_model
from tests.model.test_plan_parameters import CONFIGS, COUNTS
from tests.model.test_published_configs import DEEPSEEK_V3_STORED, count_saved_bytes

H100 = ACCELERATORS["h100"]
MODELS = ("llama-2-13b", "deepseek-v3", "mixtral-8x7b", "gemma-3-27b", "mamba-130m", "whisper-tiny")


def model(name: str):
    return load_model(CONFIGS / f"{name}.json")


@pytest.mark.parametrize(
    ("batch", "milliseconds", "tokens_per_s"),
    [(1, "8.02", "124.7"), (64, "23.8", "2689"), (256, "71.9", "3562")],
)
def test_decoding_llama_2_13b_on_an_h100(batch, milliseconds, tokens_per_s) -> None:
    """Published figures, to the digits given: 1,024 tokens a sequence, two bytes a parameter and an element."""
    seconds = roofline.count_decode_work(model("llama-2-13b"), "float16", batch, 1024).compute_seconds(H100)
    assert _digits(seconds * 1e3, milliseconds) == milliseconds
    assert _digits(batch / seconds, tokens_per_s) == tokens_per_s


def _digits(value: float, like: str) -> str:
    return f"{value:.{len(like.partition('.')[2])}f}"


def test_a_step_reads_quantised_weights_as_they_are_stored() -> None:
    """Llama-3.1-8B: one byte for each element of its layers, and four bytes for the scale of each output."""
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    elements = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    quantised = load_model(CONFIGS / "llama-3.1-8b.json", quantization="fp8")
    for count in (roofline.count_decode_work, roofline.count_prefill_work):
        before, after = (count(sizes, "bfloat16", 4, 1024) for sizes in (model("llama-3.1-8b"), quantised))
        assert before.weight_bytes - after.weight_bytes == 32 * (elements - 4 * outputs)
        assert (before.operations, before.cache_bytes) == (after.operations, after.cache_bytes)


def test_a_step_reads_the_stored_bytes_of_the_experts_that_it_uses(tmp_path) -> None:
    """DeepSeek-V3 as published, in blocks of 128 by 128, which kernels read in most matrices."""
    fields = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    del fields["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    before, after = load_model(tmp_path), model("deepseek-v3")
    routed = 58 * 256 * 3 * count_saved_bytes(2048, 7168)
    saved = sum(count * count_saved_bytes(*shape) for shape, count in DEEPSEEK_V3_STORED.items())
    assert compute_footprint(before, "bfloat16", 1, 1).weight_bytes - saved == pytest.approx(
        compute_footprint(after, "bfloat16", 1, 1).weight_bytes, rel=1e-9
    )
    for batch in (1, 32):
        share = 1 - (1 - 8 / 256) ** batch
        works = [roofline.count_decode_work(sizes, "bfloat16", batch, 1024) for sizes in (before, after)]
        assert works[0].weight_bytes - works[1].weight_bytes == pytest.approx(
            saved - routed * (1 - share), rel=1e-9
        )


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_bytes_of_a_step_are_all_weights_and_every_cache(batch) -> None:
    work = roofline.count_decode_work(model("llama-2-13b"), "bfloat16", batch, 1024)
    assert work.weight_bytes == 2 * int(COUNTS["llama-2-13b"])
    assert work.cache_bytes == batch * 1024 * 819_200
    assert work.find_bound(H100) is Bound.bandwidth


def test_operations_of_a_step_are_twice_its_products() -> None:
    work = roofline.count_decode_work(model("llama-2-7b"), "bfloat16", 3, 10)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    attention = 2 * 4096 * 10
    assert work.operations == 2 * 3 * (32 * (layer + attention) + 32000 * 4096)


def test_a_long_prompt_is_bound_by_compute_and_a_short_one_by_bandwidth() -> None:
    bounds = [
        roofline.count_prefill_work(model("llama-2-7b"), "bfloat16", 1, size).find_bound(H100)
        for size in (64, 2048)
    ]
    assert bounds == [Bound.bandwidth, Bound.compute]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_more_work_never_takes_less_time(name, dtype) -> None:
    steps = [
        roofline.count_decode_work(model(name), dtype, batch, 256).compute_seconds(H100)
        for batch in (1, 2, 3, 64, 500)
    ]
    assert steps == sorted(steps)
    prompts = [
        roofline.count_prefill_work(model(name), dtype, 1, size).compute_seconds(H100)
        for size in (1, 2, 100, 448)
    ]
    assert prompts == sorted(prompts)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_never_decodes_slower_than_its_sequences_one_by_one(name) -> None:
    one = roofline.count_decode_work(model(name), "bfloat16", 1, 256).compute_seconds(H100)
    for batch in (2, 64, 500):
        assert (
            roofline.count_decode_work(model(name), "bfloat16", batch, 256).compute_seconds(H100)
            <= batch * one
        )


def test_devices_share_the_work_evenly() -> None:
    work = roofline.count_decode_work(model("llama-2-13b"), "float16", 4, 512)
    assert work.compute_seconds(H100.scale(4)) * 4 == work.compute_seconds(H100)
    assert H100.scale(4).ridge == H100.ridge


def test_a_step_reads_the_experts_it_reaches() -> None:
    mixtral = model("mixtral-8x7b")
    one = roofline.count_decode_work(mixtral, "bfloat16", 1, 1).weight_bytes
    experts = mixtral.parameters["experts"]
    assert one == 2 * (mixtral.total - experts * 6 // 8)
    many = roofline.count_decode_work(mixtral, "bfloat16", 512, 1).weight_bytes
    assert one < many <= 2 * mixtral.total


def test_vision_is_not_read_for_text_and_the_encoder_only_with_the_prompt() -> None:
    gemma, whisper = model("gemma-3-27b"), model("whisper-tiny")
    assert roofline.count_prefill_work(gemma, "bfloat16", 1, 8).weight_bytes == 2 * (
        gemma.total - gemma.parameters["aside"]
    )
    assert roofline.count_prefill_work(whisper, "float32", 1, 8).weight_bytes == 4 * whisper.total
    assert (
        roofline.count_decode_work(whisper, "float32", 1, 8).weight_bytes
        == 4 * whisper.total - 4 * whisper.parameters["aside"]
    )


def test_a_core_has_the_peaks_of_its_record() -> None:
    record = chip("trn2")
    two_bytes, four_bytes = (
        roofline.compute_core_peaks(record, "bfloat16"),
        roofline.compute_core_peaks(record, "float32"),
    )
    assert two_bytes.operations_per_s == 2 * 128 * 128 * record.tensor_clock_ghz * 1e9
    assert two_bytes.bytes_per_s == record.hbm_gb_per_s_per_core * 1e9
    assert four_bytes.operations_per_s * record.matmul_fp32_passes == two_bytes.operations_per_s


def test_an_accelerator_is_named_or_given_by_its_peaks() -> None:
    assert parse_accelerator("H100", "bfloat16") == H100
    assert f"{H100.ridge:.1f}" == "295.2"  # operations per byte
    assert parse_accelerator("989,3.35", "float32") == replace(
        H100, name="989,3.35", memory_bytes=None, source="as given"
    )


@pytest.mark.parametrize(("name", "tera_operations"), [("h100", 67.0), ("a100", 19.5)])
def test_a_known_accelerator_has_the_peak_of_the_dtype(name, tera_operations) -> None:
    known = ACCELERATORS[name]
    assert parse_accelerator(name, "float16") == parse_accelerator(name, "bfloat16") == known
    full = parse_accelerator(name, "float32")
    assert full.operations_per_s == tera_operations * 1e12
    assert (full.bytes_per_s, full.memory_bytes) == (known.bytes_per_s, known.memory_bytes)
    assert full.source.endswith("fp32")


@pytest.mark.parametrize("text", ["", "b9", "989", "989,3.35,80", "0,3", "989,-1", "nan,1", "1e9,1", "inf,1"])
def test_refuses_what_is_no_accelerator(text) -> None:
    with pytest.raises(ModelError, match="accelerator"):
        parse_accelerator(text, "bfloat16")


@pytest.mark.parametrize(
    ("operations", "moved", "resource"), [(989.0, 0.001, "operations"), (0.001, 3.35, "bytes")]
)
def test_a_roofline_is_the_least_reading_and_shares_of_the_peaks_the_others(
    operations, moved, resource
) -> None:
    time = H100.estimate(1e12 * operations, 1e12 * moved)
    assert time.dataflow_ns == pytest.approx(1e9)
    assert time.program_ns == pytest.approx(1e9 / getattr(USUAL, resource))
    assert time.serial_ns == pytest.approx(1e9 / getattr(LEAST, resource))


@pytest.mark.parametrize("reach", [USUAL, LEAST])
def test_shares_of_the_peaks_have_a_source_and_a_confidence(reach) -> None:
    assert "python -m benchmarks.stacks --shares" in reach.origin.source
    assert reach.origin.confidence is Confidence.derived
    assert 0 < LEAST.operations < USUAL.operations < 1
    assert 0 < LEAST.bytes < USUAL.bytes < 1


def test_the_least_shares_are_those_of_the_published_runs() -> None:
    prompts, steps = zip(*publish_shares())
    assert LEAST.operations == round(min(share for share in prompts if share is not None), 2)
    assert LEAST.bytes == round(min(steps), 2)


@pytest.mark.deep
def test_the_usual_shares_are_medians_of_plans() -> None:
    planned = list(plan_shares())
    assert USUAL.operations == round(median(prompt for _, _, prompt, *_ in planned), 2)
    assert USUAL.bytes == round(
        median(share for *_, single, batched in planned for share in (single, batched)), 2
    )


@pytest.mark.parametrize(
    ("hardware", "times"), [({"accelerator": "h100"}, "roofline, at least"), ({}, "dry runs")]
)
def test_the_document_says_which_times_are_rooflines(hardware, times) -> None:
    plan = make_plan(model("qwen3-0.6b"), Request(**hardware, tp=1, prompt=8, generate=1))
    document = build_document(plan, "config.json")
    for phase in (document["first_token"], document["step"]):
        assert phase["times"] == times
        ratio = phase["dataflow_ns"] / phase["roofline_ns"]
        assert (ratio == 1) == (times != "dry runs")
        assert phase["dataflow_ns"] < phase["program_ns"] < phase["serial_ns"]
    shares = document["roofline_shares"]
    assert (shares["usual"]["operations"], shares["least"]["bytes"]) == (USUAL.operations, LEAST.bytes)
    assert shares["least"]["confidence"] == "derived"
    assert ("at least" in document["basis"]) == (times != "dry runs")


def test_operations_of_prompts_are_twice_their_products() -> None:
    """The head takes one token of each prompt, and a token attends to those before it."""
    work = roofline.count_prefill_work(model("llama-2-7b"), "bfloat16", 3, 10)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    attention = 2 * 4096 * (1 + 10) * 10 // 2
    assert work.operations == 2 * 3 * (32 * (10 * layer + attention) + 32000 * 4096)


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama-2-13b", 819_200), ("qwen3-next-80b-a3b", 2 * 12 * 2 * 2 * 256), ("mamba-130m", 0)],
)
def test_a_further_token_adds_keys_and_values_and_no_state(name, size) -> None:
    plan = make_plan(model(name), Request(accelerator="h100", dtype="bfloat16", prompt=8, generate=1))
    assert plan.cache_bytes_per_token == size
