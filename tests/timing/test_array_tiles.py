"""Tiles of the array: matmuls on different cells run side by side."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from simulate.hardware import guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.profile import profile
from simulate.timing import Reading, schedule, write_trace
from tests.isa.tiles import plan, tile
from tests.timing import kernels
from tests.timing.checker import violations
from tests.timing.streams import EXACT, Builder, tile_cells

LEFT, RIGHT = tile_cells(0, 0, 128, 64), tile_cells(0, 64, 128, 64)
TOP, CORNER = tile_cells(0, 0, 64, 128), tile_cells(96, 96, 32, 32)
LEAST = EXACT.matmul_min_interval_cycles  # ns as well: the clock of EXACT is 1 GHz


def matmuls(*tiles: tuple[int, ...], interval: float = 200.0) -> Builder:
    """Return independent matmuls in these tiles; () is the whole array."""
    build = Builder()
    operand = build.tensor("operand")
    for number, cells in enumerate(tiles):
        bank = build.tensor(f"bank {number}", buffer=MemoryRegion.psum)
        build.event(Engine.tensor, (operand,), (bank,), Cost(interval, interval + 50.0, cells=cells))
    return build


def starts(*tiles: tuple[int, ...], interval: float = 200.0, reading: Reading = Reading.program):
    build = matmuls(*tiles, interval=interval)
    timeline = schedule(build.stream, EXACT, reading)
    assert violations((build.stream,), EXACT, timeline) == []
    assert timeline.busy_ns["Tensor"] <= timeline.length_ns
    return timeline.start_ns.tolist()


@pytest.mark.parametrize("reading", [Reading.program, Reading.scheduled])
def test_matmuls_on_different_cells_follow_after_the_minimum_interval(reading: Reading) -> None:
    assert starts(LEFT, RIGHT, reading=reading) == [0.0, LEAST]


@pytest.mark.parametrize(
    "tiles", [(LEFT, LEFT), (LEFT, TOP), (LEFT, ()), ((), LEFT), (TOP, RIGHT), (CORNER, ())]
)
def test_matmuls_that_share_a_cell_follow_each_other(tiles) -> None:
    assert starts(*tiles) == [0.0, 200.0]


def test_one_cell_apart_is_apart() -> None:
    assert starts(CORNER, tile_cells(96, 64, 32, 32)) == [0.0, LEAST]
    assert starts(CORNER, tile_cells(96, 64, 32, 64)) == [0.0, 200.0]


def test_a_third_matmul_waits_for_its_own_cells_only() -> None:
    assert starts(LEFT, RIGHT, LEFT) == [0.0, LEAST, 200.0]
    assert starts(LEFT, RIGHT, ()) == [0.0, LEAST, LEAST + 200.0]


@pytest.mark.parametrize(("interval", "second"), [(63.0, 63.0), (64.0, 64.0), (65.0, 64.0)])
def test_no_matmul_issues_the_next_one_later_than_it_ends(interval: float, second: float) -> None:
    assert LEAST == 64
    assert starts(LEFT, RIGHT, interval=interval) == [0.0, second]


def test_whole_arrays_follow_each_other_and_the_serial_reading_has_no_tiles() -> None:
    assert starts((), ()) == [0.0, 200.0]
    assert starts(LEFT, RIGHT, reading=Reading.serial) == [0.0, 250.0]


def test_a_lower_minimum_interval_never_lengthens() -> None:
    quick = EXACT.with_numbers(matmul_min_interval_cycles=guessed(32, "tests", "half of it"))
    build = matmuls(LEFT, RIGHT, LEFT, RIGHT)
    for reading in Reading:
        assert (
            schedule(build.stream, quick, reading).length_ns
            <= schedule(build.stream, EXACT, reading).length_ns
        )
    assert schedule(build.stream, quick).start_ns.tolist() == [0.0, 32.0, 200.0, 232.0]


def test_the_dataflow_reading_lets_the_engine_issue_all_of_them() -> None:
    build = matmuls(*[LEFT, RIGHT] * 8)
    timeline = schedule(build.stream, EXACT, Reading.dataflow)
    assert violations((build.stream,), EXACT, timeline) == []
    assert timeline.length_ns == 16 * LEAST
    assert timeline.busy_ns["Tensor"] == 200.0


@pytest.mark.parametrize("reading", Reading)
def test_the_critical_path_through_tiles_adds_up(reading: Reading) -> None:
    build = matmuls(LEFT, RIGHT, LEFT, TOP, (), CORNER)
    done = profile(build.stream, EXACT, reading=reading)
    path = done.critical_path
    assert path[0].start_ns == 0.0 and path[-1].end_ns == done.length_ns
    assert all(one.end_ns == other.start_ns for one, other in pairwise(path))
    for stretch in path:
        assert sum(length for _, length in stretch.phases) == stretch.length_ns
    assert sum(length for _, length in done.basis.by_confidence) == pytest.approx(done.length_ns, rel=1e-12)


@pytest.mark.parametrize(("tiles", "threads"), [((LEFT, RIGHT), 2), ((LEFT, LEFT), 1)])
def test_slices_side_by_side_are_drawn_on_threads_of_their_own(tiles, threads: int, tmp_path) -> None:
    build = matmuls(*tiles)
    write_trace(tmp_path / "trace.json", [("kernel", build.stream, schedule(build.stream, EXACT))])
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X" and event["cat"] == "instruction"]
    assert [event["dur"] for event in drawn] == [0.2, 0.2]
    assert len({event["tid"] for event in drawn}) == threads
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert named.count("Tensor") == threads


@pytest.mark.parametrize(
    ("position", "size", "cells"),
    [
        ((), (), ()),
        ((0, 0), (128, 128), ()),
        ((0, 64), (128, 64), RIGHT),
        ((64, 0), (64, 128), tile_cells(64, 0, 64, 128)),
        ((32, 96), (32, 32), tile_cells(32, 96, 32, 32)),
    ],
)
def test_a_matmul_takes_the_cells_of_its_tile(position, size, cells) -> None:
    rows, columns = size or (128, 128)
    made = plan(
        "trn2",
        "nc_matmul",
        dst=tile((columns, 64), buffer=MemoryRegion.psum),
        stationary=tile((rows, columns), "bfloat16"),
        moving=tile((rows, 64), "bfloat16"),
        tile_position=position,
        tile_size=size,
    )
    assert made.cost.cells == cells
    named = {number for term in made.cost.terms for number in term.numbers}
    assert "matmul_min_interval_cycles" in named


def _columns(x, w, positions):
    out = nl.ndarray((64, 512 * len(positions)), dtype=nl.float32, buffer=nl.shared_hbm)
    moving, weights = nl.load(x), nl.load(w)
    for number, position in enumerate(positions):
        bank = nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=bank, stationary=weights, moving=moving, tile_position=position, tile_size=(128, 64)
        )
        result = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=result, src=bank)
        nisa.dma_copy(dst=out[:, 512 * number : 512 * number + 512], src=result)
    return out


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_a_kernel_on_both_halves_of_the_array_issues_its_second_product_sooner(target: str) -> None:
    intervals = []
    for positions in ([(0, 0), (0, 64)], [(0, 0), (0, 0)]):
        x, w = np.zeros((128, 512), np.float16), np.zeros((128, 64), np.float16)
        done = kernels.dry(_columns, x, w, positions, target=target)
        timeline = schedule(done.streams, done.hardware)
        stream = done.streams[0]
        products = [event.index for event in stream if event.op == "nc_matmul"]
        starts = [p.start_ns for p in timeline.slices() if p.event in products]
        intervals.append(starts[1] - starts[0])
    chip = done.hardware
    assert intervals[0] == pytest.approx(chip.matmul_min_interval_cycles / chip.tensor_clock_ghz)
    assert intervals[1] > 4 * intervals[0]
