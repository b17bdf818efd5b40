"""Traffic of recordings: each request is a window, whose encoder's dry launches come with its prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.device import DryDevice
from model.engine import SchedulerOptions
from model.errors import ModelError
from model.families import SPEECH, load_config
from model.layers.launch import StepShape
from model.layers.paged import STATES
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.plan.memory import compute_footprint
from model.plan.predict import PassTime
from model.plan.sizes import load_model
from model.plan.stack_records import THIS
from model.runners.contiguous import KernelModel
from model.traffic.clock import serve_pass
from model.traffic.deployment import Deployment, Setup
from model.traffic.workload import Query, Workload
from nkw.commands import main
from tests.model.test_plan_command import refused
from tests.model.whisper_folders import FIELDS, spectrum, write_whisper
from tests.step_shapes import decode_shape, prompt_shape

SETUP = Setup("trn2.3xlarge", "float32", 40, tp=1, replicas=1, options=SchedulerOptions(max_num_seqs=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("traffic") / "whisper")


@pytest.fixture(scope="module")
def deployment(folder: Path) -> Deployment:
    return Deployment(load_model(folder), SETUP)


def passes(deployment: Deployment, *shapes: StepShape) -> list[PassTime]:
    """Return the times of steps of these sizes."""
    pages = {STATES if page_kind.recurrent else None: page_kind.pages for page_kind in deployment.page_kinds}
    predictor = deployment.predictors[0]
    step = predictor.make_paged_step(pages, 16)
    return [predictor.predict_paged(step.resize(shape.sizes)) for shape in shapes]


def served_ns(kernels: PassTime, decoding: int, prompts: int) -> int:
    """Return the time of a pass with the engine's time."""
    return round(serve_pass(THIS, kernels, decoding, prompts).time.program_ns)


def sum_encoder_ns(pass_time: PassTime) -> float:
    """Return the time of the encoder's kernels."""
    return sum(kernel.time.program_ns for kernel in pass_time.kernels if kernel.name.startswith("encoder: "))


@pytest.mark.slow
def test_a_request_alone_takes_its_window_its_prompt_and_its_steps(deployment: Deployment) -> None:
    """A prompt of 4 tokens is padded to 16; the steps read 128 positions, and 128 of the window."""
    ((timeline,),) = (
        unit_run.timelines for unit_run in deployment.serve_unit(Workload((Query(4, 6),), (0,)))
    )
    first, *later = passes(deployment, prompt_shape(1, 16, 128), *[decode_shape(1, 1, 128)] * 5)
    assert timeline.ttft_ns == served_ns(first, 0, 1)
    assert timeline.e2e_ns == served_ns(first, 0, 1) + sum(served_ns(pass_time, 1, 0) for pass_time in later)
    assert sum_encoder_ns(first) > 0 and not any(map(sum_encoder_ns, later))


def test_the_encoder_takes_the_time_that_transcribing_predicts(folder: Path, deployment: Deployment) -> None:
    """`nkw transcribe` launches it dry, with weights of its own; the predictor counts equal blocks."""
    config = load_config(folder, SPEECH)
    device = DryDevice("trn2", 1)
    model = KernelModel(config, shard_weights(config, open_checkpoint(folder, config), 1), device, 128)
    model.encode([spectrum(1)])
    encoder = device.take_pass()
    (first,) = passes(deployment, prompt_shape(1, 16, 128))
    assert sum_encoder_ns(first) == pytest.approx(encoder.prediction().program_ns - encoder.overhead_ns)
    assert sum_encoder_ns(first) == pytest.approx(sum_encoder_ns(deployment.predictors[0].predict_prompts(4)))


def test_windows_wait_for_one_another_and_decode_together(deployment: Deployment) -> None:
    """Of four at one moment each has its first token one window later than the one before."""
    (record,) = deployment.serve_unit(Workload((Query(4, 6),) * 4, (0,) * 4))
    (window,) = passes(deployment, prompt_shape(1, 16, 128))
    step_ns = served_ns(window, 0, 1)
    assert [timeline.ttft_ns for timeline in record.timelines] == [
        step_ns * number for number in (1, 2, 3, 4)
    ]
    (together,) = passes(deployment, decode_shape(4, 1, 128))
    assert record.timelines[-1].e2e_ns == 4 * step_ns + 5 * served_ns(together, 4, 0)


@pytest.mark.parametrize("tp", [1, 3])
def test_slots_hold_the_keys_and_values_of_a_window(folder: Path, tp: int) -> None:
    """3 heads of 12 elements in 2 layers: 16 positions of a page, and all of a window in a slot."""
    model = load_model(folder)
    pages, slots = Deployment(model, replace(SETUP, tp=tp)).page_kinds
    assert (pages.recurrent, slots.recurrent) == (False, True)
    position_bytes = 2 * 2 * 3 // tp * 12 * 4
    assert (pages.page_bytes, slots.page_bytes) == (
        16 * position_bytes,
        FIELDS["max_source_positions"] * position_bytes,
    )
    slot_bytes = compute_footprint(model, "float32", tp, 40).cache_bytes_per_sequence
    assert slot_bytes == (40 + FIELDS["max_source_positions"]) * position_bytes


@pytest.mark.slow
def test_prompts_on_replicas_of_their_own_hand_windows_over(folder: Path) -> None:
    separate = Deployment(load_model(folder), replace(SETUP, replicas=2, prefill_replicas=1))
    prompts, decoding = separate.serve(Workload((Query(4, 6),) * 5, (0,) * 5))
    assert len(decoding.timelines) == 5 and not prompts.timelines
    assert all(timeline.moved_ns > timeline.first_token_ns for timeline in decoding.timelines)


def test_drafts_are_refused(folder: Path) -> None:
    options = SchedulerOptions(max_num_seqs=4, speculative_tokens=2)
    assert Deployment(load_model(folder), SETUP).setup.options.prompts_at_once == 1
    with pytest.raises(ModelError, match="drafts are for texts; this model transcribes speech"):
        Deployment(load_model(folder), replace(SETUP, options=options))


@pytest.mark.slow
def test_the_command_says_how_much_speech_is_heard(folder: Path, capsys: Any, tmp_path: Path) -> None:
    arguments = (
        "--instance",
        "trn2.3xlarge",
        "--users",
        "3",
        "--requests",
        "9",
        "--output-lengths",
        "5",
        "--compare",
    )
    path = tmp_path / "out.json"
    assert main(["traffic", str(folder), *arguments, "--replicas", "2", "--json", str(path)]) == 0
    text, document = capsys.readouterr().out, json.loads(path.read_text())
    assert "slots of windows" in text and "each request has 0.4 s" in text
    assert document["window_s"] == 0.4 and document["run"]["prompt_tokens"] == 9 * 4
    names = [variant["name"] for variant in document["variants"]]
    assert "static batching" in names and "whole prompts" not in names and "no prefix cache" not in names
    assert max(map(len, text.splitlines())) <= 80
    long = refused(capsys, str(folder), "--prompt-lengths", "36", "--output-lengths", "5", command="traffic")
    assert "no request fits into the 40 tokens that the model takes" in long
