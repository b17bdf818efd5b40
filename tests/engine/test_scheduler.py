"""Every request gets what it would get alone, and no page is lost or shared wrongly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from model.engine import Request, Scheduler, SchedulerOptions
from model.errors import ModelError
from model.state import PagePool, SlotPool
from tests.engine.paged_text import PagedText, alone, check_pages, next_token

OPTIONS = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=8)
KINDS = (
    OPTIONS,
    replace(OPTIONS, chunked_prefill=False, max_num_batched_tokens=64),
    replace(OPTIONS, prefix_caching=False),
    replace(OPTIONS, continuous=False),
    replace(OPTIONS, speculative_tokens=3),
)


def request(
    name: str, prompt: Sequence[int], new: int = 4, priority: int = 0, arrival: float = 0.0
) -> Request:
    return Request(name, list(prompt), new, priority, arrival)


class Service:
    """A scheduler with a model of text, run to the end."""

    def __init__(
        self,
        pages: int = 16,
        block: int = 4,
        options: SchedulerOptions = OPTIONS,
        windows: Sequence[int | None] = (None,),
        slots: SlotPool | None = None,
    ) -> None:
        self.scheduler = Scheduler([PagePool(pages, block, window) for window in windows], options, slots)
        self.model = PagedText(self.scheduler.cache)
        self.done: list[Request] = []
        self.draw = random.Random(1)

    def step(self) -> list[str]:
        """Run one step and return the requests that computed a chunk, with its size, in order."""
        batch = self.scheduler.schedule()
        for request, chunk in batch.chunks.items():
            batch.chunks[request] = chunk.with_drafts(self.drafts(request, chunk.draft_slots))
        self.scheduler.discard_unused_slots(batch)
        assert batch.tokens <= self.scheduler.options.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.options.max_num_seqs
        assert batch.chunks or not (self.scheduler.running or self.scheduler.waiting)
        self.scheduler.complete_step(batch, self.model.step(batch))
        for request in batch.chunks:
            if len(request.generated) == request.max_new_tokens:
                self.scheduler.end(request)
                self.done.append(request)
        check_pages(self.scheduler)
        return [f"{request.id}:{chunk.num_scheduled_tokens}" for request, chunk in batch.chunks.items()]

    def fail_step(self) -> None:
        """Run a step that raises, before or after the model has written; preempt all running requests."""
        batch = self.scheduler.schedule()
        for request, chunk in batch.chunks.items():
            batch.chunks[request] = chunk.with_drafts(self.drafts(request, chunk.draft_slots))
        self.scheduler.discard_unused_slots(batch)
        if self.draw.random() < 0.5:
            self.model.step(batch)
        for request in list(self.scheduler.running):
            self.scheduler.end(request)
            self.scheduler.resume(request)
        check_pages(self.scheduler)
        assert self.scheduler.cache.free == self.scheduler.cache.count

    def drafts(self, request: Request, slots: int) -> list[int]:
        """Return right drafts, of which one is wrong now and then."""
        drafts = alone(request.tokens, self.draw.randint(0, slots))
        if drafts and self.draw.random() < 0.5:
            drafts[self.draw.randrange(len(drafts))] = 49
        return drafts

    def run(self) -> list[list[str]]:
        """Run steps until every request has ended."""
        steps = []
        while self.scheduler.running or self.scheduler.waiting:
            steps.append(self.step())
        return steps

    def submit(self, *requests: Request) -> None:
        """Submit requests."""
        for request in requests:
            self.scheduler.submit(request)


def test_one_request_runs_prompt_then_tokens() -> None:
    service = Service()
    service.submit(request("a", range(5), new=3))
    assert service.run() == [["a:5"], ["a:1"], ["a:1"]]
    assert list(service.done[0].generated) == alone(range(5), 3)
    assert service.scheduler.cache.free == 16


@pytest.mark.parametrize("tokens", [7, 8, 9, 16, 17])
def test_prompts_are_cut_into_chunks_of_the_budget(tokens: int) -> None:
    service = Service()
    service.submit(request("a", range(tokens), new=1))
    chunks = [int(step[0].split(":")[1]) for step in service.run()]
    assert sum(chunks) == tokens
    assert all(chunk == 8 for chunk in chunks[:-1])


def test_decoding_goes_before_chunks_of_prompts() -> None:
    service = Service()
    service.submit(request("a", range(3), new=4))
    service.step()
    service.submit(request("b", range(20), arrival=1.0))
    assert service.step() == ["a:1", "b:7"]


def test_without_chunks_a_prompt_has_a_step_of_its_own() -> None:
    service = Service(options=KINDS[1])
    service.submit(request("a", range(3)))
    service.step()
    service.submit(request("b", range(20), arrival=1.0))
    assert service.step() == ["b:20"]
    assert service.step() == ["a:1", "b:1"]


def test_static_batches_start_when_the_one_before_has_ended() -> None:
    service = Service(options=KINDS[3])
    service.submit(request("a", range(3), new=1), request("b", range(3), new=3))
    assert service.step() == ["a:3", "b:3"]
    service.submit(request("c", range(3), arrival=1.0))
    assert [service.step(), service.step(), service.step()] == [["b:1"], ["b:1"], ["c:3"]]


def test_an_equal_prefix_is_computed_once() -> None:
    service = Service()
    service.submit(request("a", range(8), new=1))
    service.run()
    service.submit(request("b", [*range(8), 9], new=1), request("c", range(8), new=1, arrival=1.0))
    # Of an equal prompt at least one token is computed, so its last page is not shared.
    assert service.step() == ["b:1", "c:4"]


def test_an_adopted_request_decodes_when_its_pages_have_arrived() -> None:
    scheduler = Scheduler(PagePool(4, 4), SchedulerOptions(2, 8))
    adopted, equal = (request(name, range(9), new=3) for name in "ab")
    assert scheduler.adopt(adopted)
    assert (len(adopted.tables[0].pages), scheduler.cache.free) == (3, 1)
    assert not scheduler.adopt(equal)  # its pages are not known before they arrive, and too few are free
    assert not scheduler.schedule().chunks
    scheduler.complete_transfer(adopted, 9)
    assert scheduler.adopt(equal)  # two pages are shared
    assert (equal.shared_tokens, scheduler.cache.free) == (8, 0)
    (chunk,) = scheduler.schedule().chunks.values()
    assert (chunk.request, chunk.num_computed_tokens, chunk.num_scheduled_tokens, chunk.samples) == (
        adopted,
        9,
        1,
        True,
    )
    for finished in (adopted, equal):
        scheduler.end(finished)
    assert scheduler.cache.free == 4


def test_a_request_is_adopted_where_no_other_waits_and_a_place_is_free() -> None:
    scheduler = Scheduler(PagePool(16, 4), SchedulerOptions(2, 8))
    scheduler.submit(request("a", range(4)))
    assert not scheduler.adopt(request("b", range(4)))
    scheduler.schedule()
    assert scheduler.adopt(request("c", range(4)))
    assert not scheduler.adopt(request("d", range(4)))  # two run
    scheduler.end(scheduler.running[1])
    assert scheduler.adopt(request("d", range(4)))
    with pytest.raises(ModelError, match="the cache has 16 pages"):
        scheduler.adopt(request("e", range(65), new=1))


def test_a_request_preempted_before_its_pages_arrived_computes_them_again() -> None:
    scheduler = Scheduler(PagePool(3, 4), SchedulerOptions(2, 8))
    first, second = request("a", range(4), new=6), request("b", range(4, 8), new=2, arrival=1.0)
    scheduler.submit(first)
    scheduler.complete_step(scheduler.schedule(), {first: (1,)})
    assert scheduler.adopt(second)
    while not second.preemptions:
        scheduler.complete_step(scheduler.schedule(), {first: (1,)})
    scheduler.complete_transfer(second, 8)
    assert (second.tables, second.missing) == ([], 5)
    scheduler.end(first)
    (chunk,) = scheduler.schedule().chunks.values()
    assert (chunk.request, chunk.num_computed_tokens, chunk.num_scheduled_tokens) == (second, 0, 5)


def test_a_prefix_counts_from_the_first_token() -> None:
    service = Service()
    service.submit(request("a", range(9), new=1))
    service.run()
    service.submit(request("b", [9, *range(1, 9)], new=1))
    assert service.step() == ["b:8"]


def test_a_root_keeps_equal_prefixes_apart() -> None:
    service = Service()
    service.submit(request("a", range(9), new=1))
    service.run()
    other = request("b", range(9), new=1)
    other.root = b"another adapter"
    service.submit(other)
    assert service.step() == ["b:8"]


def test_released_pages_are_given_away_oldest_and_last_first() -> None:
    service = Service(pages=4)
    service.submit(request("a", range(9), new=1))
    service.run()
    service.submit(request("b", range(20, 24), new=1))  # the last page of a goes first, which is not full
    service.run()
    service.submit(request("c", range(30, 34), new=1))  # then the page never used
    service.run()
    service.submit(request("a again", range(9), new=1))
    assert service.step() == ["a again:1"]


def test_the_last_request_in_order_is_preempted() -> None:
    service = Service(pages=4, options=replace(OPTIONS, prefix_caching=False))
    service.submit(request("a", range(6), new=6), request("b", range(2), new=8, arrival=1.0))
    steps = service.run()
    assert [request.preemptions for request in service.done] == [0, 1]
    assert [list(request.generated) for request in service.done] == [alone(range(6), 6), alone(range(2), 8)]
    assert steps[0] == ["a:6", "b:2"]


def test_a_lower_priority_number_runs_first_and_takes_the_place_of_others() -> None:
    service = Service(options=replace(OPTIONS, max_num_seqs=1))
    service.submit(request("a", range(3)), request("b", range(3), arrival=1.0))
    assert service.step() == ["a:3"]
    service.submit(request("urgent", range(4), new=1, priority=-1, arrival=2.0))
    assert service.step() == ["urgent:4"]
    assert [request.id for request in service.scheduler.waiting] == ["a", "b"]
    service.run()
    assert [request.id for request in service.done] == ["urgent", "a", "b"]


def test_a_fork_copies_the_page_that_both_write() -> None:
    service = Service()
    service.submit(request("a", range(6), new=4))
    service.step()
    child = service.scheduler.fork(service.scheduler.running[0], "b")
    child.tokens[-1] = 49  # the child chose otherwise
    batch = service.scheduler.schedule()
    assert len(batch.copies) == 1
    service.scheduler.complete_step(batch, service.model.step(batch))
    service.run()
    assert child.tables == []
    assert list(child.generated[1:]) == alone([*range(6), 49], 3)


def test_a_page_reserved_for_drafts_does_not_stand_for_a_copy() -> None:
    service = Service(pages=3, options=replace(OPTIONS, speculative_tokens=3))
    service.submit(request("a", range(6), new=6))
    service.step()
    parent = service.scheduler.running[0]
    batch = service.scheduler.schedule()
    service.scheduler.complete_step(
        batch, {parent: (next_token(parent.tokens),)}
    )  # no draft came, its page stays reserved
    assert (parent.computed, len(parent.tables[0].pages), service.scheduler.cache.free) == (7, 3, 0)
    service.scheduler.fork(parent, "b")
    assert service.scheduler.schedule().preempted


def test_a_fork_of_full_pages_copies_nothing() -> None:
    service = Service()
    service.submit(request("a", range(8), new=4))
    service.step()
    service.scheduler.fork(service.scheduler.running[0], "b")
    assert service.scheduler.schedule().copies == {}


@pytest.mark.parametrize(("new", "fits"), [(8, True), (9, True), (10, False)])
def test_a_request_that_never_fits_is_refused(new: int, fits: bool) -> None:
    service = Service(pages=3)
    new_request = request("a", range(4), new=new)
    if fits:
        service.submit(new_request)
        service.run()
    else:
        with pytest.raises(ModelError, match="13 positions, 4 pages of 4; the cache has 3 pages"):
            service.submit(new_request)


@pytest.mark.parametrize(
    ("window", "most"), [(1, 1), (2, 2), (4, 2), (5, 2), (6, 3), (8, 3), (9, 3), (10, 4)]
)
def test_a_sequence_holds_its_window_and_one_page_however_long_it_is(window: int, most: int) -> None:
    service = Service(64, windows=(None, window))
    service.submit(request("a", range(3), new=60))
    window_pages = []
    while service.scheduler.waiting or service.scheduler.running:
        service.step()
        window_pages += [
            len(request.tables[1].pages) for request in service.scheduler.running if request.computed > 12
        ]
    assert max(window_pages) == most
    assert list(service.done[0].generated) == alone(range(3), 60)


@pytest.mark.parametrize(("pages", "fits"), [(4, False), (5, True), (6, True)])
def test_a_request_needs_its_window_and_a_chunk_of_its_prompt(pages: int, fits: bool) -> None:
    """A window of 6 takes 2 pages of 4 before a page, and a chunk of 8 begins in one page and ends in the third."""
    service = Service(options=OPTIONS)
    service.scheduler = Scheduler([PagePool(64, 4), PagePool(pages, 4, 6)], OPTIONS)
    service.model = PagedText(service.scheduler.cache)
    new_request = request("a", range(50), new=9)
    if not fits:
        with pytest.raises(
            ModelError, match="5 pages of 4 of layers that see 6 of them; the cache has 4 pages"
        ):
            service.submit(new_request)
        return
    service.submit(new_request)
    service.run()
    assert list(new_request.generated) == alone(range(50), 9)


def test_requests_wait_for_pages_of_the_scarcer_kind() -> None:
    service = Service()
    service.scheduler = Scheduler(
        [PagePool(64, 4), PagePool(5, 4, 6)], replace(OPTIONS, prefix_caching=False)
    )
    service.model = PagedText(service.scheduler.cache)
    service.submit(*(request(name, range(10), new=20, arrival=n) for n, name in enumerate("abc")))
    while service.scheduler.running or service.scheduler.waiting:
        service.step()
    assert sum(request.preemptions for request in service.done) > 0
    assert all(list(request.generated) == alone(range(10), 20) for request in service.done)


def test_a_prefix_is_shared_where_the_pages_of_its_last_window_are_known() -> None:
    """Those of the first tokens were given back and stay known; a sequence that shares 5 blocks holds two of them."""
    service = Service(64, windows=(None, 6))
    service.submit(request("a", range(33), new=8))
    service.run()
    other = request("b", [*range(20), 49], new=3, arrival=1.0)
    service.submit(other)
    assert service.step() == ["b:1"]
    assert [(table.first, len(table.pages)) for table in other.tables] == [(0, 6), (3, 3)]
    service.run()
    assert (other.shared_tokens, list(other.generated)) == (20, alone([*range(20), 49], 3))


def test_a_prefix_whose_window_was_given_away_is_computed_again() -> None:
    """The other kind still knows all of it, which does not help."""
    service = Service()
    service.scheduler = Scheduler([PagePool(64, 4), PagePool(5, 4, 6)], OPTIONS)
    service.model = PagedText(service.scheduler.cache)
    service.submit(request("a", range(30), new=1))
    service.run()
    again = request("b", [*range(12), 49], new=1, arrival=1.0)
    assert service.scheduler.cache.pools[0].count_known_pages(again.compute_page_keys(3, 4)) == 3
    service.submit(again)
    service.run()
    assert again.shared_tokens == 0


def test_a_fork_copies_the_page_that_both_write_in_every_kind() -> None:
    service = Service(windows=(None, 6))
    service.submit(request("a", range(6), new=4))
    service.step()
    service.scheduler.fork(service.scheduler.running[0], "b")
    batch = service.scheduler.schedule()
    assert sorted(pool_index for pool_index, _ in batch.copies) == [0, 1]
    service.scheduler.complete_step(batch, service.model.step(batch))
    service.run()
    assert [list(request.generated) for request in service.done] == [alone(range(6), 4)] * 2


@pytest.mark.parametrize(("prompt", "new"), [((), 1), ((1,), 0)])
def test_a_request_without_tokens_is_refused(prompt: tuple[int, ...], new: int) -> None:
    with pytest.raises(ModelError, match="at least one token"):
        Service().submit(request("a", prompt, new))


@pytest.mark.parametrize("limits", [(0, 8), (9, 8)])
def test_limits_that_cannot_hold_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="max_num"):
        SchedulerOptions(*limits)


def test_a_prompt_beyond_the_budget_is_refused_without_chunks() -> None:
    service = Service(pages=64, options=KINDS[1])
    service.submit(request("a", range(40), new=25))
    with pytest.raises(ModelError, match="65 tokens at once"):
        service.submit(request("b", range(40), new=26))


def test_a_cancelled_request_leaves_no_page() -> None:
    service = Service()
    service.submit(request("a", range(6)), request("b", range(6), arrival=1.0))
    batch = service.scheduler.schedule()
    service.scheduler.end(service.scheduler.running[0])
    service.scheduler.end(service.scheduler.running[0])
    service.scheduler.complete_step(batch, {})
    assert service.scheduler.cache.free == 16


def campaign(
    options: SchedulerOptions,
    seed: int,
    steps: int,
    windows: Sequence[int | None],
    slots: Sequence[int] = (),
) -> int:
    """Run random submits, cancels, forks, failed steps and steps; return the number of ended requests.

    With `slots` layers are recurrent.
    """
    draw = random.Random(seed)
    pages, block = draw.choice((10, 14, 40)), draw.choice((1, 3, 4))
    pool = SlotPool(draw.choice(slots), block, block * draw.choice((1, 2, 3))) if slots else None
    service = Service(pages, block, options, windows, pool)
    cache = service.scheduler.cache
    most = min(pages * block, 10**6 if options.chunked_prefill else options.max_num_batched_tokens)
    starts = [[draw.randrange(50) for _ in range(12)] for _ in range(3)]
    for number in range(steps):
        choice = draw.random()
        if choice < 0.3 and len(service.scheduler.waiting) < 12:
            start = draw.choice(starts)[: draw.randint(1, 12)]
            prompt = [*start, *(draw.randrange(50) for _ in range(draw.randrange(6)))][:most]
            new = draw.randint(1, min(12, most - len(prompt) + 1))
            service.submit(request(str(number), prompt, new, draw.choice((0, 0, 0, 1)), float(number)))
        elif choice < 0.33 and service.scheduler.running:
            service.scheduler.end(draw.choice(service.scheduler.running))
        elif choice < 0.35 and service.scheduler.waiting:
            service.scheduler.end(draw.choice(service.scheduler.waiting))
        elif choice < 0.39 and service.scheduler.running:
            service.scheduler.fork(draw.choice(service.scheduler.running), f"fork {number}")
        elif choice < 0.41:
            service.fail_step()
        else:
            service.step()
    service.run()
    assert cache.free == cache.count
    for finished in service.done:
        assert list(finished.generated) == alone(
            finished.tokens[: finished.prompt_tokens], finished.max_new_tokens
        )
    return len(service.done)


WINDOWS = ((None,), (None, 5), (1, 4, 9), (8,))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_what_it_would_get_alone(
    options: SchedulerOptions, seed: int, windows: Sequence[int | None]
) -> None:
    assert campaign(options, seed, 600, windows) > 40


@pytest.mark.deep
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("options", KINDS)
def test_every_request_gets_what_it_would_get_alone_in_many_steps(
    options: SchedulerOptions, windows: Sequence[int | None]
) -> None:
    assert campaign(options, 77, 100_000, windows) > 10_000


def signature(service: Service) -> list[tuple[str, int, int, int, list[int]]]:
    """Return what steps decided, without the numbers of pages, whose order may differ."""
    return [
        (request.id, request.computed, request.shared_tokens, request.preemptions, list(request.tokens))
        for request in (*service.scheduler.running, *service.scheduler.waiting, *service.done)
    ]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("options", KINDS[:4])
@pytest.mark.parametrize("seed", range(3))
def test_steps_at_once_decide_like_single_steps(
    options: SchedulerOptions, seed: int, windows: Sequence[int | None]
) -> None:
    at_once, single = (Service(12, options=options, windows=windows) for _ in range(2))
    draw, rows, saved = random.Random(seed), [0] * 64, 0
    for number in range(60):
        prompt, new = [draw.randrange(4) for _ in range(draw.randint(1, 12))], draw.randint(1, 20)
        for service in (at_once, single):
            service.submit(request(str(number), prompt, new, arrival=float(number)))
        for _ in range(draw.randint(0, 6)):
            batch = at_once.scheduler.schedule()
            steps = at_once.scheduler.count_steady_steps(batch)
            if steps > 1:
                at_once.scheduler.repeat(batch, steps, rows)
            else:
                chosen = {request: [0] for request, chunk in batch.chunks.items() if chunk.samples}
                at_once.scheduler.complete_step(batch, chosen)
            saved += steps - 1
            for batch_request in batch.chunks:
                if len(batch_request.generated) == batch_request.max_new_tokens:
                    at_once.scheduler.end(batch_request)
                    at_once.done.append(batch_request)
            for _ in range(steps):
                batch = single.scheduler.schedule()
                chosen = {request: [0] for request, chunk in batch.chunks.items() if chunk.samples}
                single.scheduler.complete_step(batch, chosen)
                for batch_request in batch.chunks:
                    if len(batch_request.generated) == batch_request.max_new_tokens:
                        single.scheduler.end(batch_request)
                        single.done.append(batch_request)
            assert signature(at_once) == signature(single)
            check_pages(at_once.scheduler)
    assert saved > 20
