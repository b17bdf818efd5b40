"""Tiny streams whose every moment is worked out by hand from the hardware record and the costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nkw.errors import InvalidArgument
from simulate.hardware import guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import NkiTensor
from simulate.timing import Reading, Reason, Slice, SliceKind, Timeline, bracket, schedule
from simulate.timing.scheduled import WINDOW
from simulate.timing.sharing import DmaEngines
from tests.timing.checker import violations
from tests.timing.streams import EXACT, Builder, box, dma_cost

SEMAPHORE = EXACT.semaphore_ns
LOAD = EXACT.activation_table_load_ns


def pieces(timeline: Timeline, *slice_kinds: SliceKind) -> list[Slice]:
    return [
        piece
        for piece in timeline.slices()
        if piece.slice_kind in (slice_kinds or (SliceKind.instruction, SliceKind.trigger))
    ]


def starts(timeline: Timeline) -> list[float]:
    return [piece.start_ns for piece in pieces(timeline)]


def test_nothing_takes_no_time() -> None:
    timeline = schedule(Builder().stream, EXACT)
    assert (timeline.length_ns, len(timeline), timeline.critical_path) == (0.0, 0, ())
    assert schedule([], EXACT).tracks == ()


def test_kernel_start_and_end_are_told_apart_from_the_length() -> None:
    build = Builder()
    build.event(Engine.vector, cost=Cost(10.0, 30.0))
    timeline = schedule(build.stream, EXACT)
    assert timeline.length_ns == 30.0
    assert timeline.overhead_ns == EXACT.kernel_start_ns + EXACT.kernel_end_ns


def test_cycles_are_of_the_engine_s_own_clock() -> None:
    build = Builder()
    build.event(Engine.vector, cost=Cost(10.0, 30.0))
    slow = EXACT.with_numbers(vector_clock_ghz=guessed(0.5, "tests", "half as fast"))
    assert schedule(build.stream, slow).length_ns == 60.0


def test_an_engine_is_free_after_the_interval_and_the_result_ready_after_the_latency() -> None:
    build = Builder()
    for _ in range(3):
        build.event(Engine.vector, cost=Cost(10.0, 30.0))
    timeline = schedule(build.stream, EXACT)
    assert starts(timeline) == [0.0, 10.0, 20.0]
    assert [piece.ready_ns for piece in timeline.slices()] == [30.0, 40.0, 50.0]
    assert timeline.busy_ns["Vector"] == 30.0
    assert timeline.idle_ns["Vector"] == 20.0


def test_a_result_is_waited_for_and_from_another_engine_a_semaphore_longer() -> None:
    build = Builder()
    a, b, c = (build.tensor(name) for name in "abc")
    build.event(Engine.tensor, writes=(a,), cost=Cost(10.0, 30.0))
    build.event(Engine.vector, reads=(a,), writes=(b,), cost=Cost(10.0, 40.0))
    build.event(Engine.vector, reads=(b,), writes=(c,), cost=Cost(10.0, 40.0))
    timeline = schedule(build.stream, EXACT)
    first = 30.0 + SEMAPHORE
    assert starts(timeline) == [0.0, first, first + 40.0 + EXACT.same_engine_wait_ns]
    assert [(step.event, step.reason) for step in timeline.critical_path] == [
        (0, Reason.begin),
        (1, Reason.operands),
        (2, Reason.operands),
    ]


def test_a_destination_is_free_when_its_reader_has_taken_it_in() -> None:
    build = Builder()
    a, b = build.tensor("a"), build.tensor("b")
    build.event(Engine.vector, reads=(a,), writes=(b,), cost=Cost(50.0, 500.0))
    build.event(Engine.tensor, writes=(a,), cost=Cost(10.0, 30.0))
    timeline = schedule(build.stream, EXACT)
    assert starts(timeline) == [0.0, 50.0 + SEMAPHORE]
    assert timeline.length_ns == 500.0


def test_boxes_that_do_not_meet_do_not_wait() -> None:
    build = Builder()
    a = build.tensor("a")
    build.event(Engine.tensor, writes=(box(a, (0, 128), (0, 32)),), cost=Cost(10.0, 30.0))
    build.event(Engine.vector, reads=(box(a, (0, 128), (32, 64)),))
    build.event(Engine.scalar, reads=(box(a, (0, 128), (31, 64)),))
    assert starts(schedule(build.stream, EXACT)) == [0.0, 0.0, 30.0 + SEMAPHORE]


def test_accumulation_into_one_place_follows_at_the_issue_rate() -> None:
    build = Builder()
    a, out = build.tensor("a"), build.tensor("out")
    for _ in range(3):
        build.event(Engine.tensor, writes=(a,), cost=Cost(10.0, 30.0), accumulate=True)
    build.event(Engine.vector, reads=(a,), writes=(out,))
    for reading in (Reading.program, Reading.dataflow):
        assert starts(schedule(build.stream, EXACT, reading)) == [0.0, 10.0, 20.0, 50.0 + SEMAPHORE]


def test_a_read_of_an_accumulated_place_waits_for_the_slowest_addition() -> None:
    build = Builder()
    a = build.tensor("a")
    build.event(Engine.tensor, writes=(a,), cost=Cost(10.0, 90.0), accumulate=True)
    build.event(Engine.tensor, writes=(a,), cost=Cost(10.0, 30.0), accumulate=True)
    build.event(Engine.vector, reads=(a,))
    assert starts(schedule(build.stream, EXACT)) == [0.0, 10.0, 90.0 + SEMAPHORE]


def test_a_dma_goes_through_its_phases() -> None:
    build = Builder()
    a, b = build.tensor("a"), build.tensor("b")
    cost = dma_cost(busy=40.0, transfer=200.0, trigger=8.0, gpsimd=16.0, first=100.0, completion=64.0)
    build.dma((), (a,), cost, Engine.gpsimd)
    build.event(Engine.vector, reads=(a,), writes=(b,), cost=Cost(10.0, 30.0))
    timeline = schedule(build.stream, EXACT)
    trigger, consumer = pieces(timeline)
    (data,) = pieces(timeline, SliceKind.transfer)
    assert (trigger.track, trigger.start_ns, trigger.end_ns) == ("GpSimd", 0.0, 24.0)
    assert (data.track, data.start_ns, data.end_ns, data.ready_ns) == ("DMA q GpSimd", 124.0, 324.0, 388.0)
    assert consumer.start_ns == 388.0  # the completion reaches to the restart of the waiting engine
    assert timeline.length_ns == 418.0


def test_dmas_share_the_dma_engines_and_overlap_their_fixed_times() -> None:
    build = Builder()
    cost = dma_cost(busy=40.0, transfer=200.0)
    for engine in (Engine.sync, Engine.sync, Engine.gpsimd):
        build.dma((), (), cost, engine)
    data = pieces(schedule(build.stream, EXACT), SliceKind.transfer)
    assert [piece.start_ns for piece in data] == [108.0, 148.0, 108.0]
    assert [piece.end_ns for piece in data] == [308.0, 348.0, 308.0]
    assert schedule(build.stream, EXACT).length_ns == 108.0 + 200.0 + 40.0 + 64.0


def test_a_queue_is_busy_while_at_least_one_data_phase_is_under_way() -> None:
    build = Builder()
    for transfer, trigger in ((900.0, 8.0), (40.0, 8.0), (40.0, 200.0), (40.0, 2000.0)):
        build.dma((), (), dma_cost(busy=40.0, transfer=transfer, trigger=trigger), Engine.sync)
    timeline = schedule(build.stream, EXACT)
    data = pieces(timeline, SliceKind.transfer)
    assert [piece.start_ns for piece in data] == [108.0, 148.0, 316.0, 2316.0]
    assert timeline.busy_ns["DMA q Sync"] == 900.0 + 40.0
    assert timeline.busiest == "Sync"


def test_what_runs_on_dma_engines_reads_until_it_is_complete() -> None:
    build = Builder()
    a = build.tensor("a")
    build.event(Engine.dma, reads=(a,), cost=Cost(10.0, 500.0), trigger=Engine.sync)
    build.event(Engine.vector, writes=(a,))
    assert starts(schedule(build.stream, EXACT)) == [0.0, 500.0 + SEMAPHORE]


def test_a_store_that_waits_does_not_hold_up_the_loads_behind_it() -> None:
    build = Builder()
    a = build.tensor("a")
    build.event(Engine.vector, writes=(a,), cost=Cost(10.0, 1000.0))
    build.dma((a,), (), dma_cost(busy=40.0), Engine.gpsimd)
    build.dma((), (), dma_cost(busy=40.0), Engine.sync)
    store, load = pieces(schedule(build.stream, EXACT), SliceKind.transfer)
    assert load.start_ns == 108.0
    assert store.start_ns == 1000.0 + SEMAPHORE + 108.0


def two_loads(busy: float = 500.0) -> tuple[Builder, NkiTensor, NkiTensor]:
    build = Builder()
    a, b = build.tensor("a"), build.tensor("b")
    build.dma((), (a,), dma_cost(busy=busy, completion=64.0), Engine.sync)
    build.dma((), (b,), dma_cost(busy=busy, completion=64.0), Engine.gpsimd)
    return build, a, b


def test_who_waits_for_two_queues_waits_for_what_they_move_together() -> None:
    build, a, b = two_loads()
    build.event(Engine.vector, reads=(a,), cost=Cost(1.0, 1.0))
    build.event(Engine.scalar, reads=(a, b), cost=Cost(1.0, 1.0))
    timeline = schedule(build.stream, EXACT)
    assert violations((build.stream,), EXACT, timeline) == []
    assert starts(timeline)[2:] == [108.0 + 500.0 + 64.0, 108.0 + 1000.0 + 64.0]
    step = timeline.critical_path[-1]
    assert (step.event, step.reason) == (3, Reason.shared)


def test_an_engine_s_next_event_waits_for_what_all_its_events_needed_together() -> None:
    build, a, b = two_loads()
    build.event(Engine.vector, reads=(a,), cost=Cost(1.0, 1.0))
    build.event(Engine.vector, reads=(b,), cost=Cost(1.0, 1.0))
    assert starts(schedule(build.stream, EXACT))[2:] == [672.0, 1172.0]


def test_the_end_waits_for_all_that_the_dma_engines_move() -> None:
    build, a, b = two_loads()
    build.event(Engine.vector, reads=(a,), cost=Cost(1.0, 1.0))
    build.event(Engine.scalar, reads=(b,), cost=Cost(1.0, 1.0))
    timeline = schedule(build.stream, EXACT)
    assert violations((build.stream,), EXACT, timeline) == []
    assert starts(timeline)[2:] == [672.0, 672.0]
    assert timeline.length_ns == 1172.0
    assert timeline.critical_path[-1].event in (0, 1)


@pytest.mark.parametrize(("later", "shared"), [(499.0, 1.0), (500.0, 0.0), (501.0, 0.0)])
def test_dmas_that_do_not_overlap_owe_each_other_nothing(later: float, shared: float) -> None:
    build = Builder()
    a, b = build.tensor("a"), build.tensor("b")
    build.dma((), (a,), dma_cost(busy=500.0), Engine.sync)
    build.dma((), (b,), dma_cost(busy=500.0, first=100.0 + later), Engine.gpsimd)
    build.event(Engine.scalar, reads=(a, b), cost=Cost(1.0, 1.0))
    assert starts(schedule(build.stream, EXACT))[2] == 108.0 + later + 500.0 + 64.0 + shared


def test_the_judge_finds_dmas_that_come_faster_than_the_engines_can_move_them() -> None:
    build, a, b = two_loads()
    build.event(Engine.scalar, reads=(a, b), cost=Cost(1.0, 1.0))
    timeline = schedule(build.stream, EXACT)
    early = replace(timeline, start_ns=timeline.start_ns.copy(), end_ns=timeline.end_ns.copy())
    early.start_ns[-1] -= 0.25
    early.end_ns[-1] -= 0.25
    assert violations((build.stream,), EXACT, timeline) == []
    assert violations((build.stream,), EXACT, early) == [
        "stream 0: #2 starts before 1172.0, when all it needs can be complete"
    ]


def test_a_faster_producer_of_a_store_delays_no_load() -> None:
    """With queues that take the engines as they come the store slips in front of the load, and the end comes later."""
    lengths = []
    for latency in (1000.0, 1.0):
        build = Builder()
        a, b = build.tensor("a"), build.tensor("b")
        build.event(Engine.vector, writes=(a,), cost=Cost(1.0, latency))
        build.dma((a,), (), dma_cost(busy=40.0, first=10.0), Engine.gpsimd)
        build.dma((), (b,), dma_cost(busy=40.0), Engine.sync)
        build.event(Engine.tensor, reads=(b,), cost=Cost(5000.0, 5000.0))
        lengths.append(schedule(build.stream, EXACT).length_ns)
    assert lengths == [108.0 + 40.0 + 64.0 + 5000.0] * 2


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_full_queue_stalls_its_stream(extra: int) -> None:
    limit = EXACT.dma_outstanding_per_queue
    build = Builder()
    for _ in range(limit + extra):
        build.dma((), (), dma_cost(busy=1.0, trigger=8.0, first=2000.0), Engine.sync)
    build.event(Engine.sync, cost=Cost(1.0, 1.0))
    timeline = schedule(build.stream, EXACT)
    first_ready = 8.0 + 2000.0 + 1.0 + 64.0
    free = limit * 8.0 if extra == 0 else (limit - 1) * 8.0 if extra < 0 else first_ready + 8.0
    assert starts(timeline)[-1] == free


def test_an_activation_table_is_loaded_when_it_changes_and_never_for_a_copy() -> None:
    build = Builder()
    for table in ("exp", "copy", None, "exp", "silu", "exp"):
        build.event(Engine.scalar, cost=Cost(10.0, 30.0, table=table))
    timeline = schedule(build.stream, EXACT)
    assert [piece.event for piece in pieces(timeline, SliceKind.table_load)] == [0, 4, 5]
    after_exp = LOAD + 40.0
    assert starts(timeline) == [
        LOAD,
        LOAD + 10,
        LOAD + 20,
        LOAD + 30,
        after_exp + LOAD,
        after_exp + 10 + 2 * LOAD,
    ]
    assert pieces(schedule(build.stream, EXACT, Reading.dataflow), SliceKind.table_load) == []


def test_a_table_is_loaded_while_operands_are_on_their_way() -> None:
    build = Builder()
    a = build.tensor("a")
    build.event(Engine.vector, writes=(a,), cost=Cost(10.0, 5000.0))
    build.event(Engine.scalar, reads=(a,), cost=Cost(10.0, 30.0, table="exp"))
    timeline = schedule(build.stream, EXACT)
    assert [(piece.start_ns, piece.end_ns) for piece in pieces(timeline, SliceKind.table_load)] == [
        (0.0, LOAD)
    ]
    assert starts(timeline)[1] == 5000.0 + SEMAPHORE


def test_serial_is_the_sum_of_durations_and_of_a_semaphore_per_change_of_engine() -> None:
    build = Builder()
    build.event(Engine.tensor, cost=Cost(10.0, 30.0))
    build.event(Engine.tensor, cost=Cost(10.0, 30.0))
    build.event(Engine.scalar, cost=Cost(90.0, 30.0, table="exp"))
    build.dma((), (), dma_cost(busy=40.0, transfer=200.0), Engine.sync)
    readings = bracket(build.stream, EXACT)
    dma = 8.0 + 100.0 + 200.0 + 64.0
    assert readings.serial_ns == 30.0 + 30.0 + SEMAPHORE + LOAD + 90.0 + SEMAPHORE + dma
    assert readings.program_ns == LOAD + 90.0
    assert readings.dataflow_ns == dma


def test_a_requested_order_is_kept_and_costs_time_only() -> None:
    build = Builder()
    build.event(Engine.tensor, cost=Cost(10.0, 30.0))
    build.event(Engine.vector)
    assert starts(schedule(build.stream, EXACT)) == [0.0, 0.0]
    build.stream.requested.append((0, 1))
    assert starts(schedule(build.stream, EXACT)) == [0.0, 30.0 + SEMAPHORE]


def test_refuses_a_requested_order_against_the_order_of_issue() -> None:
    build = Builder()
    build.event(Engine.tensor)
    build.event(Engine.vector)
    build.stream.requested.append((1, 0))
    with pytest.raises(
        InvalidArgument, match=r"event 0 .* depends_on event 1, which is issued later"
    ) as refused:
        schedule(build.stream, EXACT)
    assert refused.value.code == "NKW-TIMING-ORDER"


@pytest.mark.parametrize("streams", [None, 3, "stream", [None]])
def test_refuses_what_is_no_stream(streams: object) -> None:
    with pytest.raises(InvalidArgument, match=r"is no stream; pass the streams of a launch") as refused:
        schedule(streams, EXACT)
    assert refused.value.code == "NKW-TIMING-STREAMS"


def test_refuses_a_reading_by_its_name() -> None:
    stream = Builder().stream
    assert schedule(stream, EXACT, Reading("serial")).length_ns == 0.0
    with pytest.raises(InvalidArgument) as refused:
        schedule(stream, EXACT, "serial")
    assert refused.value.message == (
        "'serial' is no reading; pass Reading.serial, Reading.program, Reading.scheduled, Reading.dataflow"
    )


def two_ranks() -> tuple[Builder, Builder]:
    ranks = Builder(rank=0), Builder(rank=1)
    cost = Cost(10.0, 400.0, rendezvous_ns=390.0)
    for build, wait in zip(ranks, (100.0, 700.0)):
        a, b, c = (build.tensor(name) for name in "abc")
        build.event(Engine.vector, writes=(a,), cost=Cost(10.0, wait))
        build.event(Engine.dma, (a,), (b,), cost, Engine.sync, rendezvous=0, op="all_reduce")
        build.event(Engine.vector, reads=(b,), writes=(c,), cost=Cost(10.0, 50.0))
    return ranks


@pytest.mark.parametrize("reading", Reading)
def test_the_members_of_a_rendezvous_start_and_end_together(reading: Reading) -> None:
    streams = [build.stream for build in two_ranks()]
    timeline = schedule(streams, EXACT, reading)
    rendezvous = 700.0 + SEMAPHORE
    after = rendezvous + 400.0 + SEMAPHORE
    assert starts(timeline) == [0.0, rendezvous, after, 0.0, rendezvous, after]
    assert timeline.length_ns == after + 50.0
    path = [(step.stream, step.event, step.reason.name) for step in timeline.critical_path]
    waits = "turn" if reading is Reading.serial else "operands"
    assert path == [(1, 0, "begin"), (1, 1, waits), (0, 1, "rendezvous"), (0, 2, waits)]
    assert "rank 1 DMA q Sync" in timeline.tracks


def test_a_member_timed_alone_meets_nobody() -> None:
    timeline = schedule(two_ranks()[0].stream, EXACT)
    assert starts(timeline)[1] == 100.0 + SEMAPHORE
    assert timeline.tracks[:2] == ("Tensor", "Vector")


def test_refuses_rendezvous_in_contradictory_order() -> None:
    ranks = Builder(rank=0), Builder(rank=1)
    for build, order in zip(ranks, ((0, 1), (1, 0))):
        for rendezvous in order:
            build.event(Engine.dma, cost=Cost(1.0, 1.0), trigger=Engine.sync, rendezvous=rendezvous)
    with pytest.raises(
        InvalidArgument, match="stream 0 in rendezvous 0, stream 1 in rendezvous 1"
    ) as refused:
        schedule([build.stream for build in ranks], EXACT)
    assert refused.value.code == "NKW-TIMING-RENDEZVOUS"


def test_a_set_of_dmas_takes_the_engines_as_long_as_they_do_in_order_of_arrival() -> None:
    """Against the recursion over arrivals in order, which the order of taking them in does not know."""
    generator = np.random.default_rng(4)
    for _ in range(200):
        spans = [(float(begin), float(busy)) for begin, busy in generator.integers(0, 60, (12, 2))]
        engines = DmaEngines(5, (0, 1), 0.0, 13, shared=True)
        for event, (begin, busy) in enumerate(sorted(spans[:6]) + sorted(spans[6:])):
            lane = int(event >= 6)
            engines.find_moved_ns(lane, event, [])
            spans[event] = engines.serve(lane, event, begin, busy)[0], busy
        end = 0.0
        for begin, busy in sorted(spans):
            end = max(end, begin) + busy if busy else end
        assert engines.find_moved_ns(2, 12, [5, 11]) == end
        assert engines.find_end(0)[0] == end


def test_a_stalled_event_lets_later_ones_of_its_engine_pass_when_scheduled() -> None:
    build = Builder()
    a, b, c, d = (build.tensor(name) for name in "abcd")
    build.event(Engine.tensor, writes=(a,), cost=Cost(100.0, 100.0))
    build.event(Engine.vector, reads=(a,), writes=(b,), cost=Cost(10.0, 10.0))
    build.event(Engine.vector, reads=(d,), writes=(c,), cost=Cost(10.0, 10.0))
    build.event(Engine.scalar, reads=(c,), writes=(d,), cost=Cost(100.0, 100.0))
    in_order, listed = schedule(build.stream, EXACT), schedule(build.stream, EXACT, Reading.scheduled)
    assert starts(in_order)[2] == 110.0 + SEMAPHORE
    assert starts(listed)[2] == 0.0
    assert starts(listed)[1] == 100.0 + SEMAPHORE
    assert listed.length_ns < in_order.length_ns


def test_no_event_passes_one_that_it_depends_on_or_that_reads_what_it_writes() -> None:
    build = Builder()
    a, b, c = (build.tensor(name) for name in "abc")
    build.event(Engine.tensor, writes=(a,), cost=Cost(100.0, 100.0))
    build.event(Engine.vector, reads=(a, b), writes=(c,), cost=Cost(10.0, 10.0))
    build.event(Engine.vector, reads=(b,), cost=Cost(10.0, 10.0), writes=(build.tensor("d"),))
    build.event(Engine.vector, writes=(b,), cost=Cost(10.0, 10.0))
    build.event(Engine.scalar, reads=(b,), writes=(build.tensor("e"),), cost=Cost(100.0, 100.0))
    begun = starts(schedule(build.stream, EXACT, Reading.scheduled))
    assert begun[3] >= begun[1] + 10.0


def test_nothing_passes_further_than_the_window() -> None:
    for behind, passes in ((WINDOW - 2, True), (WINDOW - 1, True), (WINDOW, False)):
        build = Builder()
        a, last = build.tensor("a"), build.tensor("last")
        build.event(Engine.tensor, writes=(a,), cost=Cost(1000.0, 1000.0))
        for number in range(behind):
            build.event(Engine.vector, reads=(a,), writes=(build.tensor(f"t{number}"),), cost=Cost(1.0, 1.0))
        late = build.event(Engine.vector, writes=(last,), cost=Cost(1.0, 1.0))
        build.event(Engine.scalar, reads=(last,), writes=(build.tensor("end"),), cost=Cost(5000.0, 5000.0))
        begun = starts(schedule(build.stream, EXACT, Reading.scheduled))
        assert (begun[late] < 1000.0) is passes, behind


def test_activations_of_the_loaded_table_go_first_when_scheduled() -> None:
    build = Builder()
    for table in ("exp", "silu", "exp", "silu"):
        build.event(Engine.scalar, writes=(build.tensor(table),), cost=Cost(8.0, 8.0, table=table))
    loads = [len(pieces(schedule(build.stream, EXACT, reading), SliceKind.table_load)) for reading in Reading]
    assert dict(zip(Reading, loads))[Reading.program] == 4
    assert dict(zip(Reading, loads))[Reading.scheduled] == 2


@pytest.mark.parametrize(("idle", "hoisted"), [(LOAD - 0.25, False), (LOAD, True), (LOAD + 0.25, True)])
def test_a_table_is_loaded_in_an_earlier_idle_time_when_scheduled(idle: float, hoisted: bool) -> None:
    build = Builder()
    late, last = build.tensor("late"), build.tensor("last")
    build.event(Engine.scalar, writes=(build.tensor("first"),), cost=Cost(8.0, 8.0, table="exp"))
    build.event(Engine.vector, writes=(late,), cost=Cost(*(LOAD + 8.0 + idle - SEMAPHORE,) * 2))
    copied = build.event(Engine.scalar, reads=(late,), writes=(last,), cost=Cost(8.0, 8.0, table="copy"))
    build.event(Engine.vector, reads=(last,), writes=(late,), cost=Cost(8.0, 8.0))
    switched = build.event(Engine.scalar, reads=(late,), cost=Cost(8.0, 8.0, table="silu"))
    timeline = schedule(build.stream, EXACT, Reading.scheduled)
    assert violations((build.stream,), EXACT, timeline) == []
    load = pieces(timeline, SliceKind.table_load)[-1]
    begun = starts(timeline)
    assert begun[copied] == LOAD + 8.0 + idle
    assert load.start_ns == (LOAD + 8.0 if hoisted else begun[copied] + 8.0)
    operands = begun[copied] + 8.0 + SEMAPHORE + 8.0 + SEMAPHORE
    assert begun[switched] == (operands if hoisted else load.end_ns)
