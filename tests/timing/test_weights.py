"""Weights that stay in the array from one matmul to the next: which, and what it saves."""

from __future__ import annotations

from dataclasses import replace

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from simulate.hardware import TARGETS, Hardware, hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.run import Mode
from simulate.timing import Reading, schedule
from simulate.world import launch
from tests.timing.checker import violations
from tests.timing.streams import EXACT, Builder, box

MATMUL = Cost(100.0, 100.0, stationary=(1,), kept_cycles=40.0)


def durations(build: Builder, reading: Reading = Reading.scheduled) -> list[float]:
    """Return how long the matmuls hold the array, in program order."""
    timeline = schedule(build.stream, EXACT, reading)
    assert violations((build.stream,), EXACT, timeline) == []
    return [piece.end_ns - piece.start_ns for piece in timeline.slices() if piece.track == "Tensor"]


def products(costs: list[Cost], tiles: list[int], written_before: int | None = None) -> Builder:
    """Build matmuls by the weights each of them reads; `written_before` overwrites weights 0 before that one."""
    build = Builder()
    weights = [build.tensor(f"weights {n}") for n in range(2)]
    moving = build.tensor("moving")
    for number, (cost, tile) in enumerate(zip(costs, tiles)):
        if number == written_before:
            build.event(Engine.vector, writes=(weights[0],))
        out = build.tensor("bank", buffer=MemoryRegion.psum)
        build.event(Engine.tensor, (weights[tile], moving), (out,), cost)
    return build


def test_the_second_of_two_matmuls_keeps_the_weights_of_the_first() -> None:
    build = products([MATMUL] * 3, [0, 0, 0])
    assert durations(build) == [100.0, 60.0, 60.0]
    assert durations(build, Reading.program) == [100.0, 100.0, 100.0]
    assert durations(build, Reading.dataflow) == [60.0, 60.0, 60.0]


def test_other_weights_in_between_are_loaded_and_so_are_the_first_again() -> None:
    assert sorted(durations(products([MATMUL] * 2, [0, 1]))) == [100.0, 100.0]
    ordered = products([MATMUL] * 3, [0, 1, 0])
    ordered.stream.requested += [(0, 1), (1, 2)]
    assert durations(ordered) == [100.0, 100.0, 100.0]


def test_weights_that_are_written_in_between_are_loaded_again() -> None:
    assert durations(products([MATMUL] * 2, [0, 0], written_before=1)) == [100.0, 100.0]


def test_weights_beside_which_something_is_written_are_kept() -> None:
    build = Builder()
    weights, moving = build.tensor("weights"), build.tensor("moving")
    half, other = (box(weights, (0, 128), columns) for columns in ((0, 32), (32, 64)))
    for _ in range(3):
        out = build.tensor("bank", buffer=MemoryRegion.psum)
        build.event(Engine.tensor, (half, moving), (out,), MATMUL)
        build.event(Engine.vector, writes=(other,))
    assert durations(build) == [100.0, 60.0, 60.0]


@pytest.mark.parametrize("other", [replace(MATMUL, stationary=(2,)), replace(MATMUL, stationary=None)])
def test_weights_read_in_another_way_or_into_another_place_are_loaded_again(other: Cost) -> None:
    assert durations(products([MATMUL, other], [0, 0])) == [100.0, 100.0]


def _products(x, w, positions):
    out = nl.ndarray((32, 16 * len(positions)), dtype=nl.float32, buffer=nl.shared_hbm)
    moving, weights = nl.load(x), nl.load(w)
    bank = nl.ndarray((32, 16 * len(positions)), dtype=nl.float32, buffer=nl.psum)
    for number, position in enumerate(positions):
        columns = bank[:, 16 * number : 16 * number + 16]
        nisa.nc_matmul(
            dst=columns, stationary=weights, moving=moving, tile_position=position, tile_size=(128, 64)
        )
    result = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bank)
    nisa.dma_copy(dst=out, src=result)
    return out


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_that_repeats_its_weights_saves_what_their_load_exposes(target: str) -> None:
    chip = hardware(target)
    same, moved = (_array_ns(chip, positions) for positions in ([(0, 0)] * 3, [(0, 0), (0, 64), (0, 0)]))
    streamed = max(min(chip.matmul_min_interval_cycles, 32), 16)
    exposed = max(128 * chip.load_weights_cycles_per_row - streamed, 0.0) / chip.tensor_clock_ghz
    slowed = chip.tensor_clock_ghz / chip.tensor_throttled_clock_ghz if chip.activity_throttle else 1.0
    assert moved - same == pytest.approx(2 * exposed * slowed)


def _array_ns(chip: Hardware, positions: list[tuple[int, int]]) -> float:
    arguments = (np.zeros((128, 16), np.float16), np.zeros((128, 32), np.float16), positions)
    streams = launch(_products, [(arguments, {})], chip, mode=Mode.dry).streams
    timeline = schedule(streams, chip, Reading.scheduled)
    # Matmuls in other tiles of the array run side by side, so the time of each counts and not that of the engine.
    on_tensor_engine = timeline.track == timeline.tracks.index("Tensor")
    return float((timeline.end_ns - timeline.start_ns)[on_tensor_engine].sum())
