"""Every kind of advice is given to a kernel that needs it and not to its healed twin."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nki_kernels.ladder import tile_by_tile
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.profile import Profile, profile, text
from simulate.profile.advice import AdviceKind
from simulate.profile.advice.text import make_advice_records
from simulate.profile.advice.transfers import _is_in_use
from tests.advice.ladders import dataflow, matmul, pairs, rmsnorm_swiglu, softmax
from tests.timing import kernels

SWIGLU = (
    kernels.zeros(128, 1024),
    kernels.zeros(1, 1024),
    kernels.zeros(1024, 2048, kernels.BF16),
    kernels.zeros(1024, 2048, kernels.BF16),
)
SQUARE = kernels.zeros(1024, 1024, kernels.BF16)
ROWS = kernels.zeros(1024, 512)
TILE = kernels.zeros(128, 512, kernels.BF16)
FEW = kernels.zeros(4, 4096)

PAIRS: dict[AdviceKind, tuple[tuple[np.ndarray, ...], Callable[..., Any], Callable[..., Any]]] = {
    AdviceKind.float32: (SWIGLU, rmsnorm_swiglu.wide, rmsnorm_swiglu.narrow),
    AdviceKind.reloads: ((SQUARE, SQUARE), matmul.rotated, matmul.resident),
    AdviceKind.small_dmas: ((ROWS,), softmax.whole_rows, softmax.merged),
    AdviceKind.transposes: ((SQUARE,), pairs.turned_on_tensor, pairs.turned_by_dma),
    AdviceKind.small_tiles: ((ROWS,), softmax.rotated, softmax.whole_rows),
    AdviceKind.rotation: ((ROWS,), softmax.piecewise, softmax.rotated),
    AdviceKind.engines: ((TILE,), pairs.copies_on_vector, pairs.copies_on_two_engines),
    AdviceKind.load_order: ((ROWS, ROWS), dataflow.gates_first, dataflow.gates_in_order),
    AdviceKind.chains: (
        (np.zeros((8, 128, 512), np.float32),),
        dataflow.softmax_head_by_head,
        dataflow.softmax_two_heads_in_turn,
    ),
    AdviceKind.partitions: ((FEW, FEW), dataflow.few_partitions, dataflow.all_partitions),
    AdviceKind.repeats: ((ROWS, TILE), dataflow.sigmoid_for_every_block, dataflow.sigmoid_once),
}


def _profile(kernel: Callable[..., Any], *arguments: np.ndarray, **options: Any) -> Profile:
    launch = kernels.dry(kernel, *arguments, **options)
    return profile(launch.streams, launch.hardware)


def test_every_kind_has_a_pair() -> None:
    assert set(PAIRS) == set(AdviceKind)


@pytest.mark.parametrize("advice_kind", AdviceKind)
def test_the_sick_kernel_gets_the_advice_and_the_healed_one_does_not(advice_kind: AdviceKind) -> None:
    arguments, sick, healed = PAIRS[advice_kind]
    assert advice_kind in {piece.advice_kind for piece in _profile(sick, *arguments).advice}
    assert advice_kind not in {piece.advice_kind for piece in _profile(healed, *arguments).advice}


@pytest.mark.parametrize("advice_kind", AdviceKind)
def test_the_predicted_length_is_near_that_of_the_healed_kernel(advice_kind: AdviceKind) -> None:
    """What the change gains differs by a factor of 1.5 at most from what the twin brings."""
    arguments, sick, healed = PAIRS[advice_kind]
    done = _profile(sick, *arguments)
    piece = next(advice for advice in done.advice if advice.advice_kind is advice_kind)
    brought = done.length_ns - _profile(healed, *arguments).length_ns
    assert brought / 1.5 <= piece.before_ns - piece.length_ns <= brought * 1.5


@pytest.mark.slow
def test_the_streams_are_left_as_they_were() -> None:
    for arguments, sick, _ in PAIRS.values():
        launch = kernels.dry(sick, *arguments)
        before = [(stream.text(), list(stream.tensors), len(stream.templates)) for stream in launch.streams]
        assert profile(launch.streams, launch.hardware).advice
        assert before == [
            (stream.text(), list(stream.tensors), len(stream.templates)) for stream in launch.streams
        ]


def overwritten(a):
    """Read, change and read again a tensor in HBM: the second load is no repetition."""
    scratch = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=scratch, src=nl.load(a))
    for _ in range(8):
        tile = nl.load(scratch)
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        nisa.dma_copy(dst=scratch, src=tile)
    nisa.dma_copy(dst=out, src=nl.load(scratch))
    return out


def test_loads_of_what_was_written_in_between_are_no_repetition() -> None:
    assert AdviceKind.reloads not in {piece.advice_kind for piece in _profile(overwritten, TILE).advice}


def kept_beyond_room(a):
    """Pass twice over the rows of a, of which one column counts, so that the loads take the time."""
    out = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.ndarray((128, 1), dtype=nl.float32)
    nisa.memset(dst=total, value=0.0)
    for _ in range(2):
        for first in range(0, a.shape[0], 128):
            tile = nl.load(a[first : first + 128])
            nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:1], op=nl.add)
    nisa.dma_copy(dst=out, src=total)
    return out


@pytest.mark.parametrize(("tiles", "is_advised"), [(207, True), (208, False)])
def test_loads_are_kept_only_where_they_have_room(tiles: int, is_advised: bool) -> None:
    """A tile takes 1 KiB of the 212,984 bytes that a partition of trn2 has for tiles; the sums take 4 bytes."""
    done = _profile(kept_beyond_room, kernels.zeros(128 * tiles, 512, kernels.BF16))
    assert (AdviceKind.reloads in {piece.advice_kind for piece in done.advice}) == is_advised


def accumulated(a):
    """Keep a running sum in one tile: it is read before it is written, so no iteration can have its own."""
    out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.ndarray((128, 512), dtype=nl.float32)
    nisa.memset(dst=total, value=0.0)
    for first in range(0, a.shape[0], 128):
        nisa.tensor_tensor(dst=total, data1=total, data2=nl.load(a[first : first + 128]), op=nl.add)
    nisa.dma_copy(dst=out, src=total)
    return out


def test_a_tile_that_carries_a_value_keeps_its_bytes() -> None:
    assert AdviceKind.rotation not in {piece.advice_kind for piece in _profile(accumulated, ROWS).advice}


def test_two_cores_of_a_rank_get_tiles_of_their_own() -> None:
    def on_two_cores(x):
        return softmax.piecewise(x)

    one = _profile(softmax.piecewise, ROWS)
    two = _profile(on_two_cores, ROWS, cores=2)
    assert one.advice[0].advice_kind is two.advice[0].advice_kind is AdviceKind.rotation
    assert two.advice[0].gain > 0.3


def test_a_report_has_the_first_pieces_and_all_on_request() -> None:
    done = _profile(rmsnorm_swiglu.wide, *SWIGLU)
    short, complete = text(done), text(done, all_advice=True)
    assert f"1. {done.advice[0].length_ns / 1000:.3f} us (-" in short
    assert "16-bit operands" in short
    assert "vendor's bounds" not in short
    for bound in done.bounds:
        assert f"{bound.name} " in complete
    assert max(map(len, complete.splitlines())) <= 80


def test_a_report_without_advice_says_so_on_request_only() -> None:
    done = _profile(rmsnorm_swiglu.narrow, *SWIGLU)
    assert not done.advice
    assert "each piece timed" not in text(done)
    assert "advice: no change gains 2 %" in text(done, all_advice=True)


def test_records_are_those_of_the_profile() -> None:
    done = _profile(rmsnorm_swiglu.wide, *SWIGLU)
    document = make_advice_records(done)
    assert [row["gain"] for row in document["advice"]] == [advice.gain for advice in done.advice]
    assert [bound["time_ns"] for bound in document["bounds"]] == [bound.time_ns for bound in done.bounds]


@pytest.mark.slow
def test_each_tensor_that_is_loaded_again_is_advised_on_alone_and_all_where_that_gains_more() -> None:
    deep = [kernels.zeros(1024, columns, kernels.BF16) for columns in (1024, 2048)]
    done = _profile(tile_by_tile.func, *deep)
    assert [piece.tensors for piece in done.advice] == [("b", "a_t"), ("b",), ("a_t",)]
    assert done.advice[0].sentence == "keep in SBUF what is loaded again: b, a_t"
    short = text(done)
    assert "what is loaded again: b, a_t" in short and short.count("what is loaded again") == 1
    assert "2 more with --advice" in short
    assert text(done, all_advice=True).count("what is loaded again") == 3
    both, b, a = (piece.before_ns - piece.length_ns for piece in done.advice)
    assert both >= b + 0.02 * done.length_ns > a


@pytest.mark.parametrize("written_tile", [0, 1])
def test_stores_are_not_merged_across_a_write_of_any_of_their_tiles(written_tile: int) -> None:
    # Tiles 0, 1 and 2 are stored by events 1, 3 and 9; event 5 writes one of the first two anew.
    used = {tile: [(0, True), (event, False)] for tile, event in enumerate((1, 3, 9))}
    tensors = [SimpleNamespace(buffer=SimpleNamespace(on_chip=True))] * 3
    stream: Any = SimpleNamespace(tensors=tensors, tensors_of=lambda event: [(1, 3, 9).index(event)])
    assert not _is_in_use(stream, used, (1, 3, 9), loads=False)
    used[written_tile].append((5, True))
    assert _is_in_use(stream, used, (1, 3, 9), loads=False)
