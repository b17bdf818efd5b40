"""What vLLM's tests ask of its scheduler, asked of ours; the table of both stands in tests/engine/README.md."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from model.engine import SchedulerOptions
from model.engine.speculation import Acceptance
from tests.engine.paged_text import alone
from tests.engine.test_scheduler import Service, request

ROOMY = SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=64)


def ids(service: Service) -> tuple[list[str], list[str]]:
    """Return the requests that run and those that wait, in order."""
    scheduler = service.scheduler
    return [request.id for request in scheduler.running], [request.id for request in scheduler.waiting]


def test_requests_wait_until_a_step_and_leave_when_they_end() -> None:
    service = Service(pages=64, options=ROOMY)
    requests = [request(str(n), range(n, n + 4)) for n in range(10)]
    for count, submitted in enumerate(requests, 1):
        service.submit(submitted)
        assert len(service.scheduler.waiting) == count
    for ended in requests[:5]:
        service.scheduler.end(ended)
    assert ids(service) == ([], ["5", "6", "7", "8", "9"])
    assert service.step() == [f"{n}:4" for n in range(5, 10)]
    assert ids(service) == (["5", "6", "7", "8", "9"], [])


@pytest.mark.parametrize("most", [1, 3, 10])
def test_no_more_requests_run_than_may(most: int) -> None:
    service = Service(pages=64, options=replace(ROOMY, max_num_seqs=most))
    service.submit(*(request(str(n), range(n, n + 4)) for n in range(10)))
    assert len(service.step()) == most
    assert len(service.scheduler.waiting) == 10 - most


def test_long_prompts_share_steps_in_chunks() -> None:
    service = Service(pages=64, options=ROOMY)
    service.submit(*(request(str(n), [n] * 50, new=2) for n in range(3)))
    assert [service.step() for _ in range(4)] == [
        ["0:50", "1:14"],
        ["0:1", "1:36", "2:27"],
        ["1:1", "2:23"],
        ["2:1"],
    ]


@pytest.mark.parametrize(("chunked", "started"), [(True, ["0:50", "1:14"]), (False, ["0:50"])])
def test_short_prompts_do_not_overtake_a_long_one(chunked: bool, started: list[str]) -> None:
    service = Service(pages=64, options=replace(ROOMY, chunked_prefill=chunked))
    service.submit(*(request(str(n), [n] * tokens) for n, tokens in enumerate((50, 50, 3, 3))))
    assert service.step() == started


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_no_token_is_computed_that_nobody_needs(new: int) -> None:
    service = Service(options=replace(ROOMY, prefix_caching=False))
    service.submit(request("a", range(7), new), request("b", range(5), new))
    sizes = [int(entry.split(":")[1]) for step in service.run() for entry in step]
    assert sum(sizes) == 7 + 5 + 2 * (new - 1)


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ((2, 0, 1), (1, 2, 3), "120"),
        ((1, 1, 1), (3, 1, 2), "120"),
        ((2, 1, 1, 0), (1, 3, 2, 4), "3210"),
        ((1, 1, 1, 1), (4, 1, 3, 2), "1320"),
        ((0, 0, 0), (1, 1, 1), "012"),
    ],
)
def test_requests_go_by_priority_then_arrival_then_submission(priorities, arrivals, order: str) -> None:
    service = Service(pages=64, options=ROOMY)
    for number, (priority, arrival) in enumerate(zip(priorities, arrivals)):
        service.submit(request(str(number), [number] * 3, priority=priority, arrival=float(arrival)))
    assert service.step() == [f"{number}:3" for number in order]


def test_one_place_serves_all_priorities_in_order() -> None:
    service = Service(options=replace(ROOMY, max_num_seqs=1))
    for number, priority in enumerate((5, 1, 8, 3, 2, 7, 4, 6)):
        service.submit(request(str(priority), [number] * 3, new=1, priority=priority))
    service.run()
    assert [request.id for request in service.done] == sorted("51832746")


def test_the_worst_priority_gives_up_its_pages_not_the_latest() -> None:
    service = Service(pages=5, options=replace(ROOMY, prefix_caching=False))
    service.submit(request("low", range(8), new=8, priority=5))
    service.step()
    service.submit(request("high", range(8), new=8, priority=0, arrival=1.0))
    assert service.step() == ["low:1", "high:8"]
    assert service.scheduler.cache.free == 0
    assert service.step() == ["high:1"]
    assert ids(service) == (["high"], ["low"])
    service.run()
    assert [request.preemptions for request in service.done] == [0, 1]


def test_nobody_is_preempted_where_there_is_room() -> None:
    service = Service(options=replace(ROOMY, max_num_seqs=3))
    service.submit(request("a", range(3), priority=5), request("b", range(4), priority=5))
    service.step()
    service.submit(request("c", range(5), priority=0, arrival=1.0))
    service.step()
    assert ids(service) == (["c", "a", "b"], [])


def test_a_preempted_request_computes_its_prompt_and_its_tokens_again() -> None:
    service = Service(pages=5, options=replace(ROOMY, prefix_caching=False))
    low = request("low", range(7), new=9, priority=1)
    service.submit(low)
    service.step()
    service.submit(request("high", range(8), new=5, priority=0))
    while not low.preemptions:
        service.step()
    chosen = list(low.generated)
    assert chosen
    while "low" not in ids(service)[0]:
        last = service.step()
    assert last[-1] == f"low:{7 + len(chosen)}"
    assert list(low.generated)[: len(chosen)] == chosen == alone(range(7), len(chosen))


def test_the_others_decode_in_the_step_that_preempts_one_before_them() -> None:
    service = Service(pages=7, options=replace(ROOMY, prefix_caching=False))
    service.submit(request("worst", range(12), new=4, priority=9))
    service.step()
    service.submit(
        request("best", range(8), new=9, priority=0), request("middle", range(1), new=4, priority=1)
    )
    assert service.step() == ["worst:1", "best:8", "middle:1"]
    assert service.scheduler.cache.free == 0
    assert service.step() == ["best:1", "middle:1"]


def test_a_step_that_preempts_starts_nobody() -> None:
    service = Service(pages=4, options=replace(ROOMY, prefix_caching=False))
    service.submit(request("a", range(8), new=8), request("b", range(8), new=4, arrival=1.0))
    service.step()
    service.submit(request("c", range(1), new=1, arrival=2.0))
    batch = service.scheduler.schedule()
    assert [request.id for request in batch.preempted] == ["b"]
    assert [request.id for request in batch.chunks] == ["a"]
    service.scheduler.complete_step(batch, service.model.step(batch))
    service.run()
    assert len(service.done) == 3


def test_requests_cancelled_during_a_step_get_no_token_of_it() -> None:
    service = Service(pages=64, options=ROOMY)
    requests = [request(str(n), [n] * 5, new=20) for n in range(10)]
    service.submit(*requests)
    order = (0, 8, 3, 1, 6, 4, 2, 5, 7, 9)
    for number in order:
        batch = service.scheduler.schedule()
        answers = service.model.step(batch)
        service.scheduler.end(requests[number])
        service.scheduler.complete_step(batch, answers)
    assert [len(requests[number].generated) for number in order] == list(range(10))
    assert service.scheduler.cache.free == 64
    assert not service.scheduler.schedule().chunks


def test_prompts_get_no_drafts_until_they_decode() -> None:
    service = Service(pages=64, options=replace(ROOMY, max_num_batched_tokens=50, speculative_tokens=3))
    service.submit(request("a", range(40), new=8), request("b", range(1), new=1))
    batch = service.scheduler.schedule()
    assert [chunk.draft_slots for chunk in batch.chunks.values()] == [0, 0]
    service.scheduler.complete_step(batch, service.model.step(batch))
    assert next(iter(service.scheduler.schedule().chunks.values())).draft_slots == 3


def test_the_last_token_of_a_prompt_gets_no_drafts() -> None:
    service = Service(pages=64, options=SchedulerOptions(2, 8, speculative_tokens=3))
    service.submit(request("a", range(9), new=8))
    chunks = []
    for _ in range(3):
        batch = service.scheduler.schedule()
        chunks += [(chunk.num_scheduled_tokens, chunk.draft_slots) for chunk in batch.chunks.values()]
        service.scheduler.complete_step(batch, service.model.step(batch))
    assert chunks == [(8, 0), (1, 0), (1, 3)]


def test_drafts_count_in_the_budget_of_a_step() -> None:
    service = Service(pages=64, options=SchedulerOptions(2, 10, speculative_tokens=7))
    service.submit(request("a", range(3), new=20), request("b", range(4), new=20))
    service.step()
    batch = service.scheduler.schedule()
    assert [chunk.draft_slots for chunk in batch.chunks.values()] == [7, 1]


def test_drafts_take_nothing_from_prompts_that_have_begun() -> None:
    service = Service(pages=64, options=SchedulerOptions(2, 8, speculative_tokens=7))
    service.submit(request("a", range(3), new=20), request("b", range(12), new=2))
    assert service.step() == ["a:3", "b:5"]
    batch = service.scheduler.schedule()
    assert [(chunk.num_scheduled_tokens, chunk.draft_slots) for chunk in batch.chunks.values()] == [
        (1, 0),
        (7, 0),
    ]
    service.scheduler.complete_step(batch, service.model.step(batch))
    batch = service.scheduler.schedule()
    assert [(chunk.num_scheduled_tokens, chunk.draft_slots) for chunk in batch.chunks.values()] == [
        (1, 6),
        (1, 0),
    ]


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_no_draft_goes_beyond_the_last_position(left: int) -> None:
    service = Service(options=replace(ROOMY, speculative_tokens=3))
    service.submit(request("a", range(3), new=left + 1))
    service.step()
    (chunk,) = service.scheduler.schedule().chunks.values()
    assert chunk.draft_slots == min(3, left - 1)


@pytest.mark.parametrize(
    ("steps", "verified", "accepted"),
    [
        ([(3, 3)], [1, 1, 1], [1, 1, 1]),
        ([(3, 1)], [1, 1, 1], [1, 0, 0]),
        ([(2, 2), (1, 1)], [2, 1], [2, 1]),
        ([(3, 2), (3, 1)], [2, 2, 2], [2, 1, 0]),
        ([], [], []),
    ],
)
def test_drafts_are_counted_by_their_place(steps, verified, accepted) -> None:
    acceptance = Acceptance()
    for drafts, right in steps:
        acceptance.add(drafts, right)
    positions = range(len(verified))
    assert [acceptance.verified[position] for position in positions] == verified
    assert [acceptance.accepted[position] for position in positions] == accepted
    assert acceptance.rates == [num_accepted / all for num_accepted, all in zip(accepted, verified)]


KINDS = {
    "chunks": (SchedulerOptions(3, 8), 1),
    "few tokens": (SchedulerOptions(3, 3), 1),
    "drafts": (SchedulerOptions(3, 8, speculative_tokens=3), 1),
    "whole prompts": (SchedulerOptions(3, 64, chunked_prefill=False), 4),
    "static": (SchedulerOptions(3, 8, continuous=False), 1),
    "no prefixes": (SchedulerOptions(3, 8, prefix_caching=False), 1),
}
"""Options, and in how many steps the first request in order computes a token at least."""


@pytest.mark.parametrize("schedule_kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_wait_is_bounded_by_what_was_before(schedule_kind: str, seed: int) -> None:
    options, steps_of_a_token = KINDS[schedule_kind]
    draw = random.Random(seed)
    service = Service(pages=draw.choice((5, 8, 20)), options=options)
    ends_at_last, number, latest = 0, 0, {}
    for step in range(400):
        for _ in range(draw.choice((0, 0, 1, 3)) if step < 250 else 0):
            prompt = [draw.randrange(50) for _ in range(draw.randint(1, 12))]
            new_request = request(str(number), prompt, draw.choice((1, 1, 4, 8)), arrival=float(step))
            service.submit(new_request)
            ends_at_last = max(ends_at_last, step) + steps_of_a_token * new_request.max_positions
            latest[new_request.id], number = ends_at_last, number + 1
        if service.scheduler.running or service.scheduler.waiting:
            before = len(service.done)
            service.step()
            assert all(step < latest[request.id] for request in service.done[before:])
    service.run()
    assert len(service.done) == number > 100


@pytest.mark.parametrize("schedule_kind", KINDS)
def test_those_who_come_later_cannot_keep_a_request_from_its_tokens(schedule_kind: str) -> None:
    options, steps_of_a_token = KINDS[schedule_kind]
    service = Service(pages=8, options=options)
    first = request("first", range(14), new=10)
    service.submit(first)
    steps = 0
    while first not in service.done:
        for number in range(3):
            service.submit(request(f"{steps} {number}", [number, steps % 50], 1, arrival=1.0 + steps))
        service.step()
        steps += 1
        assert steps <= steps_of_a_token * first.max_positions
