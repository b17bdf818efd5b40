"""Decode attention divided over two physical cores, and over ranks that divide the positions of a cache."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from simulate.replay import ReplayCache, ReplayOptions
from tests.kernels.accuracy import (
    compare,
    compare_all,
    copied,
    find_faults,
    in_float64,
    normal,
    run,
    summed_in_order,
)
from tests.kernels.divided import check_divided, divided
from tests.kernels.test_attention_block_decode import arguments as block_arguments
from tests.kernels.test_attention_decode import batch, in_pages, tables

BF16 = ml_dtypes.bfloat16
SEEDS = 64
DECODE = (kernels.attention_decode, kernels.attention_decode_reference)
BLOCK = (kernels.attention_block_decode, kernels.attention_block_decode_reference)
NOTHING = (None, None, None, None, 1e-6)
"""cos, sin, q_norm, k_norm, eps: heads are normalised and rotated already."""

# first positions, query heads, kv heads, head size, positions, new tokens
KV_HEADS = ([0, 130, 171], 8, 2, 32, 172, 1)
SEQUENCES = ([129, 2, 128], 3, 1, 32, 172, 3)
SLOTS = [([first], 6, 3, 8, 4000, 1) for first in (0, 127, 2047, 2048, 2049, 3999)]


def on_two_cores(kernel: Any, arguments: tuple[Any, ...], target: str = "trn2") -> Any:
    """What a kernel returns on a logical core of two physical ones."""
    return simulate.World(target, 1, 2).launch(kernel, [(copied(arguments), {})]).outputs[0]


def check_two_cores(pair: tuple[Any, Any], arguments: tuple[Any, ...], target: str = "trn2") -> None:
    """As exact as numpy; caches with the bytes that one core gives, unless the keys come from a divided product."""
    kernel, reference = pair
    outputs = on_two_cores(kernel, arguments, target)
    compare_all(outputs, reference, arguments)
    if kernel is kernels.attention_decode:
        for one, both in zip(run(kernel, arguments, target)[1:], outputs[1:]):
            assert one.tobytes() == both.tobytes()


@pytest.mark.parametrize(
    "sizes", [KV_HEADS, SEQUENCES, *SLOTS, ([90], 3, 3, 8, 128, 1), ([4094], 2, 1, 8, 8192, 4)]
)
def test_two_cores_attend_as_one(sizes: tuple[Any, ...]) -> None:
    check_two_cores(DECODE, (*batch(*sizes), sizes[2], *tables(sizes[4], sizes[3] // 2)))


@pytest.mark.parametrize("block", [16, 384])
@pytest.mark.parametrize(
    "sizes", [([4000], 4, 1, 8, 8448, 2), ([5, 300], 4, 2, 16, 768, 1), ([3, 80, 700], 1, 1, 8, 768, 1)]
)
def test_two_cores_attend_with_pages(sizes: tuple[Any, ...], block: int) -> None:
    check_two_cores(
        DECODE, in_pages((*batch(*sizes), sizes[2], *tables(sizes[4], sizes[3] // 2)), block), "trn3"
    )


@pytest.mark.parametrize(("firsts", "positions"), [([0, 70, 297], 300), ([2100], 4000)])
def test_two_cores_with_window_cap_and_sinks(firsts: list[int], positions: int) -> None:
    given = (
        *batch(firsts, 6, 3, 16, positions, new=3),
        3,
        *NOTHING,
        None,
        None,
        100,
        2.0,
        normal(12, 1, 6) * 3,
    )
    check_two_cores(DECODE, given)


@pytest.mark.parametrize("sizes", [(3, 256, 4, 172), (1, 130, 4, 300), (5, 1030, 8, 300)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_two_cores_do_a_block_as_one(sizes: tuple[int, ...], dtype: type) -> None:
    check_two_cores(BLOCK, block_arguments(*sizes, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (kernels.attention_decode, batch([4100], 2, 1, 2, 8192)),
        (kernels.attention_decode, in_pages(batch([40, 70, 3], 2, 1, 16, 128), 16, shared=2)),
        (kernels.attention_block_decode, block_arguments(2, 130, 4, 172)),
    ],
)
def test_sixty_four_schedules_of_two_cores_agree(kernel: Any, arguments: tuple[Any, ...]) -> None:
    """And no core reads or writes what the other one writes, without a barrier between."""
    assert find_faults(lambda: on_two_cores(kernel, arguments), seeds=SEEDS) == []


def check_ranks(
    arguments: tuple[Any, ...], ranks: int, target: str = "trn2", block: int = 0, cores: int = 1
) -> None:
    """One launch on all ranks, each on one or two cores."""
    shares = divided(arguments, ranks, block)
    world = simulate.World(target, ranks, cores)
    outputs = world.launch(kernels.attention_decode, [(copied(each), {}) for each in shares]).outputs
    check_divided(arguments, shares, outputs, block)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_that_divide_positions_attend_as_one(target: str, ranks: int) -> None:
    """Sequences shorter than a slot of each rank, and around what one chunk and one slot hold."""
    check_ranks(batch([0, 1, 6, 127, 128, 129, 1023], 16, 2, 16, 1024, dtype=BF16), ranks, target)


def test_ranks_attend_with_new_tokens_window_cap_and_sinks() -> None:
    given = *batch([0, 70, 297], 8, 2, 16, 304, new=3), 2, *NOTHING, None, None, 40, 2.0, normal(12, 1, 8) * 3
    check_ranks(given, 4)
    check_ranks(given, 2, cores=2)


def test_ranks_attend_with_pages() -> None:
    check_ranks(batch([0, 500, 130], 4, 1, 16, 512), 4, block=16)
    check_ranks(batch([77], 4, 1, 16, 512), 2, block=64, cores=2)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_block_over_ranks_that_divide_positions(cores: int) -> None:
    """Each rank projects its own heads, and the same keys and values; the sum over ranks is the whole block's."""
    whole = block_arguments(3, 130, 4, 172)
    x, norm, w_qkv, eps, q_size, kv_size, k_cache, v_cache, at, scale, w_o, kv_heads, *turns = whole
    group = ReplicaGroup([[0, 1]])
    heads = w_qkv[:, :q_size].reshape(len(w_qkv), kv_heads, 2, -1)
    rows = w_o.reshape(kv_heads, 2, -1, w_o.shape[1])
    shares = []
    for rank in range(2):
        weights = np.concatenate([heads[:, :, rank].reshape(len(w_qkv), -1), w_qkv[:, q_size:]], axis=1)
        caches = k_cache[..., rank::2].copy(), v_cache[:, :, rank::2].copy()
        own_rows = rows[:, rank].reshape(-1, w_o.shape[1]).copy()
        given = x, norm, weights, eps, q_size // 2, kv_size, *caches, at, scale, own_rows, kv_heads, *turns
        shares.append((*given, group, None, None, None, None, None, None, group, 2, np.int32([[rank]])))
    world = simulate.World("trn2", 2, cores)
    outputs = world.launch(kernels.attention_block_decode, [(copied(each), {}) for each in shares]).outputs
    same_dtype, exact = BLOCK[1](*copied(whole)), BLOCK[1](*map(in_float64, whole))
    for rank, (y, keys, values) in enumerate(outputs):
        compare(y, exact[0], same_dtype[0])
        compare(keys, exact[1][..., rank::2], same_dtype[1][..., rank::2])
        compare(values, exact[2][:, :, rank::2], same_dtype[2][:, :, rank::2])


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_slots_from_the_new_position_on_are_not_used(garbage: float) -> None:
    firsts = [0, 3, 140, 299]
    arguments = batch(firsts, 4, 1, 16, 304, dtype=BF16)
    for sequence, first in enumerate(firsts):
        arguments[3][sequence, :, :, first:] = garbage
        arguments[4][sequence, :, first:] = garbage
    check_ranks(arguments, 4)


def test_schedules_of_ranks_agree_and_one_program_serves_all_positions() -> None:
    world = simulate.World("trn2", 2, replay=ReplayOptions(exact=True), replays=ReplayCache())

    def launched(firsts: list[int], mode: simulate.Mode = simulate.Mode.eager) -> Any:
        shares = divided(batch(firsts, 4, 1, 16, 304), 2)
        return world.launch(kernels.attention_decode, [(each, {}) for each in shares], mode=mode)

    assert find_faults(lambda: launched([5, 200]), seeds=8) == []
    assert len({stream.text() for firsts in ([5, 200], [0, 303]) for stream in launched(firsts).streams}) == 1
    launched([5, 200], simulate.Mode.replay)
    replayed, eager = launched([0, 303], simulate.Mode.replay), launched([0, 303])
    assert replayed.mode is simulate.Mode.replay
    for one, other in zip(replayed.outputs, eager.outputs):
        assert [each.tobytes() for each in one] == [each.tobytes() for each in other]


def test_partial_outputs_merge_to_the_softmax_of_all_keys() -> None:
    """The law that the ranks rely on, in float64 and without the kernels: o from shares by log-sum-exp."""
    *arrays, positions, scale = map(in_float64, batch([200], 1, 1, 8, 256))
    q, k, v, k_cache, v_cache = arrays
    shares = []
    for rank in range(4):
        keys, values = k_cache[0, 0, :, rank:200:4], v_cache[0, 0, rank:200:4]
        scores = scale * (q @ keys)
        shares.append((np.exp(scores).sum(), np.exp(scores) @ values))
    new = np.exp(scale * (q @ k.T))
    total = sum(share[1] for share in shares) + new * v
    o = total / (sum(share[0] for share in shares) + new.sum())
    longer = [each.astype(np.longdouble) for each in arrays]
    exact, plain, in_order = (
        np.asarray(DECODE[1](*copied(given), positions, scale)[0])
        for given in (longer, arrays, map(summed_in_order, arrays))
    )
    compare(o, exact, plain, in_order)


@pytest.mark.parametrize(
    ("group", "ranks", "place", "sentence"),
    [
        (None, 2, np.int32([[0]]), "2 position_ranks, but no position_group"),
        (ReplicaGroup([[0]]), 3, np.int32([[0]]), "position_ranks is 3; a power of two divides positions"),
        (ReplicaGroup([[0]]), 1, np.int32([0]), r"position_rank is \[1, 1\], not \(1,\)"),
    ],
)
def test_refuses_ranks_that_do_not_fit_and_takes_the_twin(
    group: Any, ranks: int, place: np.ndarray, sentence: str
) -> None:
    given = *batch([3], 4, 2, 8, 16), 2, *NOTHING, *(None,) * 6
    with pytest.raises(AssertionError, match=sentence):
        run(kernels.attention_decode, (*given, group, ranks, place))
    run(kernels.attention_decode, (*given, ReplicaGroup([[0]]), 1, np.int32([[0]])))
