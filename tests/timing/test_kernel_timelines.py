"""Timelines of real kernels: legal on every chip, the same every time, and about as fast as published."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.hardware import TARGETS, hardware
from simulate.run import Launch
from simulate.timing import Reading, SliceKind, Timeline, bracket, listing, schedule
from tests.timing import kernels
from tests.timing.checker import violations


def rounding_ns(timeline: Timeline) -> float:
    """Return the rounding of moments: sums of few numbers per event, each rounded by half a unit in the last place."""
    return 8 * len(timeline) * float(np.spacing(timeline.length_ns))


def check(launch: Launch) -> None:
    for reading in Reading:
        timeline = schedule(launch.streams, launch.hardware, reading)
        assert violations(launch.streams, launch.hardware, timeline, rounding_ns(timeline)) == []
    readings = bracket(launch.streams, launch.hardware)
    assert readings.dataflow_ns <= readings.scheduled_ns <= readings.program_ns <= readings.serial_ns


@pytest.mark.parametrize("target", TARGETS)
def test_matmul_tiles_are_scheduled_legally_on_every_chip(target: str) -> None:
    check(kernels.dry(kernels.matmul_exp, kernels.zeros(256, 256), kernels.zeros(256, 512), target=target))


def test_ranks_that_meet_are_scheduled_legally() -> None:
    launch = kernels.dry(kernels.summed, kernels.zeros(128, 64), ranks=2)
    check(launch)
    timeline = schedule(launch.streams, launch.hardware)
    cost = launch.streams[0].event(1).cost
    rendezvous = [
        piece for piece in timeline.slices() if piece.event == 1 and piece.slice_kind is SliceKind.trigger
    ]
    assert len({(piece.start_ns, piece.ready_ns) for piece in rendezvous}) == 1
    latency_ns = cost.latency_cycles / launch.hardware.sync_clock_ghz
    assert rendezvous[0].ready_ns == rendezvous[0].start_ns + latency_ns


def test_cores_that_write_their_own_halves_run_side_by_side() -> None:
    launch = kernels.dry(kernels.halves, kernels.zeros(256, 64), cores=2)
    check(launch)
    timeline = schedule(launch.streams, launch.hardware)
    assert timeline.length_ns == schedule(launch.streams[0], launch.hardware).length_ns
    assert "rank 0 core 1 DMA q Sync" in timeline.tracks


@pytest.mark.parametrize("target", TARGETS)
def test_matmuls_of_resident_tiles_run_at_the_issue_rate(target: str) -> None:
    """512 columns each, bfloat16: one every interval, as traces show, and half of that while the throttle is closed."""
    launch = kernels.dry(kernels.same_tiles, kernels.zeros(128, 512, kernels.BF16), target=target)
    timeline = schedule(launch.streams, launch.hardware)
    begun = [piece.start_ns for piece in timeline.slices() if piece.track == "Tensor"]
    chip = hardware(target)
    interval_ns = (512 + chip.matmul_issue_overhead_cycles) / chip.tensor_clock_ghz
    ratio = chip.tensor_clock_ghz / chip.tensor_throttled_clock_ghz
    paces = np.diff(begun) / interval_ns
    slack = rounding_ns(timeline) / interval_ns
    assert all(
        min(abs(pace - known) for known in (1.0, (1.0 + ratio) / 2.0, ratio)) <= slack for pace in paces
    )
    assert paces[0] == pytest.approx(ratio) and all(np.diff(paces) <= slack)


def test_loads_run_ahead_of_the_stores_of_earlier_tiles() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 1024), kernels.zeros(256, 1024))
    timeline = schedule(launch.streams, launch.hardware)
    busy = sum(event.cost.dma.busy_ns for event in launch.streams[0] if event.cost.dma)
    fixed = max(event.cost.latency_cycles / launch.hardware.sync_clock_ghz for event in launch.streams[0])
    assert timeline.length_ns < busy + 2 * fixed + max(timeline.busy_ns["Tensor"], timeline.busy_ns["Scalar"])


def test_equal_launches_have_equal_timelines() -> None:
    texts = set()
    for _ in range(2):
        launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 256), kernels.zeros(256, 512))
        texts.add(listing(launch.streams, schedule(launch.streams, launch.hardware)))
    assert len(texts) == 1
