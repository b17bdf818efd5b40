"""Serving stacks: the law of device and engine time, and the published runs behind the records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.stacks.__main__ import fit_half, list_runs, predict_all
from benchmarks.stacks.entries import Half, read_published
from benchmarks.stacks.fit import predict_device
from benchmarks.stacks.host import fit_line
from model.plan.dry import Time
from model.plan.origin import Confidence, Origin
from model.plan.predict import LaunchTime, PassTime
from model.plan.stack_records import NXDI, OPTIMUM, STACKS, THIS, TRANSFORMERS_NEURONX, VLLM_NEURON
from model.plan.stacks import HostTime, PublishedRun, Ratios, Scale

ORIGIN = Origin("a test", Confidence.assumed)
PROMPTS = PassTime(
    Time.exact(10.0),
    (
        LaunchTime("attention_prefill", 2, Time.exact(100.0), 50.0),
        LaunchTime("mlp", 2, Time.exact(1000.0), 800.0),
    ),
)
RUN = PublishedRun(2, 7.0, 4, 1024, 1.1, 0.9, 1.0)


@pytest.mark.parametrize("name", STACKS)
def test_every_term_has_a_source_and_a_confidence(name) -> None:
    terms = dict(STACKS[name].list_terms())
    assert len(terms) == 10
    for term in terms.values():
        assert len(term.origin.source) > 20
        assert isinstance(term.origin.confidence, Confidence)


def test_a_step_is_scaled_device_time_and_engine_time_by_slots() -> None:
    stack = replace(THIS, decode_scale=Scale(1.5, ORIGIN), step_engine=HostTime(2.0, 0.25, ORIGIN))
    served = stack.serve_step(Time(1e6, 2e6, 3e6), slots=8)
    assert served.device == Time(1.5e6, 3e6, 4.5e6)
    assert served.engine_ns == 4e6
    assert served.time == Time(5.5e6, 7e6, 8.5e6)


def test_prompts_scale_attention_apart_from_other_kernels() -> None:
    stack = replace(
        THIS,
        prompt_scale=Scale(2.0, ORIGIN),
        attention_scale=Scale(10.0, ORIGIN),
        prompt_engine=HostTime(1.0, 0.5, ORIGIN),
    )
    served = stack.serve_prompts(PROMPTS, prompts=4)
    assert served.device == Time.exact(2 * 1010.0 + 10 * 100.0)
    assert served.engine_ns == 3e6


@pytest.mark.parametrize(
    ("share", "device_ns"), [(0.5, 1700.0), (0.765, 1111.1111), (0.9, 1110.0), (None, 1110.0)]
)
def test_prompts_reach_at_most_their_share_of_the_peaks(share, device_ns) -> None:
    served = replace(THIS, prompt_share=Scale(share, ORIGIN)).serve_prompts(PROMPTS, prompts=1)
    assert served.device.program_ns == pytest.approx(device_ns)


def test_a_roofline_is_stretched_to_the_share_of_the_peaks() -> None:
    roofline = Time(1e6, 2e6, 6e6)
    assert NXDI.serve_roofline(roofline, prompts=1).device == Time(1e6 / 0.37, 1e6 / 0.37, 6e6)
    assert THIS.serve_roofline(roofline, prompts=1).device == roofline


@pytest.mark.parametrize(
    ("tokens", "padded"), [(1, 128), (128, 128), (129, 256), (4096, 4096), (4097, 5000), (5000, 5000)]
)
def test_buckets_are_powers_of_two_up_to_the_sequence_length(tokens, padded) -> None:
    assert VLLM_NEURON.pad_prompt(tokens, 5000) == padded
    assert VLLM_NEURON.pad_cache(tokens, 5000) == padded


@pytest.mark.parametrize("tokens", [1, 4999, 5000])
def test_optimum_pads_to_the_sequence_length_and_this_engine_to_its_own_buckets(tokens) -> None:
    assert OPTIMUM.pad_prompt(tokens, 5000) == OPTIMUM.pad_cache(tokens, 5000) == 5000
    assert THIS.pad_prompt(tokens, 5000) == THIS.pad_cache(tokens, 5000) == tokens


@pytest.mark.parametrize(
    ("parameters", "batch", "prompt", "is_near"),
    [
        (7.0, 4, 1024, True),
        (28.0, 1, 256, True),
        (28.1, 1, 256, False),
        (28.0, 17, 256, False),
        (28.0, 16, 4096, True),
        (28.0, 16, 4097, False),
    ],
)
def test_runs_are_near_within_a_factor_of_four(parameters, batch, prompt, is_near) -> None:
    assert RUN.is_near(parameters, batch, prompt) == is_near


def test_ratios_are_of_all_runs_on_a_generation_and_count_the_near_ones() -> None:
    far = replace(RUN, prompt=8192, ttft=0.5)
    elsewhere = replace(RUN, generation=3, ttft=7.0)
    stack = replace(THIS, runs=(RUN, far, elsewhere))
    for target in ("trn1", "inf2"):
        assert stack.find_ratios("ttft", target, 7.0, 4, 1024) == Ratios(0.5, 1.1, runs=2, near=1)
    assert stack.find_ratios("ttft", "trn2", 7.0, 4, 1024) == Ratios(7.0, 7.0, runs=1, near=1)
    assert stack.find_ratios("ttft", "trn3", 7.0, 4, 1024) is None


def test_the_engine_of_this_project_is_the_fastest_and_host_sampling_the_slowest() -> None:
    steps = {name: stack.step_engine.compute_ns(8) for name, stack in STACKS.items()}
    assert min(steps, key=steps.__getitem__) == "this"
    assert max(steps, key=steps.__getitem__) == "optimum"
    assert 3e6 <= steps["vllm-neuron"] <= 8e6


def test_published_runs_are_split_by_model_and_instance() -> None:
    published = read_published()
    halves: dict[tuple[str, str], set[Half]] = {}
    for run in published.runs:
        if run.half is not Half.apart:
            halves.setdefault((run.model, run.instance), set()).add(run.half)
    assert all(len(half) == 1 for half in halves.values())
    assert [sum(run.half is half for run in published.runs) for half in Half] == [13, 18, 4]


def test_runs_on_trn2_are_predicted_on_64_logical_cores(monkeypatch) -> None:
    predictors: list[tuple[object, ...]] = []

    class NoPredictor:
        def __init__(
            self, config: object, instance: str, ranks: int, dtype: str, context: int, lnc: int
        ) -> None:
            predictors.append((instance, ranks, lnc))
            raise NotImplementedError

    monkeypatch.setattr("benchmarks.stacks.fit.Predictor", NoPredictor)
    for run in read_published().runs:
        if run.half is Half.apart:
            with pytest.raises(NotImplementedError):
                predict_device(run)
    assert predictors == [("trn1.32xlarge", 32, 1)] * 2 + [("trn2.48xlarge", 64, 2)] * 2


def test_every_other_entry_has_a_reason() -> None:
    published = read_published()
    reasons = dict(published.excluded)
    assert len(published.runs) + len(reasons) == 84
    assert sum(reason == "int8 weights" for reason in reasons.values()) == 9
    assert sum("of what its own times give" in reason for reason in reasons.values()) == 5
    assert all(reasons.values())


def test_the_record_has_the_runs_of_the_fitted_half() -> None:
    fitted = [run for run in read_published().runs if run.half is Half.fitted]
    assert [(run.batch, run.prompt) for run in fitted] == [
        (run.batch, run.prompt) for run in TRANSFORMERS_NEURONX.runs
    ]


def test_a_line_is_found_again_from_times_by_slots() -> None:
    base, slot = fit_line({slots: 0.2 + 0.05 * slots for slots in (1, 4, 16)})
    assert (base, slot) == pytest.approx((0.2, 0.05))


@pytest.mark.deep
def test_the_record_has_the_constants_and_runs_of_the_fit() -> None:
    times = predict_all()
    stack = fit_half(times)
    assert replace(stack, runs=list_runs(times, stack)) == TRANSFORMERS_NEURONX
