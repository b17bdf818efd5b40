"""The policy that chooses a mesh, and that plans, their tables of meshes, and traffic have one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from model.device import find_instance
from model.engine import SchedulerOptions
from model.plan import policy
from model.plan.dry import Time
from model.plan.plan import Request, make_plan
from model.plan.policy import Choice, Question
from model.plan.predict import PassTime
from model.plan.service_level import ServiceLevel
from model.plan.text import format_plan
from model.traffic.deployment import Setup
from model.traffic.lengths import Lengths
from model.traffic.traffic import Request as TrafficRequest
from model.traffic.traffic import _judge_meshes
from model.traffic.workload import draw_poisson_arrivals, draw_queries
from nkw.terminal import rendered
from tests.model.test_plan_meshes import model
from tests.model.test_plan_parameters import CONFIGS

MODELS = (
    *("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "gemma-2-9b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"),
)
ANY = ServiceLevel()
STEPS = {8: 21.3e6, 16: 11.5e6, 32: 7.0e6, 64: 5.4e6, 128: 4.6e6}
"""Times of steps in ns by the number of ranks."""


class Rooflines:
    """A predictor whose times follow from the ranks; it records what it was asked."""

    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, *sizes: Any, **formats: Any) -> None:
        _, _, self.tp, *_ = sizes

    def predict_step(self, batch: int) -> PassTime:
        self.calls.append(("step", self.tp))
        return PassTime(Time.exact(100e6 / self.tp + 0.5e6 * self.tp), ())

    def predict_prompts(self, tokens: int, batch: int = 1) -> PassTime:
        self.calls.append(("prompts", self.tp))
        return PassTime(Time.exact(1e6 * tokens / self.tp), ())


@pytest.fixture
def rooflines(monkeypatch) -> list[tuple[str, int]]:
    monkeypatch.setattr(policy, "Predictor", Rooflines)
    Rooflines.calls.clear()
    return Rooflines.calls


def question(name: str, batch: int = 8, level: ServiceLevel = ANY, **changes: Any) -> Question:
    instance = find_instance("trn2.48xlarge")
    return replace(Question(model(name), instance, "bfloat16", 512, 128, batch, level), **changes)


def choose_for_traffic(name: str, level: ServiceLevel, batch: int) -> tuple[int, int]:
    """Return the ranks and groups that traffic chooses for prompts of 512 tokens and 128 generated ones."""
    offered = draw_poisson_arrivals(
        draw_queries(20, Lengths("constant", 512), Lengths("constant", 128), None, np.random.default_rng(1)),
        1.0,
        np.random.default_rng(1),
    )
    setup = Setup("trn2.48xlarge", "bfloat16", offered.longest, lnc=2, options=SchedulerOptions(batch))
    request = TrafficRequest(CONFIGS / f"{name}.json", level=level)
    shape = _judge_meshes(request, model(name), setup, offered)[0].mesh.shape
    return shape.tp, shape.ep


def check_one_answer(name: str, level: ServiceLevel, batch: int) -> None:
    """Check that a plan, the first row of its table of meshes, and traffic have the same mesh."""
    request = Request("trn2.48xlarge", batch=batch, prompt=512, generate=128, dtype="bfloat16", level=level)
    plan = make_plan(model(name), request)
    shape = plan.placement.shape
    assert (shape.tp, shape.ep) == choose_for_traffic(name, level, batch)
    assert plan.placement.meshes[0] == plan.placement.judged[0].mesh == plan.placement.mesh
    lines = rendered(format_plan(plan)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("mesh ")) + 1
    words = f"tp {shape.tp}" + (f" ep {shape.ep}" if shape.ep > 1 else "")
    assert lines[first].startswith(f"{words} ") and "runner-up: tp" in "\n".join(lines)


@pytest.mark.parametrize("level", [ANY, ServiceLevel(itl=20e6), ServiceLevel(ttft=40e6, itl=30e6)])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_its_table_and_traffic_have_one_answer(rooflines, monkeypatch, name, level) -> None:
    monkeypatch.setattr("model.plan.text._format_kernels", lambda plan: [])
    check_one_answer(name, level, 8)


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_its_table_and_traffic_have_one_answer_by_dry_runs(name) -> None:
    check_one_answer(name, ServiceLevel(ttft=500e6, itl=50e6), 8)


def test_the_cheapest_of_the_best_three_is_chosen_by_predicted_steps(rooflines) -> None:
    judged = Choice(question("llama-3.1-70b")).judged
    predicted = [candidate for candidate in judged if candidate.predicted]
    assert len(predicted) == policy.PREDICTED == 3 and judged[: len(predicted)] == tuple(predicted)
    assert sorted(rooflines) == [("prompts", judged[0].mesh.shape.tp)] + [
        ("step", tp) for tp in sorted(candidate.mesh.shape.tp for candidate in predicted)
    ]
    costs = [candidate.cost_ns for candidate in judged[:3]]
    assert costs == sorted(costs)
    for candidate in predicted:
        batch, copies = candidate.mesh.batch, candidate.mesh.copies
        assert candidate.cost_ns == pytest.approx(
            (batch * candidate.prompt_ns + 127 * candidate.mean_itl_ns) / (batch * copies)
        )


def test_a_mesh_beyond_the_service_level_gives_way_to_the_next(rooflines) -> None:
    free = Choice(question("llama-3.1-8b")).judged
    tp, itl_ns, ttft_ns = free[0].mesh.shape.tp, free[0].mean_itl_ns, free[0].ttft_ns
    for level in (ServiceLevel(itl=itl_ns), ServiceLevel(ttft=ttft_ns)):
        assert Choice(question("llama-3.1-8b", level=level)).judged[0].mesh.shape.tp == tp
    for level in (ServiceLevel(itl=itl_ns - 1), ServiceLevel(ttft=ttft_ns - 1)):
        chosen = Choice(question("llama-3.1-8b", level=level)).judged[0]
        assert chosen.mesh.shape.tp > tp and not chosen.excesses


def test_without_a_mesh_that_keeps_the_service_level_the_nearest_is_chosen(rooflines) -> None:
    judged = Choice(question("llama-3.1-8b", level=ServiceLevel(itl=1.0))).judged
    assert judged[0].excesses.keys() == {"itl"}
    assert judged[0].mean_itl_ns == min(candidate.mean_itl_ns for candidate in judged if candidate.predicted)


def test_fewer_sequences_are_decoded_only_where_that_is_allowed() -> None:
    for fewer in (False, True):
        choice = Choice(question("llama-3.1-70b", batch=256, fewer=fewer, tp=16, pp=1, ep=1))
        (mesh,) = choice.estimator.rank(16, 1, 1)
        assert 64 <= mesh.sequences < 128
        assert (mesh.step is not None, mesh.batch) == ((True, 64) if fewer else (False, 256))


def test_stages_are_taken_only_if_no_mesh_without_them_holds_the_batch(rooflines) -> None:
    judged = Choice(question("llama-3.1-70b", level=ServiceLevel(itl=14e6))).judged
    assert {candidate.mesh.shape.pp for candidate in judged} > {1}
    assert {candidate.mesh.shape.pp for candidate in judged[:3]} == {1}
    stages = Choice(question("llama-3.1-70b", instance=find_instance("trn1.32xlarge"), batch=1, tp=1)).judged
    assert stages and all(candidate.mesh.shape.pp > 1 for candidate in stages)


def test_a_longest_request_takes_the_memory_of_each_sequence() -> None:
    mean, longest = question("llama-3.1-70b"), question("llama-3.1-70b", longest=8192)
    assert (mean.context, longest.context) == (640, 8192)
    meshes = [Choice(request_lengths).estimator.rank(16, 1, 1)[0] for request_lengths in (mean, longest)]
    assert meshes[0].sequences > 12 * meshes[1].sequences


@pytest.mark.parametrize(("itl_ns", "tp"), [(8e6, 32), (5e6, 128)])
def test_more_ranks_than_heads_are_offered_only_if_they_are_chosen(monkeypatch, itl_ns, tp) -> None:
    """Gemma-3-27b has 32 heads. Its steps are estimated at 7.0 ms on 32 ranks and 4.6 ms on 128."""
    monkeypatch.setattr(policy, "Predictor", Rooflines)
    monkeypatch.setattr(
        Rooflines, "predict_step", lambda self, batch: PassTime(Time.exact(STEPS[self.tp]), ())
    )
    choice = Choice(question("gemma-3-27b", level=ServiceLevel(itl=itl_ns)))
    assert choice.judged[0].mesh.shape.tp == choice.meshes[0].shape.tp == tp
    for shape in (
        *(candidate.mesh.shape for candidate in choice.judged[1:]),
        *(candidate.shape for candidate in choice.meshes[1:]),
    ):
        assert shape.tp <= 32


def test_more_ranks_than_heads_that_are_predicted_to_be_slow_are_not_offered(rooflines) -> None:
    choice = Choice(question("gemma-3-27b", level=ServiceLevel(itl=5e6)))
    assert max(candidate.shape.tp for candidate in choice.meshes) == 32
    assert [tp for phase, tp in rooflines if phase == "step"] == [8, 16, 32, 128]


def test_more_ranks_than_heads_are_offered_if_they_are_requested(rooflines) -> None:
    (mesh,) = Choice(question("gemma-3-27b", tp=64, pp=1, ep=1)).meshes
    assert mesh.shape.tp == 64 and mesh.step is not None
