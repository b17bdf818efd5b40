"""What lies in SBUF and PSUM, worked out from a launch: live bytes, loops, banks, and how large a tile may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import nki_kernels
import simulate
from nkw.errors import RuleViolation
from simulate.memory.placement import Tile, find_largest_fit, find_largest_size, place_tiles
from simulate.occupancy import Occupancy, occupancies
from simulate.run import Stream
from tests.kernels.accuracy import normal
from tests.occupancy.kernels import nest, on_device

TARGETS = ("trn1", "trn2", "trn3")
X = np.ones((128, 192), np.float32)


def launched(
    kernel: Any, *arguments: Any, target: str = "trn1", calls: bool = True, dry: bool = False
) -> Occupancy:
    mode = simulate.Mode.dry if dry else simulate.Mode.eager
    with simulate.recorded(calls=calls) as launches:
        simulate.World(target).launch(kernel, [(arguments, {})], mode=mode)
    (occupancy,) = occupancies(launches[0])
    return occupancy


def line_of(words: str) -> int:
    """Return the line of tests/occupancy/kernels.py that contains some words."""
    lines = Path(__file__).with_name("kernels.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


def test_live_bytes_of_a_kernel_known_by_hand() -> None:
    sbuf, psum = launched(nest, X).memories
    assert sbuf.peak_bytes == 512 + 256 + 4000
    assert sbuf.high_water_bytes == 8192 + 512
    assert psum.peak_bytes == psum.high_water_bytes == 2048
    assert [source.name for source in sbuf.sources] == ["kept", "tile", "scratch"]
    assert [source.addressed for source in sbuf.sources] == [True, False, False]
    assert [(source.tiles, source.most_live) for source in sbuf.sources] == [(1, 1), (3, 1), (3, 1)]


def test_every_loop_has_its_high_water_mark() -> None:
    levels = launched(nest, X).sbuf.levels
    levels_by_path = {tuple(loop.header for loop in level.path): level for level in levels}
    outer, inner = "for i in nl.affine_range(outer)", "for j in nl.static_range(2)"
    assert list(levels_by_path) == [(), (outer,), (outer, inner)]
    assert [levels_by_path[path].live_bytes for path in levels_by_path] == [4768] * 3
    assert [levels_by_path[path].inner_bytes for path in levels_by_path] == [4768, 4256, 0]
    assert [levels_by_path[path].events for path in levels_by_path] == [22, 21, 6]
    assert levels_by_path[outer,].path[0].where.line == line_of(outer)


def test_a_helper_runs_in_the_loops_of_its_callers_where_these_were_kept() -> None:
    def list_load_loops(occupancy: Occupancy) -> list[str]:
        (tile,) = (source for source in occupancy.sbuf.sources if source.name == "tile")
        return [loop.header for loop in tile.loops]

    assert list_load_loops(launched(nest, X)) == ["for i in nl.affine_range(outer)"]
    assert list_load_loops(launched(nest, X, calls=False)) == []


def test_a_device_loop_is_a_level() -> None:
    levels = launched(on_device, X).sbuf.levels
    assert [[loop.header for loop in level.path] for level in levels] == [[], ["fori_loop(0, 3, body)"]]


def test_a_dry_launch_tells_the_same() -> None:
    assert launched(nest, X, dry=True) == launched(nest, X)
    arguments = normal(1, 130, 200), normal(2, 200, 600)
    assert launched(nki_kernels.matmul, *arguments, dry=True) == launched(nki_kernels.matmul, *arguments)


def test_callers_are_kept_only_where_somebody_asks() -> None:
    with simulate.recorded() as launches:
        simulate.World("trn1").launch(nest, [((X,), {})])
    stream = launches[0].streams[0]
    assert type(stream) is Stream
    assert all(record.callers == () for record in stream.tensors)


@pytest.mark.parametrize("target", TARGETS)
def test_live_bytes_agree_with_a_count_event_by_event(target: str) -> None:
    occupancy = launched(nki_kernels.matmul, normal(1, 300, 400), normal(2, 400, 600), target=target)
    for memory in occupancy.memories:
        counted = [
            sum(use.bytes for use in memory.uses if use.first_use <= event <= use.last_use)
            for event in range(occupancy.events)
        ]
        assert memory.live_bytes.tolist() == counted
        assert memory.peak_bytes == max(counted)
        assert memory.peak_event == counted.index(max(counted))
        assert sum(use.bytes for use in memory.live_at(memory.peak_event)) == max(counted)
        for level in memory.levels:
            assert counted[level.peak_event] == level.live_bytes


def test_the_usable_bytes_are_those_of_the_chip() -> None:
    assert [launched(nest, X, target=target).sbuf.usable_bytes for target in TARGETS] == [
        180224,
        212984,
        245752,
    ]
    assert {launched(nest, X, target=target).psum.usable_bytes for target in TARGETS} == {16384}


def test_there_are_eight_banks_and_a_tile_lies_in_the_first_free_one() -> None:
    occupancy = launched(nest, X)
    assert [bank.number for bank in occupancy.psum.banks] == list(range(8))
    assert [bank.tiles for bank in occupancy.psum.banks] == [3] + [0] * 7
    assert occupancy.psum.banks[0].high_water_bytes == 2048
    events_in_use = sum(use.last_use + 1 - use.first_use for use in occupancy.psum.uses)
    assert occupancy.psum.banks[0].events == events_in_use
    assert occupancy.sbuf.banks == ()


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_free_size_fits_and_one_more_does_not(target: str) -> None:
    """`scratch` is resized in the kernel itself: the launch refuses, or first fit passes the end."""
    memory = launched(nest, X, target=target).sbuf
    (number,) = (n for n, source in enumerate(memory.sources) if source.name == "scratch")
    elements = memory.largest_free_size(number)
    for more, fits in ((-1, True), (0, True), (1, False)):
        resized = launched(nest, X, 3, elements + more, target=target).sbuf
        assert (resized.high_water_bytes <= resized.usable_bytes) == fits


def test_room_counts_all_tiles_of_a_source() -> None:
    tiles = [Tile(0, 100, 0, 9, None), Tile(1, 50, 1, 5, None), Tile(2, 50, 3, 9, None)]
    assert find_largest_size(tiles, {1, 2}, 1000) == 450
    assert find_largest_size(tiles, {1}, 1000) == 850
    assert find_largest_size(tiles, {0}, 99) == -1
    assert find_largest_size(tiles, {0}, 100) == 0


@pytest.mark.parametrize(
    ("partitions", "tiles", "most"), [(128, 2, 500), (64, 2, 1000), (64, 3, 500), (32, 4, 1000)]
)
def test_tiles_on_few_partitions_have_room_side_by_side(partitions: int, tiles: int, most: int) -> None:
    """The room is no smaller than what fits: it shares the memory out, and a tile cannot be split."""
    tile_records = [Tile(serial, 4, 0, 9, None, partitions=partitions) for serial in range(tiles)]
    chosen = set(range(tiles))
    assert find_largest_size(tile_records, chosen, 1000) >= most
    assert find_largest_fit(tile_records, chosen, 1000, None) == most


def test_two_halves_of_a_tile_are_shown_beside_each_other() -> None:
    def kernel(x):
        one, other = nl.ndarray((64, 100), dtype=nl.float32), nl.ndarray((64, 100), dtype=nl.float32)
        nisa.dma_copy(dst=one, src=x)
        nisa.dma_copy(dst=other, src=x)
        nisa.tensor_tensor(dst=one, data1=one, data2=other, op=nl.add)
        out = nl.ndarray((64, 100), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=one)
        return out

    sbuf = launched(kernel, X[:64, :100]).sbuf
    assert [(use.offset, use.first_partition) for use in sbuf.uses] == [(0, 0), (0, 64)]
    assert sbuf.peak_bytes == sbuf.high_water_bytes == 400
    assert sbuf.live_bytes.tolist() == [400] * 4
    assert [level.inner_bytes for level in sbuf.levels] == [400]
    assert sbuf.largest_free_size(0) == sbuf.usable_bytes // 4


def test_room_in_psum_does_not_let_a_tile_straddle_banks() -> None:
    tiles = [Tile(serial, 2048, 0, 9, None) for serial in range(9)]
    chosen = set(range(9))
    assert find_largest_size(tiles, chosen, 16384) == 16384 // 9
    size = find_largest_fit(tiles, chosen, 16384, 2048)
    assert size == 1024
    for bytes_each, fits in ((1020, True), (1024, True), (1028, False)):
        placed = place_tiles((replace(tile, bytes=bytes_each) for tile in tiles), 2048)
        assert (placed.high_water_bytes <= 16384) == fits


def test_a_refused_launch_is_seen_where_somebody_asks() -> None:
    too_large = 45056
    with simulate.recorded() as kept, simulate.recorded(calls=True, refused=True) as all_of_them:
        simulate.World("trn1").launch(nest, [((X, 1), {})])
        with pytest.raises(RuleViolation) as refused:
            simulate.World("trn1").launch(nest, [((X, 1, too_large), {})])
    assert [len(kept), len(all_of_them)] == [1, 2]
    sbuf = occupancies(all_of_them[1])[0].sbuf
    assert sbuf.peak_bytes - sbuf.usable_bytes == 512 + 256 + 4 * too_large - 180224
    assert [sbuf.sources[use.source].name for use in sbuf.misfits] == ["scratch"]
    # 42880 float32 lie between the end of `kept`, byte 8704, and byte 180224.
    assert "the first that does not fit: scratch (128, 45056) float32" in str(refused.value)
    assert "42880 float32 per partition in place of 45056 float32 fit beside the other tiles" in str(
        refused.value
    )
