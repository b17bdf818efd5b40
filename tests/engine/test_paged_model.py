"""Requests of a batch, in chunks and on shared pages, get the logits that the numpy reference gives each alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.engine import Batch, Chunk, Request, Scheduler, SchedulerOptions
from model.engine.buckets import Buckets
from model.engine.padded_batch import BucketUse
from model.errors import ModelError
from model.families import load_config
from model.layers.launch import StepShape
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.paged import PagedModel
from model.runners.reference import ReferenceModel
from model.state import PagePool, SlotPool
from simulate.replay.guards import Guards
from tests.deep import deep_except
from tests.engine.paged_text import check_pages
from tests.model.oracle import Oracle, random_model
from tests.model.test_dense_families import oracle
from tests.model.tiny_families import COMMON, TINY, each_feature, write_tiny
from tests.step_shapes import decode_shape, prompt_shape

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

FIRST = np.random.default_rng(3).integers(3, 151, 26).tolist()
TEXTS = (FIRST[:21], [*FIRST[:17], 9, 11, 10], FIRST[9:18])
"""The second one shares a page of 16 tokens with the first, which has computed it before the second one comes."""
PROMPTS = (18, 18, 6)


@cache
def bound(name: str) -> float:
    """Return the bound of differences: twice the error of transformers' float32 logits.

    The texts are those of these tests and of the oracle: what a family amplifies depends on the tokens.
    """
    family_oracle = oracle(name)
    return 2 * max(
        reference.bound()
        for reference in (family_oracle, *(Oracle(family_oracle.model, text, 1) for text in TEXTS))
    )


def load(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    config = load_config(folder)
    return config, dict(open_checkpoint(folder, config))


def paged(
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    scheduler: Scheduler,
    ranks: int,
    length: int,
    exact: bool = False,
) -> PagedModel:
    options = scheduler.options
    buckets = Buckets.powers(options.max_num_seqs, options.max_num_batched_tokens, length)
    shards = shard_weights(config, weights, ranks)
    device, cache = SimulatedDevice("trn2", ranks, exact=exact), scheduler.cache
    return PagedModel(config, shards, device, cache.pools, buckets, slots=cache.slots)


def logits_of_requests(model: PagedModel, scheduler: Scheduler) -> tuple[list[np.ndarray], list[Request]]:
    """Return the logits of every request after its prompt and each later token of its text."""
    requests = [
        Request(str(n), text[:prompt], len(text) - prompt + 1)
        for n, (text, prompt) in enumerate(zip(TEXTS, PROMPTS))
    ]
    rows: dict[Request, list[np.ndarray]] = {request: [] for request in requests}
    scheduler.submit(requests[0])
    later = [*requests[1:]]
    while scheduler.running or scheduler.waiting or later:
        batch = scheduler.schedule()
        outputs = model.step(batch)
        fed = {}
        for request, (output,) in outputs.items():
            rows[request].append(output.logits)
            text = TEXTS[int(request.id)]
            fed[request] = text[len(request.tokens) : len(request.tokens) + 1]
        scheduler.complete_step(batch, fed)
        for request in outputs:
            if not fed[request]:
                scheduler.end(request)
        if later and requests[0].computed >= 16:
            scheduler.submit(later.pop(0))
        check_pages(scheduler)
    return [np.stack(rows[request]) for request in requests], requests


def alone(config: ModelConfig, weights: dict[str, np.ndarray], text: list[int], prompt: int) -> np.ndarray:
    model = ReferenceModel(config, weights)
    rows = [model.prefill([text[:prompt]])[0].logits]
    rows += [model.decode([text[position]], [position])[0].logits for position in range(prompt, len(text))]
    return np.stack(rows)


LONGROPE = ("llama with longrope", "phi3 of a part of the head")


@pytest.mark.slow
@pytest.mark.parametrize("name", each_feature(without=LONGROPE))
def test_every_family_on_pages(tmp_path: Path, name: str) -> None:
    """Recurrent layers have slots, and a snapshot of their states at the end of each page of a prompt.

    Programs are replayed as recorded: tests of few families, and those of kernels, rewrite them.
    """
    config, weights = load(write_tiny(tmp_path, name))
    pools = [PagePool(12, 16) for window in config.list_windows(64)[:1]]
    slots = SlotPool(8, 16, 16) if config.is_recurrent else None
    scheduler = Scheduler(pools, SchedulerOptions(4, 16), slots)
    rows, requests = logits_of_requests(paged(config, weights, scheduler, 2, 64, exact=True), scheduler)
    for row_logits, text, prompt in zip(rows, TEXTS, PROMPTS):
        assert np.abs(row_logits - alone(config, weights, text, prompt)).max() <= bound(name)
    assert [request.shared_tokens for request in requests] == [0, 16, 0]


WINDOWED = [name for name in TINY if "window" in name or name in ("ministral", "gemma2", "gemma3", "gpt-oss")]


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", deep_except(WINDOWED, 2))
def test_layers_with_a_window_keep_no_page_behind_it(tmp_path: Path, name: str, caching: bool) -> None:
    """Pages of 4: windows of 5 to 9 positions pass them while prompts are computed in chunks and while tokens come."""
    config, weights = load(write_tiny(tmp_path, name))
    pools = [PagePool(16, 4, window) for window in config.list_windows(64)]
    assert any(pool.window for pool in pools)
    scheduler = Scheduler(pools, SchedulerOptions(4, 8, prefix_caching=caching))
    rows, requests = logits_of_requests(paged(config, weights, scheduler, 1, 64), scheduler)
    for row_logits, text, prompt in zip(rows, TEXTS, PROMPTS):
        assert np.abs(row_logits - alone(config, weights, text, prompt)).max() <= bound(name)
    assert [request.shared_tokens for request in requests] == [0, 16 if caching else 0, 0]


@pytest.mark.slow
def test_a_preempted_request_gets_the_same_logits(tmp_path: Path) -> None:
    config, weights = load(write_tiny(tmp_path, "qwen3"))
    scheduler = Scheduler(PagePool(5, 8), SchedulerOptions(4, 16, prefix_caching=False))
    rows, requests = logits_of_requests(paged(config, weights, scheduler, 1, 64), scheduler)
    assert any(request.preemptions for request in requests)
    for row_logits, text, prompt in zip(rows, TEXTS, PROMPTS):
        assert np.abs(row_logits - alone(config, weights, text, prompt)).max() <= bound("qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "ministral", "deepseek v3"])
def test_a_copied_page_holds_what_the_first_one_held(tmp_path: Path, name: str) -> None:
    config, weights = load(write_tiny(tmp_path, name))
    pools = [PagePool(12, 16, window) for window in config.list_windows(64)]
    scheduler = Scheduler(pools, SchedulerOptions(4, 16))
    model = paged(config, weights, scheduler, 1, 64)
    parent = Request("parent", TEXTS[2][:6], 4)
    scheduler.submit(parent)
    batch = scheduler.schedule()
    model.step(batch)
    scheduler.complete_step(batch, {parent: (7,)})
    child = scheduler.fork(parent, "child")
    child.tokens[-1] = 8
    batch = scheduler.schedule()
    assert len(batch.copies) == len(pools)
    outputs = model.step(batch)
    for request, token in ((parent, 7), (child, 8)):
        wanted = alone(config, weights, [*TEXTS[2][:6], token], 6)[-1]
        assert np.abs(outputs[request][0].logits - wanted).max() <= bound(name)


def test_kernels_are_checked_for_changes_once_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = load(write_tiny(tmp_path, "qwen2"))
    scheduler = Scheduler(PagePool(12, 16), SchedulerOptions(4, 16))
    model = paged(config, weights, scheduler, 1, 64)
    checks: list[Guards] = []
    unchanged = Guards.unchanged
    monkeypatch.setattr(Guards, "unchanged", lambda guards: checks.append(guards) or unchanged(guards))
    request = Request("0", FIRST[:6], 8)
    scheduler.submit(request)
    for token in FIRST[6:10]:
        checks.clear()
        batch = scheduler.schedule()
        model.step(batch)
        scheduler.complete_step(batch, {request: (token,)})
    assert checks and len(checks) == len(set(checks))

    def changed(*arguments: object) -> None:
        raise AssertionError("the kernel was changed")

    monkeypatch.setattr(import_module("nki_kernels.lm_head"), "check_arguments", changed)
    with pytest.raises(ModelError, match="the kernel was changed"):
        model.step(scheduler.schedule())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma4", "olmo2", "gpt2", "qwen3 with experts"])
@pytest.mark.parametrize("separate_pages", [False, True])
def test_drafts_and_prompts_share_a_step(tmp_path: Path, name: str, separate_pages: bool) -> None:
    """Two requests that decode, one of them with drafts, beside chunks of a new prompt."""
    config, weights = load(write_tiny(tmp_path, name))
    windows = config.list_windows(64) if separate_pages else [None]
    scheduler = Scheduler(
        [PagePool(16, 4, window) for window in windows], SchedulerOptions(4, 32, speculative_tokens=3)
    )
    shards = shard_weights(config, weights, 1)
    buckets = Buckets.powers(4, 32, 64, drafts=3)
    model = PagedModel(config, shards, SimulatedDevice("trn2", 1), scheduler.cache.pools, buckets)
    request, other = Request("0", FIRST[:14], 8), Request("1", FIRST[4:9], 8)
    for new_request in (request, other):
        scheduler.submit(new_request)
    batch = scheduler.schedule()
    model.step(batch)
    scheduler.complete_step(batch, {request: (FIRST[14],), other: (FIRST[9],)})
    prompt = Request("2", FIRST[2:25], 2)
    scheduler.submit(prompt)
    batch = scheduler.schedule()
    batch.chunks[request] = batch.chunks[request].with_drafts([FIRST[15], FIRST[16], 5])
    outputs = model.step(batch)
    mixed = [(step.decoding.tokens, step.sequences) for step in model.use.steps if step.decoding is not None]
    assert mixed == [(4, 1)]
    for sequence, text in ((request, [*FIRST[:17], 5]), (other, FIRST[4:10]), (prompt, FIRST[2:25])):
        wanted = alone(config, weights, text, len(text) - len(outputs[sequence]) + 1)
        logits = np.stack([output.logits for output in outputs[sequence]])
        assert np.abs(logits - wanted).max() <= bound(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama with biases", "gemma3", "olmo2", "gpt2"])
def test_drafts_are_verified_in_one_step(tmp_path: Path, name: str) -> None:
    config, weights = load(write_tiny(tmp_path, name))
    scheduler = Scheduler(PagePool(12, 16), SchedulerOptions(4, 32, speculative_tokens=3))
    buckets = Buckets.powers(4, 32, 64, drafts=3)
    model = PagedModel(
        config, shard_weights(config, weights, 1), SimulatedDevice("trn2", 1), scheduler.cache.pools, buckets
    )
    request, other = Request("0", FIRST[:14], 8), Request("1", FIRST[4:9], 8)
    for new_request in (request, other):
        scheduler.submit(new_request)
    batch = scheduler.schedule()
    model.step(batch)
    scheduler.complete_step(batch, {request: (FIRST[14],), other: (FIRST[9],)})
    batch = scheduler.schedule()
    batch.chunks[request] = batch.chunks[request].with_drafts([FIRST[15], FIRST[16], 5])
    batch.chunks[other] = batch.chunks[other].with_drafts([FIRST[10]])
    outputs = model.step(batch)
    assert [len(outputs[sequence]) for sequence in (request, other)] == [4, 2]
    for request_outputs, text in ((outputs[request], [*FIRST[:17], 5]), (outputs[other], FIRST[4:11])):
        wanted = alone(config, weights, text, len(text) - len(request_outputs))[1:]
        assert np.abs(np.stack([output.logits for output in request_outputs]) - wanted).max() <= bound(name)
    # The third draft is wrong: what the next step computes does not see it.
    scheduler.complete_step(batch, {request: FIRST[15:18], other: FIRST[10:12]})
    assert [sequence.computed for sequence in (request, other)] == [17, 7]
    outputs = model.step(scheduler.schedule())
    for sequence, text in ((request, FIRST[:18]), (other, FIRST[4:12])):
        wanted = alone(config, weights, text, len(text) - 1)[-1]
        assert np.abs(outputs[sequence][0].logits - wanted).max() <= bound(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGROPE)
@pytest.mark.parametrize(("length", "factors"), [(16, "short_factor"), (17, "long_factor")])
def test_longrope_takes_the_factors_of_the_longest_sequence(
    tmp_path: Path, name: str, length: int, factors: str
) -> None:
    config, weights = load(write_tiny(tmp_path, name))
    assert config.longest_short == 16
    scheduler = Scheduler(PagePool(12, 16), SchedulerOptions(4, 16))
    rows, _ = logits_of_requests(paged(config.fix_rope_length(length), weights, scheduler, 2, 64), scheduler)
    family, changes = TINY[name]
    rope = changes["rope_parameters"]
    always = {**rope, "short_factor": rope[factors], "long_factor": rope[factors]}
    exact = random_model(family, {**COMMON, **changes, "rope_parameters": always}, seed=len(name))
    for row_logits, text, prompt in zip(rows, TEXTS, PROMPTS):
        wanted = Oracle(exact, text, prompt)
        assert np.abs(row_logits - wanted.logits).max() <= wanted.bound()


@pytest.mark.parametrize(("drafts", "mixes"), [(0, False), (3, False), (0, True), (3, True)])
def test_every_part_has_a_shape_of_the_list(drafts: int, mixes: bool) -> None:
    draw = np.random.default_rng(1)
    buckets = replace(Buckets.powers(48, 64, 300, drafts), mixes=mixes)
    listed = buckets.shapes()
    shapes = set(listed)
    assert len(listed) == len(shapes)
    scheduler = Scheduler(PagePool(200, 16), SchedulerOptions(48, 64, speculative_tokens=drafts))
    use, computed = BucketUse(), 0
    for number in range(150):
        scheduler.submit(Request(str(number), [number] * int(draw.integers(1, 250)), 40))
        batch = scheduler.schedule()
        for request, chunk in batch.chunks.items():
            batch.chunks[request] = chunk.with_drafts([1] * int(draw.integers(0, chunk.draft_slots + 1)))
        padded_batches = buckets.pad(batch)
        chunks = batch.chunks.values()
        phases = {chunk.num_scheduled_tokens == 1 + chunk.num_draft_tokens for chunk in chunks}
        mixed = mixes and len(phases) == 2
        assert [padded.decoding is not None for padded in padded_batches] == [False] * (
            len(padded_batches) - 1
        ) + [mixed]
        for padded in padded_batches:
            assert padded.step in shapes
            for phase in filter(None, (padded, padded.decoding)):
                assert all(chunk.num_scheduled_tokens <= phase.step.new_tokens for chunk in phase.chunks)
            use.add(padded)
        computed += batch.tokens
        assert use.tokens == computed
        scheduler.complete_step(
            batch, {request: (1,) for request, chunk in batch.chunks.items() if chunk.samples}
        )
    assert use.padding > 0


def test_parts_are_rounded_up_to_buckets() -> None:
    buckets = Buckets.powers(6, 64, 300)
    assert buckets == Buckets((1, 2, 4, 8), (16, 32, 64), (128, 256, 512))
    scheduler = Scheduler(PagePool(64, 16), SchedulerOptions(6, 64))
    for number, tokens in enumerate((1, 3, 17, 18, 20)):
        scheduler.submit(Request(str(number), list(range(tokens)), 4))
    batch = scheduler.schedule()
    first, second = replace(buckets, mixes=False).pad(batch)
    (mixed,) = buckets.pad(batch)
    assert mixed.step == prompt_shape(4, 32, 512, 0, first.step)
    assert (mixed.decoding, mixed.padding) == (first, first.padding + second.padding)
    assert first.step == decode_shape(1, 1, 128)
    assert first.padding == 0
    assert second.step == prompt_shape(4, 32, 128)
    assert second.padding == 128 - 3 - 17 - 18 - 20


def mixed_steps(buckets: Buckets, decoding: int, *prompts: tuple[int, int]) -> list[StepShape]:
    """Return the steps of requests of 30 tokens that decode, and of chunks with their start and count."""
    batch = Batch()
    for start, size in [(30, 1)] * decoding + list(prompts):
        request = Request(str(len(batch.chunks)), [1] * (start + size + 1), 1)
        batch.chunks[request] = Chunk(request, start, size, samples=size == 1)
    return [padded.step for padded in buckets.pad(batch)]


@pytest.mark.parametrize(("decoding", "count"), [(126, 1), (127, 1), (128, 2)])
def test_prompts_and_what_decodes_are_one_part_while_the_head_takes_their_rows(decoding, count) -> None:
    """A bucket of 128 sequences becomes one of 127 beside a prompt."""
    buckets = Buckets((1, 126, 128), (16, 64), (128, 256))
    step = decode_shape(decoding, 1, 128)
    steps = mixed_steps(buckets, decoding, (0, 40))
    assert len(steps) == count
    assert steps[-1] == (prompt_shape(1, 64, 256, 0, step) if count == 1 else prompt_shape(1, 64, 128))
    assert steps[-1] in buckets.shapes()
    assert len(mixed_steps(replace(buckets, mixes=False), decoding, (0, 40))) == 2


@pytest.mark.parametrize(("count", "tokens"), [(15, 16), (16, 16), (17, 60), (60, 60), (61, 64)])
def test_a_prompt_is_rounded_up_together_with_the_rows_that_decode(count: int, tokens: int) -> None:
    """With 4 that decode, 64 rows hold a prompt of 60 tokens; several prompts are rounded up alone."""
    buckets = Buckets((1, 2, 4), (16, 64), (128, 256))
    step = decode_shape(4, 1, 128)
    assert mixed_steps(buckets, 4, (0, count)) == [prompt_shape(1, tokens, 256, 0, step)]
    assert mixed_steps(buckets, 4, (0, 60), (16, 60)) == [prompt_shape(2, 64, 256, 128, step)]
    assert mixed_steps(buckets, 4, (0, count))[0] in buckets.shapes()


def prompt_steps(buckets: Buckets, *chunks: tuple[int, int]) -> list[StepShape]:
    """Return the steps of chunks of prompts with their start and count."""
    batch = Batch()
    for number, (start, size) in enumerate(chunks):
        request = Request(str(number), [1] * (start + size + 1), 1)
        batch.chunks[request] = Chunk(request, start, size, samples=False)
    return [padded.step for padded in buckets.pad(batch)]


@pytest.mark.parametrize(("rows", "num_steps"), [(127, 1), (128, 1), (129, 2)])
def test_chunks_of_different_sizes_are_one_part_while_they_add_few_rows(rows: int, num_steps: int) -> None:
    buckets = Buckets((1, 2, 4), (16, 16 + rows), (256, 4096))
    assert len(prompt_steps(buckets, (0, 16), (0, 16 + rows))) == num_steps
    assert prompt_steps(buckets, (0, 16), (0, 16)) == [prompt_shape(2, 16, 256)]


@pytest.mark.parametrize(("prefix", "num_steps"), [(1023, 1), (1024, 1), (1025, 2)])
def test_a_new_prompt_joins_one_that_goes_on_while_it_reads_little_more(prefix: int, num_steps: int) -> None:
    buckets = Buckets((1, 2, 4), (64, 128), (256, prefix, 4096))
    shapes = prompt_steps(buckets, (0, 128), (prefix, 128))
    assert len(shapes) == num_steps
    assert shapes[-1] == prompt_shape(3 - num_steps, 128, 4096, prefix)


def test_parts_join_up_to_the_most_sequences() -> None:
    buckets = Buckets((1, 2), (16, 32), (256,))
    assert prompt_steps(buckets, (0, 16), (0, 32)) == [prompt_shape(2, 32, 256)]
    assert len(prompt_steps(buckets, (0, 16), (0, 32), (0, 16))) == 2
