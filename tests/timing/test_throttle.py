"""The activity throttle: closed at first and while the array mostly waits, open for work that keeps it busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulate.hardware import hardware
from simulate.isa import costs
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.timing import schedule
from tests.timing.streams import Builder, dma_cost


def test_an_array_that_is_kept_busy_runs_at_its_full_clock_after_a_window() -> None:
    chip = hardware("trn2")
    build = Builder()
    cost = costs.matmul(chip, 128, 128, 512, fp32=False)
    count = 40
    for _ in range(count):
        build.event(Engine.tensor, cost=cost)
    starts = schedule(build.stream, chip).start_ns
    interval_ns = cost.interval_cycles / chip.tensor_clock_ghz
    assert starts[1] - starts[0] == pytest.approx(2 * interval_ns)
    assert starts[-1] - starts[-2] == pytest.approx(interval_ns)
    # What the throttle costs a busy array: a window in which it does half of the work, and what opening takes.
    late_ns = starts[-1] - (count - 1) * interval_ns
    assert 0.5 * chip.activity_throttle_window_ns <= late_ns <= chip.activity_throttle_window_ns


@pytest.mark.parametrize(("gap_windows", "pace"), [(0.0, 1.0), (2.0, 1.5), (8.0, 2.0)])
def test_an_array_that_mostly_waits_stays_at_half_rate(gap_windows: float, pace: float) -> None:
    """Two windows of work, then a gap: the less of the time the array was busy, the slower it goes on."""
    chip = hardware("trn2")
    build = Builder()
    tile = build.tensor("tile")
    cost = costs.matmul(chip, 128, 128, 512, fp32=False)
    for _ in range(int(2 * chip.activity_throttle_window_ns / 213)):
        build.event(Engine.tensor, cost=cost)
    gap_ns = gap_windows * 2 * chip.activity_throttle_window_ns
    build.event(Engine.tensor, writes=(tile,), cost=Cost(1.0, gap_ns * chip.tensor_clock_ghz))
    for _ in range(2):
        build.event(Engine.tensor, reads=(tile,), cost=cost)
    starts = schedule(build.stream, chip).start_ns
    interval_ns = cost.interval_cycles / chip.tensor_clock_ghz
    assert starts[-1] - starts[-2] == pytest.approx(pace * interval_ns)


def test_loading_before_the_first_product_is_not_held_against_the_array() -> None:
    chip = hardware("trn2")
    tails = []
    for into_sbuf in (True, False):
        build = Builder()
        tile = build.tensor("tile", buffer=MemoryRegion.sbuf if into_sbuf else MemoryRegion.private_hbm)
        megabytes = 16
        load = dma_cost(busy=megabytes * 1e6 / chip.hbm_gb_per_s_per_core)
        load = replace(load, dma=replace(load.dma, bytes=megabytes * 10**6))
        build.dma((), (tile,), load, Engine.sync)
        cost = costs.matmul(chip, 128, 128, 512, fp32=False)
        for _ in range(24):
            build.event(Engine.tensor, reads=(tile,), cost=cost)
        starts = schedule(build.stream, chip).start_ns
        tails.append((starts[-1] - starts[-2]) * chip.tensor_clock_ghz / cost.interval_cycles)
    assert tails == [pytest.approx(1.0), pytest.approx(2.0)]


def test_gen2_has_no_throttle() -> None:
    chip = hardware("trn1")
    build = Builder()
    cost = costs.matmul(chip, 128, 128, 512, fp32=False)
    for _ in range(3):
        build.event(Engine.tensor, cost=cost)
    starts = schedule(build.stream, chip).start_ns
    assert starts[1] - starts[0] == pytest.approx(cost.interval_cycles / chip.tensor_clock_ghz)
