"""Placement of tiles: no overlap of live tiles, tight limits, banks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nkw.errors import RuleViolation
from nkw.targets import GENERATIONS
from simulate.memory import MemoryRegion
from simulate.memory.placement import Placement, Tile, bound_bytes, live_tiles_fit, place_tiles

PARTITIONS = (1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128)


def random_tiles(rng: np.random.Generator, count: int, partitions: tuple[int, ...] = (128,)) -> list[Tile]:
    tiles = []
    for serial in range(count):
        first = int(rng.integers(100))
        last, rows = first + int(rng.integers(20)), int(rng.choice(partitions))
        tiles.append(Tile(serial, int(rng.integers(1, 600)), first, last, None, partitions=rows))
    return tiles


def starts(partitions: int) -> tuple[int, ...]:
    return (0,) if partitions > 64 else (0, 64) if partitions > 32 else (0, 32, 64, 96)


def overlap(a: Tile, b: Tile) -> bool:
    return a.first_use <= b.last_use and b.first_use <= a.last_use


@pytest.mark.parametrize("partitions", [(128,), PARTITIONS])
def test_live_tiles_never_share_bytes(partitions: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    for bank in (None, 2048):
        for _ in range(30):
            tiles = random_tiles(rng, 40, partitions)
            placement = place_tiles(tiles, bank)
            for i, a in enumerate(tiles):
                for b in tiles[:i]:
                    assert placement.first_partitions[a.serial] in starts(a.partitions)
                    rows_a, rows_b = (
                        set(range(first, first + tile.partitions))
                        for tile in (a, b)
                        for first in [placement.first_partitions[tile.serial]]
                    )
                    if overlap(a, b) and rows_a & rows_b:
                        at_a, at_b = placement.offsets[a.serial], placement.offsets[b.serial]
                        assert at_a + a.bytes <= at_b or at_b + b.bytes <= at_a
                if bank is not None:
                    start = placement.offsets[a.serial]
                    assert start // bank == (start + a.bytes - 1) // bank
            assert placement.live_bytes <= placement.high_water_bytes


@pytest.mark.parametrize("bank", [None, 2048])
def test_a_tile_lies_at_the_first_bytes_that_are_free(bank: int | None) -> None:
    """Tried one by one: byte 0, and the end of every tile that is in the way."""
    rng = np.random.default_rng(6)

    def touch(a: tuple[int, Tile, int], b: tuple[int, Tile, int]) -> bool:
        (at_a, tile_a, _), (at_b, tile_b, _) = a, b
        quadrants = [range(row // 32, -(-(row + tile.partitions) // 32)) for _, tile, row in (a, b)]
        apart = not set(quadrants[0]) & set(quadrants[1])
        return not apart and at_a < at_b + tile_b.bytes and at_b < at_a + tile_a.bytes

    def aligned(byte: int, size: int) -> int:
        byte += -byte % 4
        moves_up = bank is not None and (size > bank or byte % bank + size > bank)
        return byte + -byte % bank if bank is not None and moves_up else byte

    for _ in range(30):
        tiles = [
            replace(tile, address=int(rng.integers(900)) * 4) if rng.random() < 0.1 else tile
            for tile in random_tiles(rng, 60, PARTITIONS)
        ]
        placement = place_tiles(tiles, bank)
        placed = [(tile.address, tile, 0) for tile in tiles if tile.address is not None]
        for tile in sorted(tiles, key=lambda tile: (tile.first_use, tile.serial)):
            if tile.address is not None:
                continue
            neighbours = [other for other in placed if overlap(other[1], tile)]
            starting = {
                aligned(byte, tile.bytes)
                for byte in (0, *(start + other.bytes for start, other, _ in neighbours))
            }
            lowest = min(
                (start, row)
                for start in starting
                for row in starts(tile.partitions)
                if not any(touch((start, tile, row), other) for other in neighbours)
            )
            assert (placement.offsets[tile.serial], placement.first_partitions[tile.serial]) == lowest
            placed.append((lowest[0], tile, lowest[1]))
        assert placement.high_water_bytes == max(start + tile.bytes for start, tile, _ in placed)
        live = {event: [t for t in tiles if t.first_use <= event <= t.last_use] for event in range(120)}
        most = max(bound_bytes((t.bytes, t.partitions) for t in live_tiles) for live_tiles in live.values())
        assert placement.live_bytes == most == bound_bytes((t.bytes, t.partitions) for t in placement.peak)


def test_the_least_bytes_are_no_more_than_any_choice_of_starts_needs() -> None:
    """Against all choices; a placement needs at least what the best of them does."""
    rng = np.random.default_rng(6)
    exact = 0
    for _ in range(300):
        tiles = [
            Tile(n, int(rng.integers(1, 600)), 0, 0, None, partitions=int(rng.choice(PARTITIONS)))
            for n in range(int(rng.integers(1, 6)))
        ]
        best = 10**9
        for chosen in product(*(starts(tile.partitions) for tile in tiles)):
            rows = np.zeros(128, np.int64)
            for tile, first in zip(tiles, chosen):
                rows[first : first + tile.partitions] += tile.bytes
            best = min(best, int(rows.max()))
        least = bound_bytes((tile.bytes, tile.partitions) for tile in tiles)
        placement = place_tiles(tiles)
        assert least <= best <= placement.high_water_bytes
        assert placement.live_bytes == least
        exact += least == best
    assert exact > 200


@pytest.mark.parametrize(
    ("partitions", "tiles", "side_by_side"),
    [
        (32, 4, True),
        (32, 5, False),
        (33, 2, True),
        (64, 2, True),
        (64, 3, False),
        (65, 2, False),
        (128, 2, False),
    ],
)
def test_tiles_on_few_partitions_lie_side_by_side(partitions: int, tiles: int, side_by_side: bool) -> None:
    placement = place_tiles([Tile(n, 100, 0, 9, None, partitions=partitions) for n in range(tiles)])
    assert placement.high_water_bytes == placement.live_bytes == (100 if side_by_side else 200)


def test_a_quadrant_beside_96_partitions_is_free() -> None:
    tiles = [Tile(0, 100, 0, 9, None, partitions=96), Tile(1, 60, 0, 9, None, partitions=32)]
    placement = place_tiles(tiles)
    assert placement.offsets == {0: 0, 1: 0} and placement.first_partitions == {0: 0, 1: 96}


def test_an_address_takes_the_quadrants_that_its_partitions_touch() -> None:
    fixed = Tile(0, 100, 0, 9, 0, partitions=32, first_partition=48)
    upper = Tile(1, 100, 0, 9, None, partitions=32)
    below = Tile(2, 100, 0, 9, None, partitions=64)
    placement = place_tiles([fixed, upper, below])
    assert placement.first_partitions == {0: 48, 1: 0, 2: 0}
    assert placement.offsets == {0: 0, 1: 0, 2: 100}


@pytest.mark.parametrize("target", GENERATIONS.values())
@pytest.mark.parametrize(
    ("rows", "tiles", "fits"), [(64, 2, True), (65, 2, False), (64, 3, False), (32, 4, True)]
)
def test_a_launch_may_fill_halves_of_sbuf(target: str, rows: int, tiles: int, fits: bool) -> None:
    def kernel(x):
        kept = [nl.ndarray((rows, 131_070), dtype=nl.uint8) for _ in range(tiles)]
        for tile in kept:
            nisa.memset(dst=tile[:, 0:2], value=1)
        for tile in kept:
            nisa.tensor_copy(dst=tile[:, 0:1], src=tile[:, 1:2])
        return x

    def run() -> None:
        simulate.World(target).launch(kernel, [((np.zeros((1, 1), np.float32),), {})], mode=simulate.Mode.dry)

    if fits:
        run()
        return
    with pytest.raises(RuleViolation, match="NKW-CAPACITY") as refused:
        run()
    assert refused.value.seen.startswith(f"{tiles} live tiles take 262140 bytes per partition of sbuf")


def test_bytes_are_reused_after_the_last_use() -> None:
    tiles = [Tile(0, 100, 0, 3, None), Tile(1, 100, 4, 6, None), Tile(2, 100, 3, 5, None)]
    placement = place_tiles(tiles)
    assert placement.offsets[1] == placement.offsets[0] == 0
    assert placement.offsets[2] == 100
    assert placement.high_water_bytes == 200


def test_an_address_stays_and_others_go_around_it() -> None:
    tiles = [Tile(0, 64, 0, 9, None), Tile(1, 64, 5, 9, 32)]
    assert place_tiles(tiles).offsets == {0: 96, 1: 32}


@pytest.mark.parametrize(("excess", "fits"), [(-1, True), (0, True), (1, False)])
def test_refuses_more_live_bytes_than_usable(excess: int, fits: bool) -> None:
    limit = 1000
    placement: Placement = place_tiles([Tile(0, limit - 100, 0, 1, None), Tile(1, 100 + excess, 0, 1, None)])
    if fits:
        live_tiles_fit(
            placement, MemoryRegion.sbuf, limit, "trn1", ("big", "small").__getitem__, "{1} of {0}".format
        )
        return
    with pytest.raises(RuleViolation) as refused:
        live_tiles_fit(
            placement, MemoryRegion.sbuf, limit, "trn1", ("big", "small").__getitem__, "{1} of {0}".format
        )
    assert refused.value.code == "NKW-CAPACITY"
    assert (
        "2 live tiles take 1001 bytes per partition of sbuf, 1 too many; the largest: big 900 bytes"
        in str(refused.value)
    )
