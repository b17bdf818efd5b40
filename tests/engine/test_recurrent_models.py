"""Models with recurrent layers in the engine: requests together get the logits that the reference gives each alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.engine import Request, Scheduler, SchedulerOptions
from model.engine.buckets import Buckets
from model.loading.weights import shard_weights
from model.runners.paged import PagedModel
from model.state import PagePool, SlotPool
from tests.deep import deep_except
from tests.engine.test_paged_model import FIRST, PROMPTS, TEXTS, alone, bound, load, logits_of_requests, paged
from tests.model.tiny_families import write_tiny

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

Model = tuple[str, ModelConfig, dict[str, np.ndarray]]

FAMILIES = ("mamba", "mamba2", "mamba with biases", "qwen3-next")


@pytest.fixture(params=deep_except(FAMILIES, ("mamba2", "qwen3-next")))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    """Return a tiny model of a family with random weights, by its name."""
    return request.param, *load(write_tiny(tmp_path, request.param))


def pools(config: ModelConfig, count: int, block: int) -> list[PagePool]:
    return [PagePool(count, block, window) for window in config.list_windows(64)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", deep_except([1, 2], [2]))
def test_requests_share_snapshots(model: Model, ranks: int) -> None:
    """The second text goes on from the first one's state behind 16 tokens; chunks are of 16 at most."""
    name, config, weights = model
    scheduler = Scheduler(pools(config, 24, 4), SchedulerOptions(4, 16), SlotPool(6, 4, 8))
    rows, requests = logits_of_requests(paged(config, weights, scheduler, ranks, 64), scheduler)
    for row_logits, text, prompt in zip(rows, TEXTS, PROMPTS):
        assert np.abs(row_logits - alone(config, weights, text, prompt)).max() <= bound(name)
    assert [request.shared_tokens for request in requests] == [0, 16, 0]


@pytest.mark.slow
def test_a_preempted_request_gets_the_same_logits(model: Model) -> None:
    """One slot: every request runs alone, and a later one of higher priority takes its place."""
    name, config, weights = model
    scheduler = Scheduler(
        pools(config, 24, 4), SchedulerOptions(4, 16, prefix_caching=False), SlotPool(1, 4, 8)
    )
    computed = paged(config, weights, scheduler, 1, 64)
    late, urgent = Request("late", FIRST[:14], 4), Request("urgent", TEXTS[2][:6], 1, priority=-1)
    scheduler.submit(late)
    rows = []
    for step in range(6):
        batch = scheduler.schedule()
        outputs = computed.step(batch)
        scheduler.complete_step(batch, {request: (FIRST[len(request.tokens)],) for request in outputs})
        rows += [outputs[late][0].logits] if late in outputs else []
        if step == 1:
            scheduler.submit(urgent)
        elif urgent in outputs:
            scheduler.end(urgent)
    assert late.preemptions == 1
    assert len(rows) >= 4
    wanted = alone(config, weights, FIRST[: 13 + len(rows)], 14)
    assert np.abs(np.stack(rows) - wanted).max() <= bound(name)


def test_a_fork_goes_on_with_a_state_of_its_own(model: Model) -> None:
    name, config, weights = model
    scheduler = Scheduler(pools(config, 24, 4), SchedulerOptions(4, 16), SlotPool(4, 4, 8))
    computed = paged(config, weights, scheduler, 1, 64)
    parent = Request("parent", FIRST[:7], 4)
    scheduler.submit(parent)
    while parent.computed < 7:
        batch = scheduler.schedule()
        computed.step(batch)
        scheduler.complete_step(
            batch, {request: (7,) for request, chunk in batch.chunks.items() if chunk.samples}
        )
    child = scheduler.fork(parent, "child")
    child.tokens[-1] = 8
    outputs = computed.step(scheduler.schedule())
    for sequence, token in ((parent, 7), (child, 8)):
        wanted = alone(config, weights, [*FIRST[:7], token], 7)[-1]
        assert np.abs(outputs[sequence][0].logits - wanted).max() <= bound(name)


@pytest.mark.slow
@pytest.mark.parametrize("right", deep_except([3, 1, 0], [1]))
def test_drafts_leave_the_state_of_the_tokens_that_were_right(model: Model, right: int) -> None:
    name, config, weights = model
    scheduler = Scheduler(
        pools(config, 24, 4), SchedulerOptions(4, 32, speculative_tokens=3), SlotPool(6, 4, 8)
    )
    computed = PagedModel(
        config,
        shard_weights(config, weights, 1),
        SimulatedDevice("trn2", 1),
        scheduler.cache.pools,
        Buckets.powers(4, 32, 64, drafts=3),
        slots=scheduler.cache.slots,
    )
    request, other = Request("0", FIRST[:7], 9), Request("1", FIRST[4:9], 9)
    for new_request in (request, other):
        scheduler.submit(new_request)
    text = {request: FIRST, other: FIRST[4:]}
    seen = {request: list[np.ndarray](), other: list[np.ndarray]()}
    for _ in range(6):
        batch = scheduler.schedule()
        for sequence, chunk in batch.chunks.items():
            if chunk.draft_slots:
                drafts = text[sequence][len(sequence.tokens) :][: 3 if sequence is request else 1]
                wrong = [5] * (3 - right) if sequence is request else []
                batch.chunks[sequence] = chunk.with_drafts([*drafts[: len(drafts) - len(wrong)], *wrong])
        scheduler.discard_unused_slots(batch)
        outputs = computed.step(batch)
        chosen = {}
        for sequence, request_outputs in outputs.items():
            drafts = batch.chunks[sequence].drafts
            kept = right if sequence is request and drafts else len(drafts)
            seen[sequence] += [output.logits for output in request_outputs[: kept + 1]]
            chosen[sequence] = text[sequence][len(sequence.tokens) :][: kept + 1]
        scheduler.complete_step(batch, chosen)
    for sequence, rows in seen.items():
        prompt = sequence.prompt_tokens
        wanted = alone(config, weights, text[sequence][: prompt + len(rows) - 1], prompt)
        assert np.abs(np.stack(rows) - wanted).max() <= bound(name)
        assert len(rows) >= 4
