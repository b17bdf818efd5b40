"""Groups of ranks that divide experts (expert_parallel_size): requests get what they would get alone on one rank."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from model import LLM, SamplingParams
from model.engine import Batch, Chunk, GroupScheduler, Request, Scheduler, SchedulerOptions
from model.engine.buckets import Buckets
from model.engine.padded_batch import BucketUse
from model.errors import ModelError
from model.layers.launch import Phase
from model.state import PagePool, SlotPool
from tests.deep import deep_except
from tests.engine.paged_text import PagedText, alone, check_pages
from tests.step_shapes import decode_shape, prompt_shape

PROMPTS = ["Once upon a time", "The sun was", "Tom had a red ball and", "Lily", "Once upon a time there was"]
SIZES: dict[str, Any] = dict(
    model="stories-moe", max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64, num_pages=16
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=0.9, top_k=40, seed=3, max_tokens=4, n=2),
    SamplingParams(temperature=0.8, max_tokens=3, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6),
    SamplingParams(temperature=0, max_tokens=3, logprobs=2),
]
LOOKUP = {"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def generated(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.engine.scheduler.cache.free == llm.engine.scheduler.cache.count
    return [[list(output.token_ids) for output in output.outputs] for output in outputs]


@cache
def generate_on_one_group() -> list[list[list[int]]]:
    return generated(LLM(**SIZES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    deep_except(
        [
            {"expert_parallel_size": 2},
            {"expert_parallel_size": 4, "tensor_parallel_size": 2, "max_num_seqs": 1},
            {"expert_parallel_size": 2, "speculative_config": LOOKUP},
            {"expert_parallel_size": 2, "num_pages": 4},
        ],
        2,
    ),
    ids=str,
)
def test_requests_on_groups_get_the_tokens_of_one_rank(options: dict[str, Any]) -> None:
    """Sampled ones, several continuations, scored prompts; 4 pages of 16 positions are too few for all at once."""
    llm = LLM(**SIZES | options)
    assert generated(llm) == generate_on_one_group()
    load = llm.engine.use.experts
    assert load is not None and len(load.choices) == options["expert_parallel_size"]
    routed = 2 * 6  # experts of a token in every layer
    assert sum(load.choices) == routed * (llm.engine.use.tokens + llm.engine.use.padding)


@pytest.mark.slow
def test_drafts_of_a_model_without_experts_change_no_token() -> None:
    drafts = {"num_speculative_tokens": 2, "model": "stories"}
    assert (
        generated(LLM(**SIZES, expert_parallel_size=2, speculative_config=drafts)) == generate_on_one_group()
    )


@pytest.mark.slow
def test_full_pages_of_four_bits_are_packed_in_every_group() -> None:
    sizes = SIZES | dict(kv_cache_dtype="int4", block_size=4)
    tokens = generated(LLM(**sizes))
    assert generated(LLM(**sizes, expert_parallel_size=2)) == tokens != generate_on_one_group()


@pytest.mark.slow
def test_prompts_share_the_pages_of_their_group() -> None:
    """Both groups are idle, so the second request goes where its prompt is known."""
    llm = LLM(**SIZES, expert_parallel_size=2, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=2)
    first, second = (llm.generate(PROMPTS[4], params, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 4)
    assert llm.reset_prefix_cache()
    assert llm.generate(PROMPTS[4], params, use_tqdm=False)[0].metrics.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "stories"}, "--ep 2 divides routed experts, and this model has none; leave it out"),
        (
            {"expert_parallel_size": 3},
            "--ep 3 does not divide the 8 experts of this model; take a divisor of 8",
        ),
        ({"expert_parallel_size": 0}, "expert_parallel_size is 0; at least 1 is needed"),
    ],
)
def test_refuses_groups_that_divide_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        LLM(**SIZES | {"expert_parallel_size": 2} | options)
    assert refusal.value.message == message


def schedulers(count: int, options: SchedulerOptions, pages: int, slots: bool) -> list[Scheduler]:
    return [
        Scheduler(PagePool(pages, 4), options, SlotPool(8, 4, 8) if slots else None) for _ in range(count)
    ]


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_random_requests_on_groups_get_what_each_gets_alone(count: int, slots: bool) -> None:
    """Every group has pages of its own; cancelled, forked and preempted requests leave none behind."""
    draw = random.Random(count)
    options = SchedulerOptions(3, 8, speculative_tokens=2)
    groups = schedulers(count, options, 12, slots)
    scheduler = GroupScheduler(groups)
    models = [PagedText(group.cache) for group in groups]
    wanted: dict[Request, list[int]] = {}
    done = 0
    for number in range(400):
        if number < 300 and draw.random() < 0.5:
            prompt = [draw.randrange(3)] * draw.randint(1, 12) + [draw.randrange(40)]
            request = Request(str(number), prompt, draw.randint(1, 8), draw.randrange(2))
            wanted[request] = alone(prompt, request.max_new_tokens)
            scheduler.submit(request)
        running = list(scheduler.running)
        if running and draw.random() < 0.1:
            chosen = draw.choice(running)
            if draw.random() < 0.5:
                del wanted[chosen]
                scheduler.end(chosen)
            else:
                child = scheduler.fork(chosen, f"{chosen.id}'")
                assert child.group == chosen.group
                wanted[child] = wanted[chosen]
        batch = scheduler.schedule()
        for request, chunk in batch.chunks.items():
            batch.chunks[request] = chunk.with_drafts(alone(request.tokens, chunk.draft_slots))
        scheduler.discard_unused_slots(batch)
        sampled: dict[Request, list[int]] = {}
        for model, group_batch in zip(models, batch.split_groups(count)):
            sampled |= model.step(group_batch)
        scheduler.complete_step(batch, sampled)
        for request in batch.chunks:
            if len(request.generated) >= request.max_new_tokens:
                assert list(request.generated) == wanted.pop(request)
                scheduler.end(request)
                done += 1
        for group in groups:
            check_pages(group)
    assert not wanted and done > 50
    assert scheduler.cache.free == scheduler.cache.count
    assert {request.group for request in scheduler.waiting} == set()


def test_a_request_goes_to_the_group_with_the_fewest() -> None:
    scheduler = GroupScheduler(schedulers(3, SchedulerOptions(2, 16), 8, False))
    requests = [Request(str(number), [number, number], 3) for number in range(5)]
    for request in requests:
        scheduler.submit(request)
    assert [request.group for request in requests] == [0, 1, 2, 0, 1]
    scheduler.end(requests[0])
    scheduler.end(requests[3])
    later = Request("later", [7], 1)
    scheduler.submit(later)
    assert later.group == 0
    assert list(scheduler.waiting) == [later, requests[1], requests[4], requests[2]]


def test_an_adopted_request_goes_where_there_is_room() -> None:
    """Four pages of four positions for each group."""
    scheduler = GroupScheduler(schedulers(2, SchedulerOptions(4, 16), 4, False))
    requests = [Request(str(number), [number] * 10, 4) for number in range(3)]
    assert [scheduler.adopt(request) for request in requests] == [True, True, False]
    assert [request.group for request in requests[:2]] == [0, 1]
    scheduler.complete_transfer(requests[1], 5)
    assert requests[1].tokens[-1] == 5
    assert [chunk.request for chunk in scheduler.schedule().chunks.values()] == [requests[1]]


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_every_part_of_all_groups_has_a_shape_of_the_list(drafts: int, mixes: bool) -> None:
    """Each chunk is computed once, by its group; what is added is counted as padding."""
    draw = random.Random(1)
    buckets = Buckets((1, 2, 4, 8), (16, 32, 64), (128, 256, 512), drafts, mixes)
    shapes = set(buckets.shapes())
    options = SchedulerOptions(8, 64, speculative_tokens=drafts)
    groups = [Scheduler(PagePool(200, 16), options) for _ in range(3)]
    scheduler, use, computed, together = GroupScheduler(groups), BucketUse(), 0, 0
    for number in range(200):
        if draw.random() < 0.6:
            scheduler.submit(Request(str(number), [number] * draw.randrange(1, 250), 20))
        batch = scheduler.schedule()
        for request, chunk in batch.chunks.items():
            batch.chunks[request] = chunk.with_drafts([1] * draw.randint(0, chunk.draft_slots))
        scheduled: list[Chunk] = []
        for padded in buckets.pad(*batch.split_groups(3)):
            assert padded.step in shapes
            together += sum(map(bool, padded.groups)) > 1
            for phase in filter(None, (padded, padded.decoding)):
                step = phase.step
                for group, chunks in enumerate(phase.groups):
                    assert len(chunks) <= step.sequences
                    assert all(chunk.num_scheduled_tokens <= step.new_tokens for chunk in chunks)
                    assert all(chunk.seq_len <= step.cache_length for chunk in chunks)
                    if step.phase is Phase.prefill:
                        assert all(chunk.num_computed_tokens <= step.prefix for chunk in chunks)
                    assert {chunk.request.group for chunk in chunks} <= {group}
                    scheduled += chunks
            use.add(padded)
        assert sorted(map(id, scheduled)) == sorted(map(id, batch.chunks.values()))
        computed += batch.tokens
        assert use.tokens == computed
        rows = sum(3 * step.tokens * count for step, count in use.steps.items())
        assert use.padding == rows - computed
        scheduler.complete_step(
            batch, {request: (1,) for request, chunk in batch.chunks.items() if chunk.samples}
        )
    assert together > 50


def test_a_group_that_decodes_is_computed_beside_the_prompts_of_another() -> None:
    buckets = Buckets((1, 2, 4), (16, 64), (128, 256))
    first, second = Batch(), Batch()
    for number in range(2):
        request = Request(str(number), [1] * 31, 1)
        first.chunks[request] = Chunk(request, 30, 1, samples=True)
    request = Request("prompt", [1] * 41, 1, group=1)
    second.chunks[request] = Chunk(request, 0, 40, samples=False)
    (mixed,) = buckets.pad(first, second)
    assert mixed.step == prompt_shape(1, 62, 256, 0, decode_shape(2, 1, 128))
    assert mixed.decoding is not None
    assert (list(map(len, mixed.groups)), list(map(len, mixed.decoding.groups))) == ([0, 1], [2, 0])
    apart = Buckets((1, 2, 4), (16, 64), (128, 256), mixes=False).pad(first, second)
    assert [padded.step.phase for padded in apart] == [Phase.decode, Phase.prefill]


@pytest.mark.slow
def test_the_server_shows_the_load_of_every_group() -> None:
    pytest.importorskip("openai", reason="openai is an extra of development (dev)")
    from tests.serve.conftest import serving
    from tests.serve.test_ends import metric

    words = ("--model", "stories-moe", "--ep", "2", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
    with serving(*words) as served:
        client = served.client()
        name = client.models.list().data[0].id
        answer = client.completions.create(model=name, prompt="Tom had", max_tokens=2, temperature=0)
        assert answer.usage.completion_tokens == 2
        choices = served.engine.use.experts.choices
        _, body = served.send("GET", "/metrics")
        lines = [line for line in body.decode().splitlines() if line.startswith("nkw_expert_choices_total{")]
        assert [float(line.split()[-1]) for line in lines] == choices and min(choices) > 0
        assert ['group="0"' in lines[0], 'group="1"' in lines[1]] == [True, True]
        assert metric(served, "nkw_steps_total") == 2


def test_the_largest_prompts_of_all_groups_are_the_last_part() -> None:
    """Tokens that decode are computed beside the last part of the prompts."""
    batches = (Batch(), Batch())
    for group, number, tokens in ((0, 0, 10), (0, 1, 250), (1, 2, 240)):
        request = Request(str(number), [1] * (tokens + 1), 1, group=group)
        batches[group].chunks[request] = Chunk(request, 0, tokens, samples=False)
    padded_batches = Buckets((1, 2, 4), (16, 256), (256, 512), mixes=False).pad(*batches)
    assert [
        [[chunk.num_scheduled_tokens for chunk in chunks] for chunks in padded.groups]
        for padded in padded_batches
    ] == [
        [[10], []],
        [[250], [240]],
    ]
