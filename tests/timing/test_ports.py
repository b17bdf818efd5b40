"""Ports that engines share: who excludes whom on which chip, and the laws of timing with them."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.hardware import guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.timing import Reading, bracket, dependences, schedule
from simulate.timing.ports import find_shared_ports
from tests.timing.streams import EXACT, Builder, halved, random_streams

SHARING = EXACT.with_numbers(
    vector_gpsimd_share_sbuf_port=guessed(True, "tests", "as on gen2"),
    vector_scalar_share_psum_port=guessed(True, "tests", "as on gen2"),
)
COST = Cost(100.0, 150.0)
FAST = Cost(100.0, 150.0, fast_mode=True)


def _pair(chip, engines, buffer, costs=(COST, COST), one_tile=False):
    """Return when two independent instructions start."""
    build = Builder()
    first = build.tensor("first", buffer=buffer)
    second = first if one_tile else build.tensor("second", buffer=buffer)
    for engine, tile, cost in zip(engines, (first, second), costs):
        build.event(engine, reads=(tile,), cost=cost)
    return schedule(build.stream, chip).start_ns.tolist()


@pytest.mark.parametrize(
    ("engines", "buffer", "waits"),
    [
        ((Engine.vector, Engine.gpsimd), MemoryRegion.sbuf, True),
        ((Engine.vector, Engine.gpsimd), MemoryRegion.psum, False),
        ((Engine.vector, Engine.scalar), MemoryRegion.psum, True),
        ((Engine.vector, Engine.scalar), MemoryRegion.sbuf, False),
        ((Engine.scalar, Engine.gpsimd), MemoryRegion.sbuf, False),
    ],
)
def test_engines_exclude_each_other_where_they_share_a_port(engines, buffer, waits: bool) -> None:
    assert _pair(SHARING, engines, buffer) == [0.0, 100.0 * waits]
    assert _pair(EXACT, engines, buffer) == [0.0, 0.0]


@pytest.mark.parametrize(("cost", "waits"), [(FAST, True), (COST, False)])
def test_fast_modes_take_turns_with_gpsimd(cost: Cost, waits: bool) -> None:
    engines = (Engine.vector, Engine.gpsimd)
    assert _pair(EXACT, engines, MemoryRegion.sbuf, (cost, COST)) == [0.0, 100.0 * waits]


@pytest.mark.parametrize("one_tile", [True, False])
def test_two_engines_on_one_bank_slow_each_other_down(one_tile: bool) -> None:
    engines = (Engine.vector, Engine.scalar)
    assert _pair(EXACT, engines, MemoryRegion.psum, one_tile=one_tile) == [0.0, 100.0 * one_tile]


def test_a_port_that_one_engine_uses_alone_costs_nothing() -> None:
    build = Builder()
    tile = build.tensor("tile")
    for _ in range(3):
        build.event(Engine.vector, reads=(tile,), cost=COST)
    assert find_shared_ports(build.stream, SHARING) == []


@pytest.mark.slow
def test_engines_that_share_a_port_never_hold_it_together_and_keep_the_laws() -> None:
    generator = np.random.default_rng(4)
    for seed in range(200):
        streams = random_streams(seed, 24, 1 + seed % 2, queues=1)
        waits = dependences(streams)
        readings = bracket(streams, SHARING, waits)
        assert readings.dataflow_ns <= readings.scheduled_ns <= readings.program_ns <= readings.serial_ns, (
            seed
        )
        cheaper = tuple(halved(stream, generator) if len(stream) else stream for stream in streams)
        for reading in (Reading.program, Reading.serial):
            timeline = schedule(streams, SHARING, reading, waits)
            assert schedule(cheaper, SHARING, reading, waits).length_ns <= timeline.length_ns, seed
            assert all(_apart(stream, number, timeline) for number, stream in enumerate(streams)), seed


def _apart(stream, number: int, timeline) -> bool:
    """Return whether no Vector and GpSimd instruction are on SBUF at one time, checked pair by pair."""
    pieces = {
        p.event: p for p in timeline.slices() if p.stream == number and p.slice_kind.name == "instruction"
    }
    both = [
        pieces[event.index]
        for event in stream
        if event.engine in (Engine.vector, Engine.gpsimd)
        and any(stream.tensors[access.tensor].buffer is MemoryRegion.sbuf for access in event.accesses)
    ]
    return all(
        a is b or a.track == b.track or a.end_ns <= b.start_ns or b.end_ns <= a.start_ns
        for a in both
        for b in both
    )
