"""Plans of ranks with two physical cores: launches, memory, peaks, collectives, and what the text says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.device import DryDevice, chip
from model.errors import ModelError
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.document import build_document
from model.plan.plan import Plan, Request, make_plan
from model.plan.predict import PassTime, Predictor
from model.plan.sizes import load_model
from model.plan.text import describe_basis, format_plan
from model.runners.contiguous import KernelModel
from nkw.terminal import rendered
from tests.model.folders import TINY
from tests.model.test_plan_parameters import CONFIGS

LNC = "NEURON_LOGICAL_NC_CONFIG"


def plan_tiny(folder: Path, **options: object) -> Plan:
    path = folder / "config.json"
    path.write_text(json.dumps(TINY))
    return make_plan(load_model(path), Request(prompt=16, generate=16, **options))


def names(pass_time: PassTime | None) -> list[str]:
    assert pass_time is not None
    return [kernel.name for kernel in pass_time.kernels]


def test_a_step_on_two_cores_launches_what_they_divide_and_names_what_they_do_not(tmp_path) -> None:
    one, two = (plan_tiny(tmp_path, tp=2, lnc=lnc) for lnc in (1, 2))
    assert names(one.rate.step.predicted) == ["embedding", "decoder_layer_decode", "lm_head"]
    assert names(two.rate.step.predicted) == ["embedding", "attention_block_decode", "mlp", "lm_head"]
    assert {kernel.name: kernel.cores for kernel in two.rate.step.predicted.kernels} == {
        "embedding": 1,
        "attention_block_decode": 2,
        "mlp": 2,
        "lm_head": 2,
    }
    basis = [" ".join(describe_basis(plan)) for plan in (one, two)]
    assert "Ranks are physical cores (LNC 1)." in basis[0] and "On one of" not in basis[0]
    assert "Ranks are logical cores of 2 physical ones (LNC 2)." in basis[1]
    assert "On one of the 2 physical cores of a rank: embedding" in basis[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_of_two_cores_takes_the_time_that_generating_takes(write_model, ranks) -> None:
    folder = write_model(vocab_size=304)
    config = load_config(folder)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), ranks, dtype="float32")
    device = DryDevice("trn2", ranks, lnc=2)
    kernels = KernelModel(config, weights, device, 128, mesh=Mesh(ranks), lnc=2)
    plan = Predictor(config, "trn2", ranks, "float32", 128, lnc=2)
    for run, predicted in (
        (lambda: kernels.prefill([list(range(16))]), plan.predict_prompts(16)),
        (lambda: kernels.decode([5], [16]), plan.predict_step(1)),
    ):
        run()
        launched = device.take_pass()
        assert {len(timed.launch.streams) for timed in launched.launches} == {ranks, 2 * ranks}
        assert predicted.time.program_ns == pytest.approx(launched.prediction().program_ns, rel=1e-3)


def test_a_rank_of_two_cores_has_the_peaks_and_the_memory_of_both(tmp_path) -> None:
    one, two = (plan_tiny(tmp_path, tp=2, lnc=lnc).placement for lnc in (1, 2))
    assert two.peaks.operations_per_s == 2 * one.peaks.operations_per_s
    assert two.peaks.bytes_per_s == 2 * one.peaks.bytes_per_s
    assert two.peaks.memory_bytes == 2 * one.peaks.memory_bytes == 2 * chip("trn2").hbm_bytes_per_core
    assert (one.mesh.copies, two.mesh.copies) == (64, 32)
    assert two.mesh.sequences > 2 * one.mesh.sequences


def test_tp_64_is_the_whole_of_a_trn2_48xlarge_unless_lnc_is_1(monkeypatch) -> None:
    for module in ("plan", "text"):  # rooflines are enough
        monkeypatch.setattr(f"model.plan.{module}.find_unsupported", lambda config: ("anything",))
    monkeypatch.delenv(LNC, raising=False)
    model = load_model(CONFIGS / "llama-3.1-70b.json")
    request = dict(instance="trn2.48xlarge", tp=64)
    full_cores, half = make_plan(model, Request(**request)), make_plan(model, Request(**request, lnc=1))
    assert (full_cores.placement.lnc, full_cores.placement.mesh.copies) == (2, 1)
    assert (half.placement.lnc, half.placement.mesh.copies) == (1, 2)
    text = rendered(format_plan(full_cores))
    assert "trn2.48xlarge: tp 64 of 64 logical cores (LNC 2), 1 copy" in text
    assert "trn2.48xlarge: tp 64 of 128 cores, 2 copies" in rendered(format_plan(half))
    documents = [build_document(plan, "c") for plan in (full_cores, half)]
    assert [document["lnc"] for document in documents] == [2, 1]
    fits = [{fit["instance"]: fit["lnc"] for fit in document["instances"]} for document in documents]
    assert [fit["trn2.48xlarge"] for fit in fits] == [2, 1] and {fit["trn1.32xlarge"] for fit in fits} == {1}


@pytest.mark.parametrize(
    ("variable", "lnc", "instance", "chosen"),
    [
        (None, None, "trn3.3xlarge", 2),
        (None, None, "trn1.2xlarge", 1),
        ("1", None, "trn2.3xlarge", 1),
        ("2", None, "trn2.3xlarge", 2),
        ("2", 1, "trn2.3xlarge", 1),
        ("", None, "trn2.3xlarge", 2),
        (
            *("3", None, "trn2.3xlarge"),
            f"{LNC} is '3'; a rank has 1 or 2 physical cores: set it to one of these, or unset it",
        ),
        ("2", None, "trn1.2xlarge", f"{LNC} is 2, physical cores of a rank; on trn1 set it to 1"),
        (None, 2, "inf2.xlarge", "--lnc is 2, physical cores of a rank; on inf2 set it to 1"),
    ],
)
def test_the_variable_is_the_default_of_the_option(
    tmp_path, monkeypatch, variable, lnc, instance, chosen
) -> None:
    monkeypatch.setattr("model.plan.plan.find_unsupported", lambda config: ("anything",))
    monkeypatch.delenv(LNC, raising=False)
    if variable is not None:
        monkeypatch.setenv(LNC, variable)
    if isinstance(chosen, int):
        assert plan_tiny(tmp_path, instance=instance, lnc=lnc).placement.lnc == chosen
        return
    with pytest.raises(ModelError) as refusal:
        plan_tiny(tmp_path, instance=instance, lnc=lnc)
    assert str(refusal.value) == chosen
