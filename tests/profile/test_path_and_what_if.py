"""The critical path against schedules made anew: what it books on a thing bounds what that thing can save.

A launch is as long as its critical path. Where every start is the latest of sums of costs, as in the serial, program
and dataflow readings, the same path stays a bound when some costs shrink: the launch gets shorter by no more than the
path does. Half the costs of an instruction save at most half of what the path books on its phases. On top come:

- What the activity throttle adds to matmuls on the path, because it may open earlier.
- Half the shortest completion of a DMA, which counts for every DMA.
- Where the engines carry out several things in turn, another one of these may begin first. The begin of the first of
  them is then taken from the new schedule, and the path counts from there on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pytest

import nki_kernels
from nki_kernels import ladder
from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost, Phase
from simulate.profile import Profile, profile
from simulate.profile.critical_path import Stretch
from simulate.profile.moments import Moments, format_line
from simulate.profile.what_if import WhatIf, halve_cost
from simulate.run import Launch
from simulate.run.stream import Stream
from simulate.timing import Reading
from tests.deep import deep_except
from tests.kernels.accuracy import in_order
from tests.timing import kernels
from tests.timing.streams import EXACT, random_streams
from tests.timing.test_rotation import chip_with, random_loop
from tools.timelines import TARGETS, Case, cases

OWN = (Phase.issue, Phase.pipeline, Phase.first_byte, Phase.data, Phase.completion)
SWIGLU = (kernels.zeros(256, 2048), kernels.zeros(1, 2048), *[kernels.zeros(2048, 4096, kernels.BF16)] * 2)


def rounding_ns(done: Profile) -> float:
    """Return the rounding of moments: sums of few numbers per event, each rounded by half a unit in the last place."""
    return 8 * len(done.timeline) * float(np.spacing(done.length_ns))


def allowed(chip: Hardware, cost: Cost, engine: Engine, trigger: Engine) -> dict[Phase, float]:
    """Return how long the phases of an event can be by its cost, the throttle at its slowest."""
    hand_over_ns = max(chip.semaphore_ns, chip.same_engine_wait_ns)
    most = {Phase.semaphore: hand_over_ns, Phase.table_load: chip.activation_table_load_ns}
    dma = cost.dma
    if dma is not None:
        return most | {
            Phase.issue: dma.trigger_ns + dma.gpsimd_ns,
            Phase.first_byte: dma.first_byte_ns,
            Phase.data: max(dma.transfer_ns, dma.busy_ns),
            Phase.completion: dma.completion_ns,
        }
    clock = getattr(chip, f"{(Engine.sync if trigger is Engine.dma else trigger).name}_clock_ghz")
    on_the_way = max(cost.latency_cycles - cost.interval_cycles + cost.kept_cycles, 0.0) / clock
    ratio, later = 1.0, 0.0
    if chip.activity_throttle and cost.streamed_cycles:
        ratio = chip.tensor_clock_ghz / chip.tensor_throttled_clock_ghz
        later = chip.matmul_throttled_latency_ns - chip.matmul_latency_ns
    most[Phase.issue] = cost.interval_cycles / clock * ratio
    most[Phase.data if engine is Engine.dma else Phase.pipeline] = on_the_way + later
    return most


def facts(moments: Moments, event: int) -> tuple[Cost, Engine, Engine]:
    stream, index = moments.stream_of(event)
    return stream.costs[stream.cost_ids[index]], Engine(stream.engines[index]), Engine(stream.triggers[index])


def too_long(done: Profile) -> Iterator[str]:
    """Yield phases of the critical path that are longer than their terms allow."""
    for stretch in done.critical_path:
        most = allowed(done.hardware, *facts(done.moments, stretch.event))
        for phase, length in stretch.phases:
            if length > most.get(phase, 0.0) + rounding_ns(done):
                yield f"{done.moments.op(stretch.event)} ({stretch.reason.name}): {phase.value} {length}, not {most}"


def booked(done: Profile, path: Sequence[Stretch], counts: Callable[[int, Phase], bool]) -> float:
    """Return what a part of the critical path books on phases."""
    return sum(length for stretch in path for phase, length in stretch.phases if counts(stretch.event, phase))


def throttled(done: Profile, path: Sequence[Stretch]) -> float:
    """Return what the throttle adds on a part of the path, at most."""
    added_ns = 0.0
    for stretch in path:
        cost, _, trigger = facts(done.moments, stretch.event)
        if done.hardware.activity_throttle and cost.streamed_cycles:
            clock = getattr(done.hardware, f"{trigger.name}_clock_ghz")
            plain = {Phase.issue: cost.interval_cycles / clock}
            plain[Phase.pipeline] = max(cost.latency_cycles - cost.interval_cycles, 0.0) / clock
            added_ns += sum(max(length - plain.get(phase, length), 0.0) for phase, length in stretch.phases)
    return added_ns


def halves(done: Profile, row: WhatIf) -> Callable[[int, Phase], bool]:
    """Return whether a row of the what-if halves a phase of an event."""

    def counts(event: int, phase: Phase) -> bool:
        cost, engine, _ = facts(done.moments, event)
        if row.line:
            return phase in OWN and format_line(done.moments.line(event)) == row.line
        if row.cost_name == "semaphores":
            return phase is Phase.semaphore
        if row.cost_name == "activation table loads":
            return phase is Phase.table_load
        if row.cost_name == "data phase of all DMAs":
            return phase is Phase.data and cost.dma is not None
        if row.cost_name == "start and end of all DMAs":
            return phase in OWN and phase is not Phase.data and cost.dma is not None
        return phase in OWN and engine.name == row.cost_name.removeprefix("all of ").lower()

    return counts


def disagreements(done: Profile) -> Iterator[str]:
    """Yield rows of the what-if that save more than the path allows, where nothing else comes first by their change."""
    for row in done.what_if:
        most = booked(done, done.critical_path, halves(done, row)) / 2 + throttled(done, done.critical_path)
        if row.before_ns - row.length_ns > most + rounding_ns(done):
            yield f"{row.cost_name} {row.line} saves {row.before_ns - row.length_ns}, not {most} of {row.before_ns}"


def dry(case: Case, target: str) -> Launch:
    return kernels.dry(case.kernel, *case.arguments, target=target, ranks=case.ranks)


@pytest.mark.parametrize(
    ("case", "target"),
    deep_except(product(cases(), TARGETS), 10),
    ids=lambda value: getattr(value, "name", value),
)
def test_the_path_of_every_shipped_kernel_keeps_to_its_terms_and_to_what_halving_saves(
    case: Case, target: str
) -> None:
    launch = dry(case, target)
    for reading in Reading:
        done = profile(launch.streams, launch.hardware, reading=reading)
        assert list(too_long(done)) == [], reading
        if reading in (Reading.serial, Reading.program):
            assert list(disagreements(done)) == [], reading


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_floor_of_the_report_is_below_every_reading_of_every_shipped_kernel(target: str) -> None:
    for case in cases():
        launch = dry(case, target)
        done = profile(launch.streams, launch.hardware)
        for reading, timeline in done.timelines.items():
            assert done.roofline.least_ns <= timeline.length_ns, (case.name, reading)


def notebook_cases() -> Iterator[tuple[Case, str]]:
    """Yield the launches whose profiles the notebooks show."""
    square = np.zeros((1024, 1024), kernels.BF16)
    for rung in (ladder.tile_by_tile, ladder.hoisted, ladder.blocked):
        yield Case(rung, (square, square)), "trn1"
    gate, down = np.zeros((1024, 4096), kernels.BF16), np.zeros((4096, 1024), kernels.BF16)
    for target in ("trn1", "trn2"):
        for rows in (1, 128, 512):
            x, norm = np.zeros((rows, 1024), kernels.BF16), np.zeros((1, 1024), kernels.BF16)
            block = dict(x=x, norm_weight=norm, w_gate=gate, w_up=gate, w_down=down, eps=1e-5)
            yield Case(nki_kernels.mlp, in_order(nki_kernels.mlp, **block)), target


@pytest.mark.slow
@pytest.mark.parametrize(("case", "target"), deep_except(notebook_cases(), 4))
def test_the_paths_of_the_notebooks_agree_with_what_halving_saves(case: Case, target: str) -> None:
    launch = dry(case, target)
    for reading in (Reading.program, Reading.dataflow):
        done = profile(launch.streams, launch.hardware, reading=reading)
        assert list(too_long(done)) == []
        assert done.roofline.least_ns <= done.length_ns
    assert list(disagreements(profile(launch.streams, launch.hardware))) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_that_waits_for_its_weights_is_told_so(target: str) -> None:
    """Weights take nine tenths of the DMA engines' time, results the rest, by a queue of their own."""
    launch = kernels.dry(kernels.rmsnorm_swiglu, *SWIGLU, target=target)
    done = profile(launch.streams, launch.hardware)
    work: dict[bool, float] = {False: 0.0, True: 0.0}
    for event in launch.streams[0]:
        if event.cost.dma is not None:
            work[event.trigger is Engine.gpsimd] += event.cost.dma.busy_ns
    path = done.critical_path
    held_ns = {True: 0.0, False: 0.0}
    for stretch in path:
        cost, _, trigger = facts(done.moments, stretch.event)
        if cost.dma is not None:
            held_ns[trigger is Engine.gpsimd] += stretch.length_ns
    whole_ns = max(
        cost.latency_cycles / launch.hardware.gpsimd_clock_ghz
        for cost in launch.streams[0].costs
        if cost.dma is not None
    )
    assert held_ns[True] <= work[True] + whole_ns, "in turns, and the last one whole"
    assert held_ns[False] > 0.8 * done.length_ns
    assert list(too_long(done)) == []
    assert list(disagreements(done)) == []


def test_the_peaks_allow_no_reading_less_than_the_report_says() -> None:
    launch = kernels.dry(kernels.rmsnorm_swiglu, *SWIGLU)
    done = profile(launch.streams, launch.hardware)
    moved_ns = sum(event.cost.dma.busy_ns for event in launch.streams[0] if event.cost.dma)
    for reading, timeline in done.timelines.items():
        assert max(done.roofline.least_ns, moved_ns) <= timeline.length_ns, reading


def cheaper(streams: Sequence[Stream], chosen: Callable[[int], bool]) -> list[Stream]:
    """Return the streams with the costs of some events, numbered over all of them, halved."""
    out, base = [], 0
    for stream in streams:
        costs = list(stream.costs)
        ids = array("I", stream.cost_ids)
        for event in range(len(stream)):
            if chosen(base + event):
                ids[event] = len(costs)
                costs.append(halve_cost(stream.costs[stream.cost_ids[event]]))
        out.append(stream.with_costs(costs, ids))
        base += len(stream)
    return out


def most_saved(done: Profile, after: Profile, chosen: Callable[[int], bool]) -> float:
    """Return the most that the halved costs of some events save, by the path and by what begins first in last turns."""
    steps, path = done.timeline.critical_path, done.critical_path
    first = max(
        (
            index
            for index, s in enumerate(steps)
            if s.served_ns is not None and s.reason.name not in ("pool", "engine")
        ),
        default=None,
    )
    if first is None:
        return booked(done, path, lambda event, phase: chosen(event) and phase in OWN) / 2 + throttled(
            done, path
        )
    in_turn = [
        stretch.event for stretch, step in zip(path[first:], steps[first:]) if step.served_ns is not None
    ]
    by_engine = steps[first].until is Phase.issue
    begins, begin = ((run.moments.start if by_engine else run.moments.data_start) for run in (after, done))
    earlier = begin[path[first].event] - min(begins[event] for event in in_turn)
    from_there = path[first + 1 :]
    first_ns = path[first].phases[-1 if by_engine or path[first].phases[-1][0] is Phase.data else -2][1]
    later = booked(done, from_there, lambda event, phase: chosen(event) and phase in OWN)
    shortest = min((c.dma.completion_ns for s in done.streams for c in s.costs if c.dma), default=0.0)
    return (
        max(earlier, 0.0)
        + (later + first_ns * chosen(path[first].event) + shortest) / 2
        + throttled(done, path[first:])
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.deep)])
@pytest.mark.parametrize("reading", Reading)
def test_the_paths_of_random_streams_keep_to_their_terms_and_to_what_halving_saves(
    reading: Reading, count: int
) -> None:
    generator = np.random.default_rng(7)
    for seed in range(count):
        streams: Sequence[Stream] = random_streams(seed, 40, 1 + seed % 3, queues=1 + seed % 4 % 3)
        chip = EXACT
        if seed % 4 == 3:
            streams = (random_loop(seed, 1 + seed % 8 // 4, (128,)).stream,)
            chip = chip_with(int(generator.integers(3, 8)) * 64, int(generator.integers(1, 4)) * 64)
        done = profile(streams, chip, reading=reading)
        assert list(too_long(done)) == [], seed
        if reading is Reading.scheduled:
            continue
        for _ in range(4):
            half = generator.random(sum(map(len, streams))) < 0.5
            chosen = half.__getitem__
            after = profile(cheaper(streams, chosen), chip, reading=reading)
            saved = done.length_ns - after.length_ns
            assert saved <= most_saved(done, after, chosen) + rounding_ns(done), seed
