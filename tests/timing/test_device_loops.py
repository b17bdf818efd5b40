"""Device loops: what an iteration costs, and that nothing of it comes before it."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.hardware import hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.timing import Reading, schedule
from tests.timing import kernels
from tests.timing.checker import violations
from tests.timing.streams import EXACT, Builder

STEP = Cost(1000.0, 1000.0)
SEMAPHORE = EXACT.semaphore_ns


def iteration(build: Builder, *engines: Engine, cost: Cost = Cost(50.0, 50.0)) -> None:  # noqa: B008
    """Issue a step, and an independent event on each of these engines."""
    build.event(Engine.sync, cost=STEP, iteration_of=0)
    for number, engine in enumerate(engines):
        tile = build.tensor(f"tile {len(build.stream)} {number}")
        build.event(engine, writes=(tile,), cost=cost)


@pytest.mark.parametrize("reading", [Reading.program, Reading.scheduled, Reading.dataflow])
def test_no_engine_begins_an_iteration_before_its_step(reading: Reading) -> None:
    build = Builder()
    iteration(build, Engine.vector, Engine.scalar, Engine.vector)
    timeline = schedule(build.stream, EXACT, reading)
    first = 1000.0 + SEMAPHORE
    later = 0.0 if reading is Reading.dataflow else 50.0
    assert timeline.start_ns.tolist() == [0.0, first, first, first + later]
    assert violations((build.stream,), EXACT, timeline) == []


def test_an_engine_does_not_pass_its_stalled_first_event_into_the_iteration_before() -> None:
    """The scheduled reading may reorder an engine, but only what the iteration has begun."""
    build = Builder()
    slow, fast = build.tensor("slow"), build.tensor("fast")
    iteration(build, Engine.scalar)
    build.event(Engine.gpsimd, writes=(slow,), cost=Cost(3000.0, 3000.0))
    build.event(Engine.sync, cost=STEP, iteration_of=0)
    build.event(Engine.vector, (slow,), (slow,), Cost(10.0, 10.0))
    last = build.event(Engine.vector, writes=(fast,), cost=Cost(10.0, 10.0))
    timeline = schedule(build.stream, EXACT, Reading.scheduled)
    starts = {piece.event: piece.start_ns for piece in timeline.slices()}
    assert starts[last] == 2000.0 + SEMAPHORE < starts[last - 1]
    assert violations((build.stream,), EXACT, timeline) == []


def test_an_event_without_a_loop_waits_for_no_step() -> None:
    build = Builder()
    tile = build.tensor("tile")
    build.event(Engine.sync, cost=STEP)
    build.event(Engine.vector, writes=(tile,), cost=Cost(50.0, 50.0))
    assert schedule(build.stream, EXACT).start_ns.tolist() == [0.0, 0.0]


def test_what_comes_before_a_loop_waits_for_none_of_its_steps() -> None:
    build = Builder()
    tile = build.tensor("tile")
    build.event(Engine.vector, writes=(tile,), cost=Cost(50.0, 50.0))
    iteration(build, Engine.vector)
    assert schedule(build.stream, EXACT).start_ns.tolist() == [0.0, 0.0, 1000.0 + SEMAPHORE]


def _counted(x, count):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.load(x)

    def body(_):
        nisa.tensor_scalar(total, total, nl.add, 1.0)

    nl.fori_loop(0, count, body)
    nisa.dma_copy(dst=out, src=total)
    return out


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_the_first_iteration_costs_more_than_the_others(target: str) -> None:
    chip = hardware(target)
    for count in (0, 1, 2, 3, 10):
        done = kernels.dry(_counted, np.zeros((128, 8), np.float32), count, target=target)
        steps = [event.cost.interval_cycles for event in done.streams[0] if event.op == "loop_iteration"]
        first, more = chip.device_loop_first_iteration_ns, chip.device_loop_iteration_ns
        expected = [first] * min(count, 1) + [more] * max(count - 1, 0)
        assert [cycles / chip.sync_clock_ghz for cycles in steps] == pytest.approx(expected)
        assert schedule(done.streams, done.hardware).busy_ns["Sync"] >= sum(expected)


def _nested(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.load(x)

    def inner(_):
        nisa.tensor_scalar(total, total, nl.add, 1.0)

    nl.fori_loop(0, 2, lambda _: nl.fori_loop(0, 2, inner))
    nisa.dma_copy(dst=out, src=total)
    return out


def test_every_entry_into_an_inner_loop_has_a_first_iteration() -> None:
    done = kernels.dry(_nested, np.zeros((128, 8), np.float32))
    chip = done.hardware
    first, more = chip.device_loop_first_iteration_ns, chip.device_loop_iteration_ns
    steps = [event.cost.interval_cycles for event in done.streams[0] if event.op == "loop_iteration"]
    outer, inner = [first, more], [first, more]
    assert [cycles / chip.sync_clock_ghz for cycles in steps] == pytest.approx(
        [outer[0], *inner, outer[1], *inner]
    )
