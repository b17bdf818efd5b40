"""Laws that hold for every stream, tried on random ones; NKW_DEEP=1 tries many more."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from simulate.hardware import Hardware, guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.run.stream import Stream
from simulate.timing import Reading, bracket, dependences, schedule
from tests.deep import deep_except
from tests.timing.checker import violations
from tests.timing.streams import EXACT, Builder, dma_cost, halved, random_streams, without

SEEDS = range(1000 if os.environ.get("NKW_DEEP") == "1" else 20)
MONOTONE = [reading for reading in Reading if reading is not Reading.scheduled]  # a greedy list has anomalies
SHARING = EXACT.with_numbers(vector_gpsimd_share_sbuf_port=guessed(True, "tests", "as on gen2"))
CASES = [(ranks, queues) for ranks in (1, 2, 3) for queues in (1, 3)]


@pytest.mark.parametrize(
    ("ranks", "queues", "reading"),
    deep_except([(*case, reading) for case in CASES for reading in Reading], 5),
)
def test_every_timeline_is_a_legal_schedule(reading: Reading, ranks: int, queues: int) -> None:
    for seed in SEEDS:
        streams = random_streams(seed, 40, ranks, queues)
        assert violations(streams, EXACT, schedule(streams, EXACT, reading)) == [], seed


def test_short_queues_are_never_overfull_and_keep_the_bracket() -> None:
    short = EXACT.with_numbers(dma_outstanding_per_queue=guessed(2, "tests", "so that queues fill up"))
    for seed in SEEDS:
        streams = random_streams(seed, 40, 2, queues=1)
        assert violations(streams, short, schedule(streams, short)) == [], seed
        readings = bracket(streams, short)
        assert readings.dataflow_ns <= readings.scheduled_ns <= readings.program_ns <= readings.serial_ns, (
            seed
        )


@pytest.mark.parametrize(("ranks", "queues"), CASES)
def test_readings_that_allow_less_are_no_shorter(ranks: int, queues: int) -> None:
    for seed in SEEDS:
        readings = bracket(random_streams(seed, 40, ranks, queues), EXACT)
        assert readings.dataflow_ns <= readings.scheduled_ns <= readings.program_ns <= readings.serial_ns, (
            seed
        )


@pytest.mark.parametrize("reading", Reading)
def test_no_reading_is_shorter_than_its_busiest_engine(reading: Reading) -> None:
    for seed in SEEDS:
        streams = random_streams(seed, 40, 2)
        timeline = schedule(streams, EXACT, reading)
        for stream in streams:
            assert _least_ns(stream) <= timeline.length_ns, seed


@pytest.mark.parametrize("reading", Reading)
def test_the_critical_path_is_a_chain_that_ends_last(reading: Reading) -> None:
    for seed in SEEDS:
        timeline = schedule(random_streams(seed, 40, 2), EXACT, reading)
        path = timeline.critical_path
        last = path[-1].stream, path[-1].event
        ends = [max(p.end_ns, p.ready_ns) for p in timeline.slices() if (p.stream, p.event) == last]
        assert path[0].reason.name in ("begin", "table_load")
        assert all(step.reason.name != "begin" for step in path[1:])
        if timeline.causes.services:
            assert max(ends) < timeline.length_ns, seed
        else:
            assert max(ends) == timeline.length_ns, seed
        assert len({(step.stream, step.event) for step in path}) == len(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "queues", "reading"),
    deep_except([(*case, reading) for case in CASES for reading in MONOTONE], 5),
)
def test_a_halved_cost_never_lengthens(reading: Reading, ranks: int, queues: int) -> None:
    generator = np.random.default_rng(1)
    for seed in SEEDS:
        streams = random_streams(seed, 40, ranks, queues)
        before = schedule(streams, EXACT, reading).length_ns
        for _ in range(6):
            cheaper = tuple(halved(stream, generator) if len(stream) else stream for stream in streams)
            assert schedule(cheaper, EXACT, reading).length_ns <= before, seed


def test_queues_that_share_the_dma_engines_delay_each_other_by_no_more_than_their_work() -> None:
    """What all DMAs take of the engines, on top of a schedule in which they take nothing, bounds every delay."""
    for seed in SEEDS:
        streams = random_streams(seed, 40, 2, queues=3)
        work = sum(event.cost.dma.busy_ns for stream in streams for event in stream if event.cost.dma)
        alone = schedule(tuple(_without_sharing(stream) for stream in streams), EXACT).length_ns
        assert alone <= schedule(streams, EXACT).length_ns <= alone + work, seed


@pytest.mark.parametrize("reading", MONOTONE)
def test_a_dependence_less_never_lengthens(reading: Reading) -> None:
    generator = np.random.default_rng(3)
    for seed in SEEDS:
        streams = random_streams(seed, 40, 2, queues=3)
        waits = dependences(streams)
        before = schedule(streams, EXACT, reading, waits).length_ns
        for _ in range(6):
            fewer = without(waits, generator.integers(len(waits.packed), size=1))
            assert schedule(streams, EXACT, reading, fewer).length_ns <= before, seed


@pytest.mark.parametrize(("chip", "seed"), deep_except(product([EXACT, SHARING], SEEDS), 5))
def test_the_scheduled_reading_is_shorter_or_the_program_reading_itself(chip: Hardware, seed: int) -> None:
    equal = 0
    for number in range(seed * 50, seed * 50 + 50):
        streams = random_streams(number, 3 + number % 17, 1 + number % 3, queues=1 + number % 3)
        waits = dependences(streams, every_read=True)
        listed, program = (
            schedule(streams, chip, reading, waits) for reading in (Reading.scheduled, Reading.program)
        )
        if listed.length_ns < program.length_ns:
            continue
        equal += 1
        for column in ("event", "slice_kind", "start_ns", "end_ns", "ready_ns"):
            assert np.array_equal(getattr(listed, column), getattr(program, column)), (number, column)
        for column in ("event", "reason", "pool"):
            assert np.array_equal(getattr(listed.causes, column), getattr(program.causes, column)), number
        assert listed.critical_path == program.critical_path, number
    assert equal


@pytest.mark.parametrize("reading", Reading)
def test_busy_and_idle_make_the_length(reading: Reading) -> None:
    for seed in SEEDS:
        timeline = schedule(random_streams(seed, 40, 2), EXACT, reading)
        for track in timeline.tracks:
            assert timeline.busy_ns[track] + timeline.idle_ns[track] == timeline.length_ns
            assert 0.0 <= timeline.busy_ns[track] <= timeline.length_ns
        assert timeline.busy_ns[timeline.busiest] == max(timeline.busy_ns.values())


def test_one_core_of_several_can_be_timed_alone() -> None:
    for seed in SEEDS:
        streams = random_streams(seed, 40, 3, queues=1)
        together = schedule(streams, EXACT).length_ns
        for stream in streams:
            assert schedule(stream, EXACT).length_ns <= together, seed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "count"),
    deep_except([(0, 100), *((first, 1_000) for first in range(0, 10_000, 1_000))], [(0, 100)]),
)
def test_all_laws_hold_on_ten_thousand_short_streams(first: int, count: int) -> None:
    """Legal, within the bracket, no shorter than what is busiest, and never longer for a cost or a dependence less.

    Most have several cores, several DMA queues, and more for the DMA engines to move than for any other.
    """
    for seed in range(first, first + count):
        generator = np.random.default_rng(seed)
        streams = random_streams(
            seed, 12, 1 + seed % 3, queues=1 + seed % 4 % 3, moving=0.4 + 0.4 * (seed % 2)
        )
        waits = dependences(streams)
        timelines = {reading: schedule(streams, EXACT, reading, waits) for reading in Reading}
        length = {reading: timeline.length_ns for reading, timeline in timelines.items()}
        assert length[Reading.dataflow] <= length[Reading.scheduled] <= length[Reading.program], seed
        assert length[Reading.program] <= length[Reading.serial], seed
        judged = list(Reading)[seed % 4]
        assert violations(streams, EXACT, timelines[judged]) == [], seed
        for reading in Reading:
            assert max(timelines[reading].busy_ns.values()) <= length[reading], seed
            assert all(_least_ns(stream) <= length[reading] for stream in streams), seed
        cheaper = tuple(halved(stream, generator) if len(stream) else stream for stream in streams)
        looser = without(waits, generator.integers(len(waits.packed), size=min(1, len(waits.packed))))
        for reading in MONOTONE:
            assert schedule(cheaper, EXACT, reading, waits).length_ns <= length[reading], seed
            assert schedule(streams, EXACT, reading, looser).length_ns <= length[reading], seed


def test_a_dma_that_nobody_orders_before_another_does_not_delay_it() -> None:
    """What a server that takes whoever comes breaks the law with: a faster instruction lets a store delay a load.

    The store is first in program order, and waits for the Vector engine; the load comes meanwhile and is nearly done.
    With a Vector instruction half as long the store comes in time for the engines to serve both at once.
    """
    for vector_ns in (800.0, 400.0):
        build = Builder()
        result, loaded, curve = (build.tensor(name) for name in ("result", "loaded", "curve"))
        out = build.tensor("out", buffer=MemoryRegion.private_hbm)
        build.event(Engine.vector, writes=(result,), cost=Cost(vector_ns, vector_ns))
        build.dma((result,), (out,), dma_cost(busy=400.0), Engine.gpsimd)
        build.dma((), (loaded,), dma_cost(busy=700.0), Engine.sync)
        build.event(Engine.scalar, reads=(loaded,), writes=(curve,), cost=Cost(2000.0, 2000.0))
        assert violations((build.stream,), EXACT, schedule(build.stream, EXACT)) == []
        assert schedule(build.stream, EXACT).length_ns == 8 + 100 + 700 + 64 + 2000


def _least_ns(stream: Stream) -> float:
    """Return what the busiest engine, or the DMA engines together, take of a stream at least."""
    held_ns: dict[int, float] = {}
    pool = 0.0
    for event in stream:
        dma = event.cost.dma
        interval = event.cost.interval_cycles - event.cost.kept_cycles
        if event.cost.clears:
            continue  # omitted, perhaps
        if event.cost.cells:
            interval = min(interval, EXACT.matmul_min_interval_cycles)
        if dma is not None:
            interval = dma.trigger_ns + dma.gpsimd_ns
        held_ns[event.trigger.value] = held_ns.get(event.trigger.value, 0.0) + interval
        pool += dma.busy_ns if dma is not None else 0.0
    return max([pool, *held_ns.values()])


def _without_sharing(stream: Stream) -> Stream:
    return stream.with_costs(
        [
            cost if cost.dma is None else replace(cost, dma=replace(cost.dma, busy_ns=0.0))
            for cost in stream.costs
        ]
    )
