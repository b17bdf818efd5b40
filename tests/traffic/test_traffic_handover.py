"""Prompts and decoding on separate replicas: times that add up, links used by one transfer at a time, equal steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from model.device import chip, find_instance
from model.engine import Scheduler, SchedulerOptions
from model.plan.service_level import ServiceLevel
from model.state import PagePool
from model.traffic.clock import Clock
from model.traffic.drafts import AcceptanceRates, DraftProposer
from model.traffic.handover import SeparateService
from model.traffic.link import find_slowest_link
from model.traffic.record import Record
from model.traffic.replica import Replica
from model.traffic.report import summarize
from model.traffic.workload import Query, Workload
from tests.deep import deep_except
from tests.traffic.clocks import MEAN_NS, OPTIONS, Constant, shaped, workloads

KINDS = (
    OPTIONS,
    replace(OPTIONS, chunked_prefill=False, max_num_batched_tokens=64),
    replace(OPTIONS, prefix_caching=False),
)
PAGE_NS = 700


def service(
    clock: Clock,
    options: SchedulerOptions = OPTIONS,
    pages: int = 64,
    replicas: tuple[int, int] = (1, 1),
    at_once: bool = True,
    drafts: bool = False,
) -> SeparateService:
    def replica(options: SchedulerOptions) -> Replica:
        proposed = DraftProposer(AcceptanceRates.parse("0.7", 3), clock) if drafts else None
        return Replica(Scheduler(PagePool(pages, 4), options), clock, proposed, at_once)

    pool_options = (replace(options, speculative_tokens=0), options)
    prompts, decoding = (
        [replica(engine_options) for _ in range(count)]
        for engine_options, count in zip(pool_options, replicas)
    )
    return SeparateService(prompts, decoding, lambda pages: sum(pages) * PAGE_NS)


def test_a_request_alone_takes_its_prompt_the_transfer_and_its_steps() -> None:
    """A prompt of 9 tokens fills 3 pages of 4 positions."""
    separate_service = service(Constant())
    prompts, decoding = separate_service.run(Workload((Query(9, 5), Query(3, 1)), (50, 50)))
    (timeline,) = decoding.timelines
    assert (timeline.queue_ns, timeline.ttft_ns, timeline.handover_ns) == (0, MEAN_NS, 3 * PAGE_NS)
    assert timeline.e2e_ns == MEAN_NS + 3 * PAGE_NS + 4 * MEAN_NS
    assert decoding.gaps_ns == {MEAN_NS + 3 * PAGE_NS: 1, MEAN_NS: 3}
    (short,) = prompts.timelines  # with one token it ends where its prompt is computed
    assert (short.e2e_ns, short.handover_ns) == (MEAN_NS, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize(
    ("pages", "replicas"), deep_except(product([24, 64], [(1, 1), (2, 1), (1, 2), (2, 3)]), 3)
)
def test_times_add_up(options: SchedulerOptions, pages: int, replicas: tuple[int, int]) -> None:
    for workload in workloads(pages):
        separate_service = service(shaped(options), options, pages, replicas)
        records = separate_service.run(workload)
        timelines = [timeline for record in records for timeline in record.timelines]
        assert len(timelines) == len(workload.queries)
        for timeline in timelines:
            assert timeline.arrival_ns <= timeline.started_ns < timeline.first_token_ns <= timeline.end_ns
            moved_ns = timeline.moved_ns if timeline.query.new_tokens > 1 else timeline.first_token_ns
            phases_ns = (
                timeline.first_token_ns - timeline.started_ns,
                timeline.handover_ns,
                timeline.end_ns - moved_ns,
            )
            assert min(phases_ns) >= 0
            assert timeline.queue_ns + sum(phases_ns) == timeline.e2e_ns
        gaps = sum((record.gaps_ns for record in records), Counter[int]())
        assert gaps.total() == sum(timeline.query.new_tokens - 1 for timeline in timelines)
        assert sum(gap * count for gap, count in gaps.items()) == sum(
            timeline.end_ns - timeline.first_token_ns for timeline in timelines
        )
        check_links(separate_service, workload)
        run = summarize(records, ServiceLevel(ttft=1e6), pages, replicas[0])
        assert run.utilisations is not None
        assert all(0 < utilisation <= 1 for utilisation in run.utilisations)
        assert all(0 <= time_slice.most_pages <= 1 for time_slice in run.slices)
        assert sum(time_slice.completed for time_slice in run.slices) == len(timelines)
        assert sum(moment.met for moment in run.moments) == run.met
        for record in records:
            assert all(one.end_ns <= next.begin_ns for one, next in zip(record.spans, record.spans[1:]))


def check_links(separate_service: SeparateService, workload: Workload) -> None:
    """Check that each decoded prompt moved once, in the time of its pages, one at a time on each link."""
    assert len(separate_service.transfers) == sum(query.new_tokens > 1 for query in workload.queries)
    busy = dict[int, int]()
    for transfer in separate_service.transfers:
        assert transfer.end_ns - transfer.begin_ns == transfer.pages * PAGE_NS
        for replica in (transfer.source, transfer.target):
            assert busy.get(replica, 0) <= transfer.begin_ns
            busy[replica] = transfer.end_ns


def told(records: list[Record]) -> list[object]:
    return [
        (
            [vars(timeline) for timeline in record.timelines],
            record.gaps_ns,
            *(record.steps, record.tokens, record.padding, record.busy_ns, record.end_ns),
        )
        for record in records
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "replicas"), deep_except(product(KINDS, [(1, 1), (2, 2)]), 3))
def test_steps_at_once_take_the_times_of_single_steps(
    options: SchedulerOptions, replicas: tuple[int, int]
) -> None:
    saved = 0
    for pages in (24, 64):
        for workload in workloads(pages):
            at_once, single = (
                service(shaped(options), options, pages, replicas, steps_at_once).run(workload)
                for steps_at_once in (True, False)
            )
            assert told(at_once) == told(single)
            saved += sum(len(other.spans) - len(one.spans) for one, other in zip(at_once, single))
    assert saved > 100


@pytest.mark.slow
def test_drafts_are_verified_where_requests_decode() -> None:
    options = replace(OPTIONS, speculative_tokens=3)
    for workload in workloads(5):
        prompts, decoding = service(shaped(options), options, drafts=True).run(workload)
        assert not prompts.acceptance.verified
        assert decoding.acceptance.verified[0] > 100
        assert len(prompts.timelines) + len(decoding.timelines) == len(workload.queries)


def test_pages_of_a_shared_prefix_move_once() -> None:
    """A prefix of 32 tokens is 8 pages; the 6 tokens behind it are 2 more, and are another request's own."""
    queries = (Query(38, 4, 32, 0),) * 3
    separate_service = service(Constant(), replace(OPTIONS, max_num_batched_tokens=64))
    separate_service.run(Workload(queries, users=1))
    assert [transfer.pages for transfer in separate_service.transfers] == [10, 2, 2]


def test_a_full_decoding_replica_lets_prompts_wait_with_their_pages() -> None:
    options = replace(OPTIONS, max_num_seqs=2)
    separate_service = service(Constant(), options)
    separate_service.run(Workload((Query(4, 11),) * 4, (0,) * 4))
    begins = [transfer.begin_ns for transfer in separate_service.transfers]
    # Two decode at a time: the others move when these have their last tokens.
    assert begins[1] < 2 * MEAN_NS
    assert begins[2] > 10 * MEAN_NS


def test_links_are_those_of_the_hardware_record() -> None:
    def rate(name: str) -> float:
        instance = find_instance(name)
        return find_slowest_link(instance, chip(instance.target)).gb_per_s

    assert rate("trn2.48xlarge") == 1024 / 8
    assert rate("trn1.32xlarge") == 384 / 2
    assert rate("trn2 UltraServer") == 16 * 256 / 128  # between its four instances
    assert rate("2 x trn1.32xlarge") == 800 / 8 / 32  # EFA
    single = find_instance("trn2.3xlarge")
    assert rate(single.name) == chip("trn2").hbm_gb_per_s_per_chip / 2 / 8
    link = find_slowest_link(find_instance("trn2.48xlarge"), chip("trn2"))
    assert (link.words, link.source) == (
        "NeuronLink, 1,024 GB/s of a chip",
        "Amazon EC2 Trn2 architecture page",
    )
    assert link.transfer_ns(128_000) == 1_000
    assert link.transfer_ns(0) == 1


def test_a_rank_of_two_cores_has_the_links_of_both() -> None:
    for name in ("trn2 UltraServer", "trn2.48xlarge", "trn2.3xlarge"):
        one, two = (find_slowest_link(find_instance(name), chip("trn2"), lnc).gb_per_s for lnc in (1, 2))
        assert two == 2 * one
