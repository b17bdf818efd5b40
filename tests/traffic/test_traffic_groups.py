"""Traffic on groups of ranks that divide experts: steps in which all groups take part, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.engine import GroupScheduler, Scheduler, SchedulerOptions
from model.errors import ModelError
from model.loading.shipped import find_model_path
from model.plan.memory import compute_footprint
from model.plan.sizes import load_model
from model.plan.stack_records import THIS
from model.state import PagePool
from model.traffic.clock import serve_pass
from model.traffic.deployment import Deployment, Setup
from model.traffic.record import Record
from model.traffic.replica import Replica
from model.traffic.service import serve
from model.traffic.workload import Query, Workload
from nkw.commands import main
from tests.step_shapes import decode_shape, prompt_shape

MODEL = load_model(find_model_path("stories-moe"))
SETUP = Setup(
    *("trn2.48xlarge", "bfloat16", 128),
    tp=2,
    replicas=1,
    options=SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=32),
    ep=2,
)


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return Deployment(MODEL, SETUP)


def served(deployment: Deployment, *queries: Query) -> Record:
    (record,) = deployment.serve_unit(Workload(queries, (0,) * len(queries)))
    return record


def test_each_group_has_the_pages_that_its_weights_leave(deployment: Deployment) -> None:
    (page_kind,) = deployment.page_kinds
    weights = compute_footprint(MODEL, "bfloat16", 2, 0, 2).weight_bytes
    assert weights < compute_footprint(MODEL, "bfloat16", 2, 0).weight_bytes
    assert page_kind.pages == (12 * 2**30 - weights) // page_kind.page_bytes
    assert deployment.pages == 2 * page_kind.pages


@pytest.mark.slow
def test_requests_on_both_groups_take_the_time_of_one(deployment: Deployment) -> None:
    """A prompt of 15 tokens is padded to 16; a group without a request computes padding."""
    predictor = deployment.predictors[0]
    step = predictor.make_paged_step({None: deployment.page_kinds[0].pages}, 16)
    shapes = [prompt_shape(1, 16, 128, model_step=step), *[decode_shape(1, 1, 128, step)] * 3]
    predicted = list(map(predictor.predict_paged, shapes))
    for count in (1, 2):
        sequences = [(0, count), *[(count, 0)] * 3]
        passes = [
            round(serve_pass(THIS, kernels, *counts).time.program_ns)
            for kernels, counts in zip(predicted, sequences)
        ]
        record = served(deployment, *[Query(15, 4)] * count)
        assert [timeline.e2e_ns for timeline in record.timelines] == [sum(passes)] * count
        assert record.padding == 2 * 19 - count * 18
        assert record.tokens == count * 18


@pytest.mark.slow
def test_steps_at_once_are_those_one_by_one(deployment: Deployment) -> None:
    draw = np.random.default_rng(2)
    queries = tuple(Query(*map(int, draw.integers(2, 40, 2))) for _ in range(30))
    workload = Workload(queries, tuple(sorted(int(arrival) for arrival in draw.integers(0, 10**8, 30))))
    records = []
    for at_once in (True, False):
        groups = [Scheduler(PagePool(6, 16), SETUP.options) for _ in range(2)]
        replica = Replica(GroupScheduler(groups), deployment.clock, joins_steps=at_once)
        records.append(serve(replica, workload))
    one, other = records
    assert [vars(timeline) for timeline in one.timelines] == [vars(timeline) for timeline in other.timelines]
    assert one.gaps_ns == other.gaps_ns
    assert (one.steps, one.tokens, one.padding) == (other.steps, other.tokens, other.padding)
    assert len(one.spans) < len(other.spans)


@pytest.mark.slow
def test_prompts_on_replicas_of_their_own_hand_pages_to_a_group() -> None:
    apart = Deployment(MODEL, replace(SETUP, replicas=2, prefill_replicas=1))
    records = apart.serve(Workload((Query(20, 4),) * 5, (0,) * 5))
    timelines = records[-1].timelines
    assert len(timelines) == 5
    assert all(
        timeline.moved_ns is not None and timeline.end_ns > timeline.moved_ns for timeline in timelines
    )


@pytest.mark.parametrize(
    ("setup", "works", "message"),
    [
        (
            replace(SETUP, ep=3),
            replace(SETUP, ep=4),
            "--ep 3 does not divide the 8 experts of this model; take a divisor of 8",
        ),
        (
            replace(SETUP, replicas=33),
            replace(SETUP, replicas=32),
            "33 replicas of 4 ranks take 132 cores; trn2.48xlarge has 128 cores; give fewer --replicas",
        ),
    ],
)
def test_refuses_groups_that_there_are_not(setup: Setup, works: Setup, message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        Deployment(MODEL, setup)
    assert refusal.value.message == message
    assert Deployment(MODEL, works).pages > 0


@pytest.mark.slow
def test_the_command_says_on_which_groups(capsys: Any, tmp_path: Any) -> None:
    words = ("--prompt-lengths", "8..24", "--output-lengths", "4", "--requests", "20", "--rate", "50")
    out = str(tmp_path / "out.json")
    words = (*words, "--tp", "1", "--ep", "2", "--replicas", "1", "--max-num-seqs", "2", "--json", out)
    assert main(["traffic", str(find_model_path("stories-moe")), *words]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "tp 1, ep 2 (LNC 2), 1 replica" in report and "positions for each of their groups" in report
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["tp"], document["ep"], document["pages"]) == (1, 2, 2 * document["kinds"][0]["pages"])


def test_logical_cores_are_half_as_many_ranks_with_twice_the_memory() -> None:
    one, two = (Deployment(MODEL, replace(SETUP, replicas=None, lnc=lnc)) for lnc in (1, 2))
    assert (one.replicas, two.replicas) == (32, 16)
    assert two.pages > 2 * one.pages
    assert (one.ranks, two.ranks) == ("tp 2, ep 2", "tp 2, ep 2 (LNC 2)")
