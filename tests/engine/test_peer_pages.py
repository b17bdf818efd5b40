"""What vLLM's tests ask of its block pool and prefix cache, asked of ours; see tests/engine/README.md."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from model.engine import SamplingParams, SchedulerOptions
from model.state import PagePool, compute_page_key, compute_root_key
from tests.engine.paged_text import alone
from tests.engine.test_scheduler import OPTIONS, Service, request
from tests.engine.text_engine import run, text_engine, tokens_of

COMMON = list(range(12))  # three full pages


def taken(pool: PagePool) -> list[int]:
    """Take all free pages and return them in the order of allocation."""
    return [pool.take() for _ in range(pool.free)]


def pool_of(service: Service) -> PagePool:
    """Return the only page pool of a service."""
    (pool,) = service.scheduler.cache.pools
    return pool


def list_pages(service: Service, name: str) -> list[int]:
    """Return the pages of a running request."""
    return next(request.tables[0].pages for request in service.scheduler.running if request.id == name)


@pytest.mark.parametrize(("tokens", "cached"), [(4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_full_pages_are_shared_and_the_last_token_is_computed(tokens: int, cached: int) -> None:
    service = Service()
    for name in "ab":
        service.submit(request(name, range(tokens), new=1))
        service.run()
    assert [request.shared_tokens for request in service.done] == [0, cached]


def test_pages_are_shared_while_held_and_when_free() -> None:
    service = Service(pages=10, options=SchedulerOptions(4, 16))
    service.submit(request("a", [*COMMON, 20], new=4))
    service.step()
    service.submit(request("b", [*COMMON, 21], new=4, arrival=1.0))
    service.step()
    assert list_pages(service, "a")[:3] == list_pages(service, "b")[:3]
    assert [pool_of(service).count_references(page) for page in list_pages(service, "b")] == [2, 2, 2, 1]
    assert pool_of(service).free == 5
    service.run()
    assert pool_of(service).free == 10
    service.submit(request("c", [*COMMON, 22], new=1))
    assert service.step() == ["c:1"]


def test_pages_of_unknown_contents_are_given_away_first_then_the_oldest_tails_before_roots() -> None:
    pool = PagePool(10, 4)
    first = [pool.take() for _ in range(4)]
    for page, name in zip(first[:3], b"abc"):
        pool.publish(page, bytes([name]))
    second = [*first[:3], pool.take()]
    for page in first[:3]:
        pool.hold(page)
    pool.release(first)
    pool.release(second)
    assert taken(pool) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]


def test_a_hit_makes_pages_the_newest() -> None:
    service = Service(pages=6)
    for name, start in (("a", 0), ("b", 20)):
        service.submit(request(name, range(start, start + 12), new=1))
        service.run()
    service.submit(
        request("a again", range(9), new=1)
    )  # holds two of three pages, and takes one of unknown contents
    service.run()
    assert service.done[-1].shared_tokens == 8
    service.submit(request("c", range(30, 42), new=1))
    service.run()
    service.submit(request("a once more", range(9), new=1))
    assert service.step() == ["a once more:1"]


def test_a_page_given_away_is_not_known_any_more() -> None:
    service = Service(pages=1)
    service.submit(request("a", range(4), new=1))
    service.run()
    key = compute_page_key(b"", range(4))
    assert pool_of(service).count_known_pages([key]) == 1
    service.submit(request("b", range(3), new=1))
    service.step()
    assert pool_of(service).count_known_pages([key]) == 0


def test_a_request_does_not_take_the_pages_that_it_shares() -> None:
    service = Service(pages=2)
    for name, start in (("a", 0), ("b", 4)):
        service.submit(request(name, range(start, start + 4), new=1))
        service.run()
    service.submit(request("c", range(8), new=1))
    assert service.step() == ["c:4"]


def test_a_request_that_cannot_start_leaves_known_pages_as_they_are() -> None:
    service = Service(pages=10)
    pool = pool_of(service)
    service.submit(request("a", COMMON, new=9))
    service.step()
    service.submit(request("b", [*COMMON, *COMMON], new=1, arrival=1.0))
    while not any(request.id == "b" for request in service.done):
        service.step()
    service.submit(request("c", range(40, 48), new=5, arrival=2.0))
    service.step()
    before = [pool.count_references(page) for page in range(10)], pool.free
    service.submit(request("d", [*COMMON, *COMMON, *range(20, 30)], new=1, arrival=3.0))
    batch = service.scheduler.schedule()
    assert [request.id for request in service.scheduler.waiting] == ["d"]
    assert ([pool.count_references(page) for page in range(10)], pool.free) == before
    service.scheduler.complete_step(batch, service.model.step(batch))


def test_without_prefix_caching_nothing_is_known() -> None:
    service = Service(options=replace(OPTIONS, prefix_caching=False))
    for name in "ab":
        service.submit(request(name, range(9), new=4))
        service.run()
    assert [request.shared_tokens for request in service.done] == [0, 0]
    assert pool_of(service).count_known_pages([compute_page_key(b"", range(4))]) == 0


def test_pages_that_decoding_fills_are_known() -> None:
    service = Service(pages=20)
    service.submit(request("a", range(7), new=11))
    service.run()
    turn = [*service.done[0].tokens, 3]
    service.submit(request("next turn", turn, new=1))
    assert service.step() == [f"next turn:{len(turn) - 16}"]


def test_equal_prompts_of_one_step_are_computed_each_and_known_once() -> None:
    service = Service(pages=8, options=SchedulerOptions(4, 32))
    service.submit(request("a", range(9), new=2), request("b", range(9), new=2))
    assert service.step() == ["a:9", "b:9"]
    known = pool_of(service).find(compute_page_key(b"", range(4)))
    assert known == list_pages(service, "a")[0] != list_pages(service, "b")[0]
    service.submit(request("c", range(9), new=1))
    assert service.step() == ["a:1", "b:1", "c:1"]


def test_a_preempted_request_finds_its_own_pages() -> None:
    service = Service(pages=4, options=SchedulerOptions(4, 16))
    first, second = request("a", range(5), new=4), request("b", range(20, 27), new=4, arrival=1.0)
    service.submit(first, second)
    service.run()
    assert [request.preemptions for request in (first, second)] == [0, 1]
    assert second.shared_tokens == 8
    assert [list(request.generated) for request in (first, second)] == [
        alone(range(5), 4),
        alone(range(20, 27), 4),
    ]


def test_keys_name_tokens_their_order_all_before_and_the_root() -> None:
    draw = random.Random(5)
    texts = {tuple(draw.randrange(3) for _ in range(4)) for _ in range(500)}
    roots = [
        b"",
        compute_root_key("a"),
        compute_root_key("b"),
        *(compute_page_key(b"", text) for text in texts),
    ]
    keys = {compute_page_key(root, text) for root in roots for text in texts}
    assert len(keys) == len(roots) * len(texts) == 84 * 81
    assert keys == {compute_page_key(root, list(text)) for root in roots for text in texts}


@pytest.mark.parametrize(("salt", "cached"), [(None, 0), ("one", 8), ("two", 0)])
def test_only_requests_of_a_salt_share_its_pages(salt: str | None, cached: int) -> None:
    engine = text_engine()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for name, request_salt in (("first", "one"), ("second", salt)):
        output = engine.submit(name, range(10), params, cache_salt=request_salt)
        run(engine)
    assert output.num_cached_tokens == cached


def test_a_reset_waits_for_those_who_hold_pages() -> None:
    service = Service()
    service.submit(request("a", range(9), new=2))
    service.step()
    key = compute_page_key(b"", range(4))
    assert not service.scheduler.reset_prefix_cache()
    assert pool_of(service).count_known_pages([key])
    service.run()
    assert service.scheduler.reset_prefix_cache()
    assert not pool_of(service).count_known_pages([key])
    service.submit(request("b", range(9), new=1))
    assert service.run() == [["b:8"], ["b:1"]]


def test_a_reset_may_preempt_who_runs() -> None:
    service = Service(pages=40)
    requests = [request(str(n), [n, *range(5)], new=4) for n in range(4)]
    service.submit(*requests)
    service.step()
    assert len(service.scheduler.running) == 2
    assert service.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [request.id for request in service.scheduler.waiting] == ["0", "1", "2", "3"]
    assert pool_of(service).free == 40
    service.run()
    assert [request.preemptions for request in requests] == [1, 1, 0, 0]
    assert [request.shared_tokens for request in requests] == [0, 0, 0, 0]


@pytest.mark.parametrize("reset_step", [0, 3, 7])
def test_a_reset_changes_no_text(reset_step: int) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=2)
    prompts = ([1, 2, 3], [4, 5], [*range(20)], [7] * 9)
    texts = []
    for resets in (False, True):
        engine = text_engine(pages=40)
        outputs = [engine.submit(str(n), prompt, params) for n, prompt in enumerate(prompts)]
        for step in range(200):
            if resets and step == reset_step:
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.step()
        assert not engine.busy
        texts.append([tokens_of(output) for output in outputs])
    assert texts[0] == texts[1]


def test_hits_are_those_of_the_first_start() -> None:
    engine = text_engine(pages=8, options=SchedulerOptions(4, 32))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.submit("warm", range(9), replace(params, max_tokens=1))
    run(engine)
    first, second = engine.submit("0", range(9), params), engine.submit("1", range(10, 19), params)
    run(engine)
    assert second.metrics.num_preemptions > 0  # its second start finds pages that it filled itself
    assert [first.num_cached_tokens, second.num_cached_tokens] == [8, 0]


def test_continuations_of_a_prompt_compute_it_once() -> None:
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=3, ignore_eos=True)
    computed = []
    for n in (1, 3):
        engine = text_engine()
        (output,) = (engine.submit("a", range(10), replace(params, n=n)),)
        run(engine)
        assert output.num_cached_tokens == 0
        again = engine.submit("b", range(10), replace(params, n=n))
        run(engine)
        assert again.num_cached_tokens == 8
        assert tokens_of(again) == tokens_of(output)
        computed.append(engine._model.computed)
    assert computed == [10 + 2 + 2 + 2, 10 + 6 + 2 + 6]


@pytest.mark.parametrize("chunked", [True, False])
def test_hits_leave_more_of_the_budget(chunked: bool) -> None:
    service = Service(options=SchedulerOptions(4, 16, chunked_prefill=chunked))
    service.submit(request("a", COMMON, new=1))
    service.run()
    service.submit(*(request(str(n), [*COMMON, n], new=1) for n in range(4)))
    assert service.step() == [f"{n}:1" for n in range(4)]
