"""attention_decode: batches, ragged sizes, several new tokens, exact maxima, and what caches may hold."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.errors import OutOfBounds
from tests.kernels.accuracy import TARGETS, check, compare, copied, in_float64, normal, run
from tests.kernels.bounds import rounding_bound

BF16 = ml_dtypes.bfloat16
DECODE = (kernels.attention_decode, kernels.attention_decode_reference)


def caches(
    sequences: int, kv_heads: int, depth: int, positions: int, dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    return (
        normal(8, sequences, kv_heads, depth, positions, dtype=dtype),
        normal(9, sequences, kv_heads, positions, depth, dtype=dtype),
    )


def projected(
    tokens: int, heads: int, kv_heads: int, depth: int, dtype: Any = np.float32
) -> tuple[np.ndarray, ...]:
    return (
        normal(1, tokens, heads * depth, dtype=dtype),
        normal(2, tokens, kv_heads * depth, dtype=dtype),
        normal(3, tokens, kv_heads * depth, dtype=dtype),
    )


def following(firsts: list[int], new: int = 1) -> np.ndarray:
    """The positions of `new` tokens of each sequence, from the first on."""
    return (np.array(firsts)[:, None] + np.arange(new)).reshape(-1, 1).astype(np.int32)


def batch(
    firsts: list[int],
    heads: int,
    kv_heads: int,
    depth: int,
    positions: int,
    new: int = 1,
    dtype: Any = np.float32,
    cache: Any = None,
) -> tuple[Any, ...]:
    """Arguments for sequences whose first new token has the given positions; q and k are rotated already."""
    held = caches(len(firsts), kv_heads, depth, positions, dtype if cache is None else cache)
    tokens = projected(len(firsts) * new, heads, kv_heads, depth, dtype)
    return *tokens, *held, following(firsts, new), depth**-0.5


def tables(positions: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] * 100.0 ** (-np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_norms_rotation_and_attention_of_a_batch_on_every_chip(target: str, dtype: type) -> None:
    norms = normal(6, 1, 32, dtype=dtype), normal(7, 1, 32, dtype=dtype)
    arguments = batch([0, 130, 171], 8, 2, 32, 172, dtype=dtype)
    check(*DECODE, (*arguments, 2, *tables(172, 16), *norms, 1e-5), target)


@pytest.mark.parametrize("positions", [1, 8, 127, 128, 129, 384, 700])
def test_any_number_of_positions(positions: int) -> None:
    check(*DECODE, batch([0, positions // 2, positions - 1], 4, 2, 8, positions))


@pytest.mark.parametrize("depth", [2, 48, 128, 130, 256, 258, 512])
def test_any_even_head_size(depth: int) -> None:
    check(*DECODE, (*batch([20, 7], 6, 3, depth, 24), 3, *tables(24, depth // 2)))


def test_part_of_a_head_is_rotated() -> None:
    check(*DECODE, (*batch([20, 7], 4, 2, 32, 24), 2, *tables(24, 5)))


@pytest.mark.parametrize(("heads", "kv_heads", "new"), [(4, 4, 3), (6, 2, 2), (32, 2, 4), (1, 1, 128)])
def test_several_new_tokens_see_each_other_causally(heads: int, kv_heads: int, new: int) -> None:
    check(*DECODE, (*batch([0, 3, 100], heads, kv_heads, 8, 300, new), kv_heads, *tables(300, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "heads", "kv_heads"), [(40, 4, 4), (3, 128, 64), (2, 128, 2)])
def test_more_heads_than_one_output_tile_holds(sequences: int, heads: int, kv_heads: int) -> None:
    check(*DECODE, batch(list(range(sequences)), heads, kv_heads, 4, 130))


def test_caches_so_long_that_queries_take_several_passes() -> None:
    check(*DECODE, batch([2100, 5], 24, 1, 4, 2304, new=3))


@pytest.mark.parametrize(("dtype", "cache"), [(np.float32, BF16), (BF16, ml_dtypes.float8_e4m3)])
def test_caches_of_a_narrower_dtype(dtype: type, cache: type) -> None:
    check(*DECODE, batch([130, 3], 4, 2, 16, 256, dtype=dtype, cache=cache))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_what_a_cache_holds_from_the_new_position_on_is_not_used(target: str, garbage: float) -> None:
    firsts = [0, 1, 140, 299]
    clean = batch(firsts, 4, 2, 16, 300, dtype=BF16)
    dirty = copied(clean)
    for sequence, first in enumerate(firsts):
        dirty[3][sequence, :, :, first:] = garbage
        dirty[4][sequence, :, first:] = garbage
    outputs = [run(kernels.attention_decode, arguments, target) for arguments in (clean, dirty)]
    assert np.array_equal(outputs[0][0], outputs[1][0])
    for sequence, first in enumerate(firsts):
        assert np.array_equal(
            outputs[0][1][sequence, :, :, : first + 1], outputs[1][1][sequence, :, :, : first + 1]
        )


def in_pages(arguments: tuple[Any, ...], block: int, shared: int = 0) -> tuple[Any, ...]:
    """The same launch with caches in pages of `block`, in random order; all sequences share the first `shared`."""
    q, k, v, k_cache, v_cache, positions, scale, *rest = arguments
    sequences, kv_heads, depth, capacity = k_cache.shape
    count, new = capacity // block, len(q) // sequences
    order = np.random.default_rng(1).permutation(sequences * count + 3).astype(np.int32)
    tables = order[: sequences * count].reshape(sequences, count)
    tables[:, :shared] = tables[0, :shared]
    pages = [np.zeros((len(order), block, kv_heads, depth), k_cache.dtype) for _ in "kv"]
    for sequence in range(sequences):
        for held, rows in zip(
            pages, (k_cache[sequence].transpose(2, 0, 1), v_cache[sequence].swapaxes(0, 1))
        ):
            held[tables[sequence]] = rows.reshape(count, block, kv_heads, depth)
    slots = [
        [tables[token // new, place // block] * block + place % block]
        for token, place in enumerate(positions[:, 0])
    ]
    kv_heads, cos, sin = rest or (None, None, None)
    given = q, k, v, *pages, positions, scale, kv_heads, cos, sin, None, None, 1e-6
    return *given, np.array(slots, np.int32), tables


PAGED = [
    # first positions, query heads, kv heads, head size, positions, new tokens, page
    ([5, 200, 0], 4, 1, 16, 256, 1, 16),
    ([5, 300], 4, 2, 16, 384, 2, 64),
    ([5, 100], 4, 4, 8, 128, 1, 128),
    ([511, 3], 2, 1, 256, 512, 1, 32),
    ([700, 100], 6, 2, 64, 768, 3, 16),
]


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("case", PAGED)
def test_caches_in_pages(target: str, case: tuple[Any, ...]) -> None:
    *sizes, block = case
    plain = *batch(*sizes), sizes[2], *tables(sizes[4], sizes[3] // 2)
    check(*DECODE, in_pages(plain, block), target)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_pages_that_are_shared_and_named_twice_and_unused_ones_of_nan(target: str) -> None:
    arguments = batch([40, 70], 4, 2, 16, 128, dtype=BF16)
    paged = in_pages(arguments, 16, shared=2)
    numbers = paged[-1]
    numbers[:, 5:] = numbers[0, 0]  # beyond the positions: any page
    numbers[1, 3] = numbers[1, 2]
    for held in paged[3:5]:
        held[np.setdiff1d(np.arange(len(held)), numbers)] = np.nan
        held[numbers[0, 2], 40 - 32 :] = np.nan  # from the first sequence's new position on
    found = run(kernels.attention_decode, paged, target)
    wanted = kernels.attention_decode_reference(*copied(paged))
    exact = kernels.attention_decode_reference(*(in_float64(each) for each in paged))
    compare(found[0], exact[0], wanted[0])
    for mine, other in zip(found[1:], wanted[1:]):
        assert np.array_equal(mine, other, equal_nan=True)


def test_stream_does_not_depend_on_the_pages() -> None:
    texts = set()
    for firsts, shared in (([0, 3], 0), ([100, 70], 2)):
        given = in_pages(batch(firsts, 4, 2, 16, 128), 16, shared)
        launch = simulate.World("trn1").launch(kernels.attention_decode, [(given, {})])
        texts.add(launch.streams[0].text())
    assert len(texts) == 1


def test_refuses_pages_that_do_not_fit_and_takes_the_twin() -> None:
    paged = in_pages(batch([2, 3], 4, 2, 8, 128), 16)
    *rest, slots, numbers = paged
    for arguments, sentence in (
        ((*rest, slots), "slots and block_tables come together"),
        ((*rest, slots.T.copy(), numbers), r"slots are \[2, 1\], not \(1, 2\)"),
        ((*rest, slots, numbers[:, 1:].copy()), "hold a multiple of 128 positions, not 112"),
        ((*rest[:4], rest[4][1:], *rest[5:], slots, numbers), r"v_cache is \(18, 16, 2, 8\)"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernels.attention_decode, arguments)
    run(kernels.attention_decode, paged)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("window", [None, 1, 3, 40, 400])
def test_window_cap_and_sinks(target: str, window: int | None) -> None:
    softcap = 2.0 if window in (None, 3, 400) else None
    sinks = normal(12, 1, 4) * 3 if window in (None, 1, 3) else None
    arguments = *batch([0, 70, 299 - 3], 4, 2, 16, 300, new=3), 2, *tables(300, 8)
    given = (*arguments, None, None, 1e-6, None, None, window, softcap, sinks)
    check(*DECODE, given, target)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((0, None, None), "window is 0; a token sees at least its own position"),
        ((None, 0.0, None), "softcap is 0.0; scores are capped at a positive number"),
        ((None, None, np.zeros((1, 2), np.float32)), r"sinks are \[1, 4\], not \(1, 2\)"),
    ],
)
def test_refuses_options_without_meaning(options: tuple[Any, ...], sentence: str) -> None:
    arguments = *batch([3], 4, 2, 8, 16), 2, None, None, None, None, 1e-6, None, None
    with pytest.raises(AssertionError, match=sentence):
        run(kernels.attention_decode, (*arguments, *options))
    run(kernels.attention_decode, (*arguments, 1, 0.1, np.zeros((1, 4), np.float32)))


def test_only_the_new_positions_are_written() -> None:
    arguments = batch([5, 30], 4, 2, 16, 172, new=3)
    _, k, v, k_cache, v_cache, *_ = arguments
    before = k_cache.copy(), v_cache.copy()
    _, new_k, new_v = simulate.World("trn1").launch(kernels.attention_decode, [(arguments, {})]).outputs[0]
    assert new_k is k_cache
    assert new_v is v_cache
    for sequence, first in enumerate((5, 30)):
        for head in range(2):
            rows, columns = slice(3 * sequence, 3 * sequence + 3), slice(16 * head, 16 * head + 16)
            before[0][sequence, head, :, first : first + 3] = k[rows, columns].T
            before[1][sequence, head, first : first + 3] = v[rows, columns]
    assert np.array_equal(k_cache, before[0])
    assert np.array_equal(v_cache, before[1])


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand_beside_small_ones(sign: int) -> None:
    """Whole numbers, so that scores are exact: without the maximum exp overflows, or gives zeros only."""
    q, k, v, k_cache, v_cache, positions, _ = batch([200, 0, 299], 4, 2, 8, 300)
    q, k_cache = np.round(q * 4) * 25, np.round(k_cache * 4) * 25 * sign
    for group in (slice(0, 8), slice(16, 24)):
        q[:, group] /= 1000  # heads that share keys with heads of much larger scores
    check(*DECODE, (q, np.round(k), v, k_cache, v_cache, positions, 1.0))


def test_one_key_far_above_all_others_takes_all_weight() -> None:
    q, k, v, k_cache, v_cache, positions, scale = batch([200, 64], 2, 1, 8, 300)
    k_cache[0, 0, :, 150] = q[0, :8] * 1e4
    found = run(kernels.attention_decode, (q, k, v, k_cache, v_cache, positions, scale))[0]
    assert np.array_equal(found[0, :8], v_cache[0, 0, 150])


def test_equal_scores_give_the_mean() -> None:
    q, k, v, k_cache, v_cache, positions, scale = batch([255], 1, 1, 8, 300)
    k_cache[:], k[:] = 0, 0
    v_cache[0, 0, :255], v[:] = np.arange(255)[:, None], 255
    found = run(kernels.attention_decode, (q, k, v, k_cache, v_cache, positions, scale))[0]
    assert np.array_equal(found, np.full((1, 8), 127.5))


def test_sequences_together_equal_each_alone() -> None:
    arguments = batch([0, 70, 129, 171], 4, 2, 16, 172)
    q, k, v, k_cache, v_cache, positions, scale = arguments
    together = run(kernels.attention_decode, arguments)
    for row in range(4):
        own = slice(row, row + 1)
        alone = run(
            kernels.attention_decode,
            (q[own], k[own], v[own], k_cache[own], v_cache[own], positions[own], scale),
        )
        assert np.array_equal(alone[1], together[1][own])
        assert np.array_equal(alone[2], together[2][own])
        here = int(positions[row, 0]) + 1
        for head in range(4):
            columns = slice(16 * head, 16 * head + 16)
            keys, values = together[1][row, head // 2, :, :here].T, together[2][row, head // 2, :here]
            bound = rounding_bound(q[row, columns].astype(np.float64), keys, values, scale)
            assert np.abs(alone[0][0, columns] - together[0][row, columns]).max() <= bound


def test_reference_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the independent reference of the reference")
    q, k, v, k_cache, v_cache, positions, scale = (in_float64(a) for a in batch([36, 3], 6, 2, 16, 40))
    found = kernels.attention_decode_reference(
        q, k, v, *copied((k_cache, v_cache)), positions, scale, 2, *map(in_float64, tables(40, 8))
    )
    cos, sin = (np.tile(in_float64(table)[positions], 2) for table in tables(40, 8))
    turned = []
    for rows in (q, k):
        heads = rows.reshape(2, -1, 16)
        turned.append(heads * cos + np.concatenate([-heads[..., 8:], heads[..., :8]], axis=2) * sin)
    attend = torch.nn.functional.scaled_dot_product_attention
    for row, here in enumerate((36, 3)):
        keys = np.concatenate([k_cache[row, :, :, :here].swapaxes(1, 2), turned[1][row][:, None]], axis=1)
        values = np.concatenate([v_cache[row, :, :here], v[row].reshape(2, 1, 16)], axis=1)
        given = (torch.from_numpy(each.copy()) for each in (turned[0][row][:, None], keys, values))
        truth = attend(*given, scale=scale, enable_gqa=True).numpy().reshape(1, -1)
        compare(found[0][row : row + 1].astype(np.float32), truth, truth.astype(np.float32))


def test_stream_does_not_depend_on_the_positions() -> None:
    texts = set()
    for firsts in ([0, 0, 0], [100, 3, 255]):
        arguments = *batch(firsts, 4, 2, 64, 256), 2, *tables(256, 32)
        launch = simulate.World("trn1").launch(kernels.attention_decode, [(arguments, {})])
        texts.add(launch.streams[0].text())
    assert len(texts) == 1


def test_takes_the_last_position_and_refuses_the_next() -> None:
    run(kernels.attention_decode, batch([23], 4, 1, 8, 24))
    with pytest.raises(OutOfBounds, match="elements 24 to 192 of k_cache"):
        run(kernels.attention_decode, batch([24], 4, 1, 8, 24))


def test_refuses_what_does_not_fit_and_takes_the_twin() -> None:
    q, k, v, k_cache, v_cache, positions, scale = batch([2, 3], 4, 2, 8, 16)
    cos, sin = tables(16, 4)
    norm = np.ones((1, 8), np.float32)
    for arguments, sentence in (
        ((q, k[:, 1:].copy(), v, k_cache, v_cache, positions, scale), r"k is \[2, 16\] for 2 heads of 8"),
        ((q, k, v[1:], k_cache, v_cache, positions, scale), r"k is \(2, 16\), v is \(1, 16\)"),
        ((q[:, 1:].copy(), k, v, k_cache, v_cache, positions, scale), "q has rows of 31, no multiple"),
        ((q, k, v, k_cache, v_cache[:, :, 1:].copy(), positions, scale), r"v_cache is \[2, 2, 16, 8\]"),
        ((q, k.astype(BF16), v, k_cache, v_cache, positions, scale), "q, k and v are float32, bfloat16"),
        ((q, k, v, k_cache, v_cache, positions, 0.0), "scale is 0.0; the exact maximum needs a positive one"),
        ((q, k, v, k_cache, v_cache, positions, scale, 4), "4 key/value heads, caches for 2"),
        ((q, k, v, k_cache, v_cache, positions.T.copy(), scale), r"positions are \[2, 1\], not \(1, 2\)"),
        ((q[:1], k[:1], v[:1], k_cache, v_cache, positions[:1], scale), "1 tokens for caches of 2 sequences"),
        ((q, k, v, k_cache, v_cache, positions, scale, 2, cos), "cos and sin come together"),
        ((q, k, v, k_cache, v_cache, positions, scale, 2, *tables(16, 5)), "width 5 need heads of 10, not 8"),
        ((q, k, v, k_cache, v_cache, positions, scale, 2, cos, sin, norm), "q_norm and k_norm come together"),
        (
            (q, k, v, k_cache, v_cache, positions, scale, 2, cos, sin, norm[:, :4], norm),
            r"q_norm is \[1, 8\], not \(1, 4\)",
        ),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernels.attention_decode, arguments)
    run(kernels.attention_decode, (q, k, v, k_cache, v_cache, positions, scale, 2, cos, sin, norm, norm))


def planned(*sizes: Any, target: str = "trn1", **given: Any) -> None:
    """Plan and place a launch without computing numbers; it refuses tiles that do not fit."""
    arguments = batch(*sizes, **given)
    simulate.World(target).launch(kernels.attention_decode, [(arguments, {})], mode=simulate.Mode.dry)


@pytest.mark.parametrize(
    ("within", "beyond", "sentence"),
    [
        (([0], 2, 1, 512, 8), ([0], 2, 1, 514, 8), "an even head size of at most 512 here, not 514"),
        (([0], 2, 1, 2, 8), ([0], 2, 1, 3, 8), "an even head size of at most 512 here, not 3"),
        (([0], 128, 2, 2, 8), ([0], 129, 3, 2, 8), "at most 128 query heads, not 129"),
        (([0], 2, 1, 2, 128, 64), ([0], 2, 1, 2, 128, 65), "at most 128 new queries of a kv head, not 130"),
        (([0] * 64, 128, 64, 2, 8), ([0] * 65, 128, 64, 2, 8), "8192 heads of new tokens, not 8320"),
        (([0], 1, 1, 2, 16384), ([0], 1, 1, 2, 16385), "caches of at most 16384 positions, not 16385"),
    ],
)
def test_limits(within: tuple[Any, ...], beyond: tuple[Any, ...], sentence: str) -> None:
    planned(*within)
    with pytest.raises(AssertionError, match=sentence):
        planned(*beyond)


@pytest.mark.parametrize(("blocks", "refused"), [(85, False), (86, True)])
def test_limit_of_pages(blocks: int, refused: bool) -> None:
    given = in_pages(batch([0], 1, 1, 2, blocks * 128), 128)
    world = simulate.World("trn1")
    if not refused:
        world.launch(kernels.attention_decode, [(given, {})], mode=simulate.Mode.dry)
        return
    with pytest.raises(AssertionError, match="caches of at most 10922 positions, not 11008"):
        world.launch(kernels.attention_decode, [(given, {})], mode=simulate.Mode.dry)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_the_largest_sizes_fit_on_the_smallest_chip(dtype: type) -> None:
    planned([0], 128, 8, 128, 8192, dtype=dtype, cache=BF16)
    planned([0] * 64, 128, 1, 8, 128, dtype=dtype)
    planned([0], 16, 2, 512, 4096, dtype=dtype, cache=BF16)
