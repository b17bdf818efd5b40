"""Tiles that take the room of earlier ones: how deep a loop rotates, by hand and as laws on random loops."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.hardware import Hardware, guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.timing import Reading, bracket, dependences, schedule
from tests.timing.checker import violations
from tests.timing.streams import EXACT, Builder, box, dma_cost, halved, without
from tests.timing.test_timing_laws import MONOTONE

SEMAPHORE = EXACT.semaphore_ns
ORDERED = [Reading.program, Reading.scheduled]


def chip_with(sbuf: int, psum: int = 1 << 20) -> Hardware:
    """Return a chip with so many bytes per partition."""
    return EXACT.with_numbers(
        sbuf_usable_bytes_per_partition=guessed(sbuf, "tests", "so that tiles fill it"),
        psum_bytes_per_partition=guessed(psum, "tests", "so that tiles fill it"),
    )


def loop(iterations: int, buffer: MemoryRegion = MemoryRegion.sbuf, rows: int = 128) -> Builder:
    """Build iterations that fill a new tile of 64 bytes in 10 ns and empty it on another engine in 100 ns."""
    build = Builder()
    for _ in range(iterations):
        tile = build.tensor("tile", rows, buffer=buffer)
        build.event(Engine.vector, writes=(tile,), cost=Cost(10.0, 10.0))
        build.event(Engine.scalar, reads=(tile,), cost=Cost(100.0, 100.0))
    return build


def fills(build: Builder, chip: Hardware, reading: Reading) -> list[float]:
    timeline = schedule(build.stream, chip, reading)
    assert violations((build.stream,), chip, timeline) == []
    return [piece.start_ns for piece in timeline.slices() if piece.track == "Vector"]


@pytest.mark.parametrize("reading", ORDERED)
@pytest.mark.parametrize("buffer", [MemoryRegion.sbuf, MemoryRegion.psum])
@pytest.mark.parametrize(("room", "depth"), [(127, 1), (128, 2), (129, 2), (191, 2), (192, 3), (193, 3)])
def test_a_loop_rotates_as_deep_as_its_tiles_fit(
    reading: Reading, buffer: MemoryRegion, room: int, depth: int
) -> None:
    chip = chip_with(room, 1 << 20) if buffer is MemoryRegion.sbuf else chip_with(1 << 20, room)
    first_read = 10.0 + SEMAPHORE
    if depth == 1:
        expected = [0.0] + [n * (first_read + 100.0 + SEMAPHORE) for n in (1, 2, 3)]
    else:
        freed = [first_read + 100.0 * n + SEMAPHORE for n in range(1, 4)]
        expected = [10.0 * n for n in range(depth)] + freed[: 4 - depth]
    assert fills(loop(4, buffer), chip, reading) == expected


@pytest.mark.parametrize("reading", ORDERED)
@pytest.mark.parametrize("buffer", [MemoryRegion.sbuf, MemoryRegion.psum])
@pytest.mark.parametrize(
    ("rows", "tiles_per_row"),
    [(1, 4), (31, 4), (32, 4), (33, 2), (63, 2), (64, 2), (65, 1), (96, 1), (97, 1), (127, 1)],
)
def test_tiles_on_few_partitions_rotate_side_by_side(
    reading: Reading, buffer: MemoryRegion, rows: int, tiles_per_row: int
) -> None:
    for depth in (1, 2):
        wide = fills(
            loop(12, buffer), chip_with(64 * tiles_per_row * depth, 64 * tiles_per_row * depth), reading
        )
        assert fills(loop(12, buffer, rows), chip_with(64 * depth, 64 * depth), reading) == wide


@pytest.mark.parametrize(("rows", "depth"), [(64, 6), (65, 5), (96, 5), (97, 4), (128, 4)])
def test_quadrants_beside_a_tile_that_lives_on_are_free(rows: int, depth: int) -> None:
    """The loop has the four quadrants of 64 bytes, and those of the other 64 that the tile leaves."""
    build = Builder()
    kept = build.tensor("kept", rows)
    build.event(Engine.vector, writes=(kept,), cost=Cost(10.0, 10.0))
    for _ in range(7):
        tile = build.tensor("tile", 32)
        build.event(Engine.vector, writes=(tile,), cost=Cost(10.0, 10.0))
        build.event(Engine.scalar, reads=(tile,), cost=Cost(100.0, 100.0))
    build.event(Engine.scalar, reads=(kept,), cost=Cost(1.0, 1.0))
    starts = fills(build, chip_with(128), Reading.program)
    freed = 20.0 + SEMAPHORE + 100.0 + SEMAPHORE
    assert starts[: depth + 2] == [10.0 * number for number in range(depth + 1)] + [freed]


@pytest.mark.parametrize(("rows", "deep"), [(64, True), (65, False), (128, False)])
def test_a_tile_at_an_address_leaves_the_partitions_beside_it(rows: int, deep: bool) -> None:
    """The loop has the upper half of the first 64 bytes where the tile at byte 0 leaves it, and the next 64 bytes."""
    build = Builder()
    kept = build.tensor("kept", rows)
    build.table.records[0] = build.table.records[0]._replace(address=(0, 0))
    build.event(Engine.vector, writes=(kept,), cost=Cost(10.0, 10.0))
    for _ in range(4):
        tile = build.tensor("tile", 64)
        build.event(Engine.vector, writes=(tile,), cost=Cost(10.0, 10.0))
        build.event(Engine.scalar, reads=(tile,), cost=Cost(100.0, 100.0))
    build.event(Engine.scalar, reads=(kept,), cost=Cost(1.0, 1.0))
    starts = fills(build, chip_with(128), Reading.program)
    assert starts[1:4] == [10.0, 20.0, 30.0 if deep else 20.0 + SEMAPHORE + 100.0 + SEMAPHORE]


def test_tiles_that_all_fit_never_wait_for_room() -> None:
    assert fills(loop(4), chip_with(256), Reading.program) == [0.0, 10.0, 20.0, 30.0]
    assert fills(loop(4), chip_with(255), Reading.program) != [0.0, 10.0, 20.0, 30.0]


def test_without_engines_there_is_room_for_everything() -> None:
    one, many = (schedule(loop(4).stream, chip, Reading.dataflow) for chip in (chip_with(64), EXACT))
    assert one.length_ns == many.length_ns


def test_a_tile_waits_for_every_part_and_every_reader_of_what_lay_there() -> None:
    build = Builder()
    old = build.tensor("old")
    halves = [box(old, (0, 128), columns) for columns in ((0, 32), (32, 64))]
    out = build.tensor("out", buffer=MemoryRegion.private_hbm)
    for half in halves:
        build.event(Engine.vector, writes=(half,), cost=Cost(10.0, 10.0))
    build.dma((halves[0],), (out,), dma_cost(busy=500.0), Engine.sync)
    build.event(Engine.scalar, reads=(halves[1],), cost=Cost(100.0, 100.0))
    new = build.tensor("new")
    for engine, columns in ((Engine.tensor, (0, 32)), (Engine.gpsimd, (32, 64))):
        build.event(engine, writes=(box(new, (0, 128), columns),), cost=Cost(10.0, 10.0))
    chip = chip_with(64)
    timeline = schedule(build.stream, chip)
    assert violations((build.stream,), chip, timeline) == []
    stored = 10.0 + SEMAPHORE + 8 + 100 + 500 + 64
    assert [p.start_ns for p in timeline.slices() if p.track in ("Tensor", "GpSimd")] == [stored, stored]


def test_a_tile_that_lives_on_keeps_its_room() -> None:
    build = Builder()
    kept = build.tensor("kept")
    build.event(Engine.vector, writes=(kept,), cost=Cost(10.0, 10.0))
    for _ in range(3):
        tile = build.tensor("tile")
        build.event(Engine.vector, writes=(tile,), cost=Cost(10.0, 10.0))
        build.event(Engine.scalar, reads=(tile,), cost=Cost(100.0, 100.0))
    build.event(Engine.scalar, reads=(kept,), cost=Cost(1.0, 1.0))
    assert fills(build, chip_with(128), Reading.program)[:3] == [0.0, 10.0, 20.0 + 100.0 + 2 * SEMAPHORE]


@pytest.mark.parametrize(("shift", "waits"), [(0, True), (63, True), (64, False)])
def test_tiles_at_chosen_addresses_wait_where_they_meet(shift: int, waits: bool) -> None:
    build = loop(2)
    for number, tile in enumerate(build.table.records):
        build.table.records[number] = tile._replace(address=(0, number * shift))
    starts = fills(build, EXACT, Reading.program)
    assert starts == [0.0, 10.0 + 100.0 + 2 * SEMAPHORE if waits else 10.0]


@pytest.mark.slow
@pytest.mark.parametrize("queues", [1, 2])
@pytest.mark.parametrize("partitions", [(128,), (16, 32, 64, 96, 128)])
def test_loops_in_a_small_memory_keep_every_law(queues: int, partitions: tuple[int, ...]) -> None:
    generator = np.random.default_rng(5)
    for seed in range(25):
        build = random_loop(seed, queues, partitions)
        chip = chip_with(int(generator.integers(3, 8)) * 64, int(generator.integers(1, 4)) * 64)
        for reading in Reading:
            assert violations((build.stream,), chip, schedule(build.stream, chip, reading)) == [], seed
        readings = bracket(build.stream, chip)
        assert readings.dataflow_ns <= readings.scheduled_ns <= readings.program_ns <= readings.serial_ns, (
            seed
        )
        assert readings.program_ns >= bracket(build.stream, EXACT).program_ns or queues > 1, seed
        if queues > 1:
            continue
        cheaper, waits = halved(build.stream, generator), dependences(build.stream)
        fewer = without(waits, waits.ends[:-1][np.diff(waits.ends) > 0])  # the first of every event
        for reading in MONOTONE:
            length = schedule(build.stream, chip, reading).length_ns
            assert schedule(cheaper, chip, reading).length_ns <= length, seed
            assert schedule(build.stream, chip, reading, fewer).length_ns <= length, seed


def random_loop(seed: int, queues: int, partitions: tuple[int, ...]) -> Builder:
    """Load a tile, use it on the array and another engine, copy the result out of PSUM, store it."""
    generator, rows = np.random.default_rng(seed), np.random.default_rng(seed)
    build = Builder()
    out = build.tensor("out", buffer=MemoryRegion.private_hbm)

    def cost() -> Cost:
        interval, latency = generator.integers(4, 800, 2) / 4
        return Cost(float(interval), float(latency))

    def move() -> Cost:
        return dma_cost(busy=float(generator.integers(4, 400)), completion=SEMAPHORE)

    for _ in range(int(generator.integers(4, 9))):
        tile, result = (build.tensor(name, int(rows.choice(partitions))) for name in ("tile", "result"))
        bank = build.tensor("bank", int(rows.choice(partitions)), buffer=MemoryRegion.psum)
        if generator.random() < 0.5:
            build.dma((), (tile,), move(), Engine.sync)
        else:
            for columns in ((0, 16), (16, 64)):
                build.dma((), (box(tile, (0, tile.shape[0]), columns),), move(), Engine.sync)
        build.event(Engine.tensor, (tile, tile), (bank,), cost())
        build.event((Engine.vector, Engine.gpsimd)[int(generator.integers(2))], (bank,), (result,), cost())
        if generator.random() < 0.5:
            build.event(Engine.scalar, (tile,), (result,), cost())
        build.dma((result,), (out,), move(), (Engine.sync, Engine.gpsimd)[queues - 1])
    return build
