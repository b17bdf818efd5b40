"""Recurrent states in slots: every request has its own, and prefixes begin with snapshots of those of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from model.engine import Request, Scheduler, SchedulerOptions
from model.engine.kv_cache import PageCopies
from model.state import SlotPool
from tests.engine.paged_text import alone
from tests.engine.test_scheduler import KINDS, OPTIONS, Service, campaign, request

LAYERS = ((), (None,), (None, 5))
"""Windows of the attention layers beside the recurrent ones: none at all, all positions, a window as well."""

DRAFTS = replace(OPTIONS, speculative_tokens=3)


def service_of(
    slots: int,
    options: SchedulerOptions = OPTIONS,
    interval: int = 16,
    windows: Sequence[int | None] = (None,),
) -> Service:
    """Return a service of recurrent and attention layers with 32 pages of 4 positions."""
    return Service(32, 4, options, windows, SlotPool(slots, 4, interval))


def slots_of(service: Service) -> SlotPool:
    slots = service.scheduler.cache.slots
    assert slots is not None
    return slots


@pytest.mark.parametrize(
    ("position", "prompt", "after"),
    [
        (0, 0, 16),
        (0, 4, 16),  # of a prompt that ends with a page, its last token is computed again
        (0, 5, 4),
        (3, 5, 4),
        (4, 5, 16),
        (0, 17, 16),
        (0, 21, 16),
        (15, 21, 16),
        (16, 21, 20),
        (20, 21, 32),
        (16, 16, 32),
    ],
)
def test_snapshots_are_taken_every_interval_and_before_the_last_token_of_a_prompt(
    position: int, prompt: int, after: int
) -> None:
    assert SlotPool(1, 4, 16).find_next_snapshot(position, prompt) == after


@pytest.mark.parametrize("windows", LAYERS)
def test_chunks_end_where_snapshots_are_taken(windows: Sequence[int | None]) -> None:
    service = service_of(4, SchedulerOptions(4, 64), windows=windows)
    service.submit(request("a", range(39), new=2))
    assert service.run() == [["a:16"], ["a:16"], ["a:4"], ["a:3"], ["a:1"]]
    assert list(service.done[0].generated) == alone(range(39), 2)


@pytest.mark.parametrize("change", [{"prefix_caching": False}, {"chunked_prefill": False}])
def test_chunks_do_not_end_there_without_a_prefix_cache_or_without_chunks(change: dict[str, bool]) -> None:
    service = service_of(4, replace(SchedulerOptions(4, 64), **change))
    service.submit(request("a", range(39), new=2))
    assert service.run() == [["a:39"], ["a:1"]]


@pytest.mark.parametrize(
    ("tokens", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (19, 16), (20, 16), (21, 20)]
)
@pytest.mark.parametrize("windows", LAYERS)
def test_an_equal_prompt_goes_on_from_its_last_snapshot(
    tokens: int, cached: int, windows: Sequence[int | None]
) -> None:
    service = service_of(4, SchedulerOptions(4, 64), windows=windows)
    for name in "ab":
        service.submit(request(name, range(tokens), new=3))
        service.run()
    assert [request.shared_tokens for request in service.done] == [0, cached]
    assert [list(request.generated) for request in service.done] == [alone(range(tokens), 3)] * 2


def test_a_prefix_is_shared_up_to_the_last_common_snapshot() -> None:
    """Pages of 36 tokens are known, but states behind 16, 32 and 36 tokens only: 31 common tokens give 16."""
    service = service_of(8, SchedulerOptions(4, 64))
    for prompt in (range(39), [*range(31), *[49] * 8], [*range(33), 49], [*range(37), 49]):
        service.submit(request("a", prompt, new=2))
        service.run()
    assert [request.shared_tokens for request in service.done] == [0, 16, 32, 36]


def test_a_snapshot_without_its_pages_is_no_prefix() -> None:
    service = Service(6, 4, SchedulerOptions(4, 64), slots=SlotPool(8, 4, 16))
    service.submit(request("a", range(17), new=1))
    service.run()
    service.submit(request("b", range(20, 41), new=1))  # takes pages of a, whose snapshot stays
    service.run()
    again = request("c", range(17), new=1)
    assert slots_of(service).count_known_pages(again.compute_page_keys(4, 4)) == 4
    service.submit(again)
    service.run()
    assert again.shared_tokens == 0


def test_a_conversation_goes_on_behind_the_answer() -> None:
    """The answer passes position 32, where a snapshot is taken while it is decoded."""
    service = service_of(4, SchedulerOptions(4, 64))
    service.submit(request("a", range(30), new=8))
    service.run()
    text = [*range(30), *alone(range(30), 8)]
    service.submit(request("b", [*text, 1, 2, 3], new=2))
    service.run()
    assert [request.shared_tokens for request in service.done] == [0, 32]


@pytest.mark.parametrize(("slots", "cached"), [(1, [0, 16]), (2, [0, 20]), (3, [0, 20])])
def test_where_slots_are_short_there_are_fewer_snapshots(slots: int, cached: Sequence[int]) -> None:
    """With one slot, the state behind 16 tokens is overwritten at 20, whose own is when the last token comes."""
    service = service_of(slots, SchedulerOptions(4, 64))
    for name in "ab":
        service.submit(request(name, range(21), new=1))
        service.run()
    assert [request.shared_tokens for request in service.done] == ([0, 0] if slots == 1 else cached)


def test_snapshots_are_given_away_by_the_time_they_were_left() -> None:
    service = service_of(3, SchedulerOptions(1, 64))
    for number in range(3):  # of three slots two are left as snapshots
        service.submit(request(str(number), [number] * 5, new=1))
        service.run()
    for number, cached in ((0, 0), (2, 4)):
        again = request("again", [number] * 5, new=1)
        assert service.scheduler.cache.count_cached_blocks(again) * 4 == cached


def test_a_request_waits_for_a_slot() -> None:
    service = service_of(1)
    service.submit(request("a", range(3), new=2), request("b", range(3), new=1, arrival=1.0))
    assert service.run() == [["a:3"], ["a:1"], ["b:3"]]


def test_a_preempted_request_gives_back_its_slot_and_goes_on_from_a_snapshot() -> None:
    service = service_of(3, SchedulerOptions(1, 64))
    late = request("late", range(30), new=8)
    service.submit(late)
    for _ in range(6):
        service.step()
    assert late.computed == 33
    service.submit(request("urgent", range(40, 45), new=1, priority=-1))
    service.step()
    assert (late.slot, late.preemptions) == (None, 1)
    service.run()
    assert late.shared_tokens == 32
    assert list(late.generated) == alone(range(30), 8)


def test_a_fork_copies_the_state_that_both_change() -> None:
    service = service_of(2)
    service.submit(request("a", range(6), new=4))
    service.step()
    service.step()
    parent = service.scheduler.running[0]
    child = service.scheduler.fork(parent, "b")
    child.tokens[-1] = 49
    assert parent.slot == child.slot
    batch = service.scheduler.schedule()
    assert sorted(pool_index for pool_index, _ in batch.copies) == [
        0,
        1,
    ]  # the page, and behind all kinds of pages the slot
    service.scheduler.complete_step(batch, service.model.step(batch))
    service.run()
    assert list(parent.generated) == alone(range(6), 4)
    assert list(child.generated[1:]) == alone([*range(6), 49], 3)


def test_a_copy_for_a_request_that_gives_back_its_slot_is_not_made() -> None:
    service = service_of(4)
    service.submit(request("a", range(9), new=1))
    service.run()
    cache, new_request, copies = service.scheduler.cache, request("b", range(9)), PageCopies()
    assert cache.start(new_request, cache.count_cached_blocks(new_request), 9, copies)
    assert len(copies) == 1
    cache.release(new_request, copies)
    assert (copies, cache.free) == ({}, cache.count)


@pytest.mark.parametrize(("right", "computed"), [(3, 9), (2, 5), (0, 5)])
def test_a_wrong_draft_brings_the_state_before_drafts_back(right: int, computed: int) -> None:
    """The drafts that were right are computed again, with the token behind them, in one chunk."""
    service = service_of(3, replace(DRAFTS, max_num_batched_tokens=16), windows=(None,))
    new_request = request("a", range(5), new=9)
    service.submit(new_request)
    while new_request.computed < 5:
        service.step()
    batch = service.scheduler.schedule()
    drafts = alone(new_request.tokens, 3)
    drafts[right:] = [49] * (3 - right)
    batch.chunks[new_request] = batch.chunks[new_request].with_drafts(drafts)
    service.scheduler.complete_step(batch, service.model.step(batch))
    assert (new_request.computed, new_request.missing, new_request.kept_slot) == (
        computed,
        1 if right == 3 else right + 2,
        None,
    )
    (chunk,) = service.scheduler.schedule().chunks.values()
    assert (chunk.num_scheduled_tokens, chunk.samples) == (new_request.missing, True)


@pytest.mark.parametrize(("slots", "room"), [(1, 0), (2, 3)])
def test_drafts_need_a_second_slot(slots: int, room: int) -> None:
    service = service_of(slots, DRAFTS)
    service.submit(request("a", range(3), new=9))
    service.step()
    (chunk,) = service.scheduler.schedule().chunks.values()
    assert chunk.draft_slots == room


def test_states_without_drafts_are_not_copied() -> None:
    """A proposer found nothing: the state that was to be kept is the request's again before the step."""
    service = service_of(2, DRAFTS)
    new_request = request("a", range(3), new=9)
    service.submit(new_request)
    service.step()
    batch = service.scheduler.schedule()
    assert len(batch.copies) == 1
    service.scheduler.discard_unused_slots(batch)
    assert (batch.copies, new_request.kept_slot) == ({}, None)
    service.scheduler.complete_step(batch, service.model.step(batch))
    service.run()
    assert list(new_request.generated) == alone(range(3), 9)


def test_an_adopted_request_brings_its_state() -> None:
    scheduler = Scheduler([], SchedulerOptions(2, 8), SlotPool(1, 4, 8))
    adopted, other = Request("a", list(range(9)), 3), Request("b", list(range(9)), 3)
    assert scheduler.adopt(adopted)
    assert not scheduler.adopt(other)  # there is no second slot
    assert (adopted.slot, adopted.shared_tokens) == (0, 0)
    scheduler.complete_transfer(adopted, 9)
    batch = scheduler.schedule()
    assert [(chunk.num_computed_tokens, chunk.num_scheduled_tokens) for chunk in batch.chunks.values()] == [
        (9, 1)
    ]
    assert batch.copies == {}
    scheduler.end(adopted)
    assert scheduler.cache.free == 1


def test_a_forgotten_prefix_is_computed_again() -> None:
    service = service_of(4)
    for _ in range(2):
        service.submit(request("a", range(9), new=1))
        service.run()
        assert service.scheduler.reset_prefix_cache()
    assert [request.shared_tokens for request in service.done] == [0, 0]


def test_the_text_notices_a_state_that_is_not_copied() -> None:
    service = service_of(4)
    for name in "ab":
        service.submit(request(name, range(9), new=1))
        if name == "a":
            service.run()
    batch = service.scheduler.schedule()
    batch.copies.clear()
    with pytest.raises(AssertionError, match="not that before the first token"):
        service.model.step(batch)


@pytest.mark.parametrize("slots", [(1, 2), (4, 7, 30)])
@pytest.mark.parametrize("windows", LAYERS)
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_what_it_would_get_alone(
    options: SchedulerOptions, seed: int, windows: Sequence[int | None], slots: Sequence[int]
) -> None:
    assert campaign(options, seed, 400, windows, slots) > 20


@pytest.mark.deep
@pytest.mark.parametrize("slots", [(1, 2), (4, 7, 30)])
@pytest.mark.parametrize("windows", LAYERS)
@pytest.mark.parametrize("options", KINDS)
def test_every_request_gets_what_it_would_get_alone_in_many_steps(
    options: SchedulerOptions, windows: Sequence[int | None], slots: Sequence[int]
) -> None:
    assert campaign(options, 77, 100_000, windows, slots) > 2_000
