"""`nkw plan --stack`: both terms with their sources, in text and JSON, and what they change."""

from __future__ import annotations

import json

import pytest

from model.commands.options.device import STACKS as NAMES
from model.plan.origin import Confidence
from model.plan.stack_records import STACKS
from tests.model.test_plan_command import printed, refused
from tests.model.test_plan_parameters import GEMMA3N
from tests.model.test_plan_predict import tiny


def test_the_option_names_every_record() -> None:
    assert tuple(STACKS) == NAMES


@pytest.fixture
def rooflines(tmp_path, monkeypatch) -> str:
    """Return a config without kernels, whose plan takes no dry runs."""
    tiny(tmp_path, **GEMMA3N)
    monkeypatch.chdir(tmp_path)
    return "config.json"


def _plan(capsys, *arguments: str) -> dict:
    printed(capsys, *arguments, "--json", "plan.json")
    with open("plan.json") as file:
        return json.load(file)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_names_its_stack_and_both_terms(rooflines, capsys, name) -> None:
    stack = STACKS[name]
    plan = _plan(capsys, rooflines, "--stack", name, "--batch", "4")
    described = plan["stack"]
    assert (described["name"], described["date"]) == (name, stack.date)
    for phase, host in (("first_token", stack.prompt_engine), ("step", stack.step_engine)):
        served = described[phase]
        assert served["engine_ns"] == host.compute_ns(4)
        assert served["program_ns"] == served["device"]["program_ns"] + served["engine_ns"]
    for term in described["terms"].values():
        assert term["source"]
        assert term["confidence"] in {confidence.value for confidence in Confidence}
    rate = next(rate for rate in plan["batches"] if rate["batch"] == 4)
    assert rate["tokens_per_s"] == pytest.approx(4e9 / described["step"]["program_ns"])


def test_a_plan_prints_terms_with_sources_and_that_no_chip_ran_it(rooflines, capsys) -> None:
    text = " ".join(printed(capsys, rooflines).split())
    assert "served by this project's engine" in text
    assert "No chip has run this engine." in text
    assert "engine, a step: 0.18 ms + 0.08 ms a sequence [1]" in text
    assert "[1] measured: CPU time of the engine" in text


def test_a_plan_of_another_stack_says_that_no_run_is_near(rooflines, capsys) -> None:
    text = " ".join(printed(capsys, rooflines, "--stack", "vllm-neuron").split())
    assert "No published run of vLLM on Neuron is near: none was fitted to." in text
    assert "no runs" in text


def test_a_plan_of_a_fitted_stack_prints_published_over_predicted(rooflines, capsys) -> None:
    arguments = [rooflines, "--stack", "transformers-neuronx"]
    text = " ".join(printed(capsys, *arguments, "--instance", "trn1.32xlarge").split())
    assert "0.42..2.15, 0/13 near" in text
    assert "no runs" in " ".join(printed(capsys, *arguments, "--instance", "trn2.48xlarge").split())


def test_a_stack_serves_on_no_accelerator(rooflines, capsys) -> None:
    message = refused(capsys, rooflines, "--accelerator", "h100", "--stack", "nxdi")
    assert "--stack nxdi serves on the cores of an instance, not on an accelerator" in message
    plan = _plan(capsys, rooflines, "--accelerator", "h100")
    assert plan["stack"] is None
    step = plan["batches"][0]["served"]
    assert (step["engine_ns"], step["program_ns"]) == (0.0, plan["batches"][0]["program_ns"])


def test_a_batch_that_does_not_fit_is_served_by_no_stack(rooflines, capsys) -> None:
    arguments = [rooflines, "--stack", "nxdi", "--json", "plan.json", "--batch"]
    printed(capsys, *arguments, "1000000", status=1)
    with open("plan.json") as file:
        plan = json.load(file)
    assert plan["stack"] is None
    assert [rate["served"] is None for rate in plan["batches"]] == [
        not rate["fits"] for rate in plan["batches"]
    ]
    assert "served by NxD Inference" in printed(capsys, rooflines, "--stack", "nxdi", "--batch", "2")
