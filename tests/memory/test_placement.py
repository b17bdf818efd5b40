"""Placement of tiles: no overlap of live tiles, tight limits, banks."""

from __future__ import annotations

import numpy as np
import pytest

from simulate.errors import RuleViolation
from simulate.memory import MemoryRegion
from simulate.memory.placement import Placement, Tile, live_tiles_fit, place


def random_tiles(rng: np.random.Generator, count: int) -> list[Tile]:
    tiles = []
    for serial in range(count):
        first = int(rng.integers(100))
        tiles.append(Tile(serial, int(rng.integers(1, 600)), first, first + int(rng.integers(20)), None))
    return tiles


def overlap(a: Tile, b: Tile) -> bool:
    return a.first_use <= b.last_use and b.first_use <= a.last_use


def test_live_tiles_never_share_bytes() -> None:
    rng = np.random.default_rng(5)
    for bank in (None, 2048):
        for _ in range(30):
            tiles = random_tiles(rng, 40)
            placement = place(tiles, bank)
            for i, a in enumerate(tiles):
                for b in tiles[:i]:
                    if overlap(a, b):
                        at_a, at_b = placement.offsets[a.serial], placement.offsets[b.serial]
                        assert at_a + a.bytes <= at_b or at_b + b.bytes <= at_a
                if bank is not None:
                    start = placement.offsets[a.serial]
                    assert start // bank == (start + a.bytes - 1) // bank
            assert placement.live_bytes <= placement.high_water_bytes


def test_bytes_are_reused_after_the_last_use() -> None:
    tiles = [Tile(0, 100, 0, 3, None), Tile(1, 100, 4, 6, None), Tile(2, 100, 3, 5, None)]
    placement = place(tiles)
    assert placement.offsets[1] == placement.offsets[0] == 0
    assert placement.offsets[2] == 100
    assert placement.high_water_bytes == 200


def test_an_address_stays_and_others_go_around_it() -> None:
    tiles = [Tile(0, 64, 0, 9, None), Tile(1, 64, 5, 9, 32)]
    assert place(tiles).offsets == {0: 96, 1: 32}


@pytest.mark.parametrize(("excess", "fits"), [(-1, True), (0, True), (1, False)])
def test_refuses_more_live_bytes_than_usable(excess: int, fits: bool) -> None:
    limit = 1000
    placement: Placement = place([Tile(0, limit - 100, 0, 1, None), Tile(1, 100 + excess, 0, 1, None)])
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
