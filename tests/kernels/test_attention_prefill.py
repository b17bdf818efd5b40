"""attention_prefill: batches, cached positions, masks, head sizes, large scores and padded tokens."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import TARGETS, check, compare, copied, in_float64, normal, run

BF16 = ml_dtypes.bfloat16
PREFILL = (kernels.attention_prefill, kernels.attention_prefill_reference)


def arguments(
    tokens: int, heads: int, kv_heads: int, depth: int, sequences: int = 1, dtype: Any = np.float32
) -> tuple[Any, ...]:
    """q, k, v, caches of as many positions as a sequence has tokens, and scale."""
    q, k, v = (
        normal(seed, tokens, count * depth, dtype=dtype)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    positions = tokens // sequences
    k_cache = normal(8, sequences, kv_heads, depth, positions, dtype=dtype)
    v_cache = normal(9, sequences, kv_heads, positions, depth, dtype=dtype)
    return q, k, v, k_cache, v_cache, depth**-0.5


def options(
    given: tuple[Any, ...],
    positions: Any = None,
    prefix: int = 0,
    slots: Any = None,
    block_tables: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    causal: bool = True,
) -> tuple[Any, ...]:
    """Arguments up to the last one."""
    return (*given, None, positions, prefix, slots, block_tables, window, softcap, sinks, causal)


def close(given: tuple[Any, ...], target: str = "trn2") -> None:
    """Compare one launch with the reference in float64."""
    outputs = run(kernels.attention_prefill, given, target)
    truth = kernels.attention_prefill_reference(*(in_float64(each) for each in given))
    plain = kernels.attention_prefill_reference(*copied(given))
    compare(outputs[0], truth[0], plain[0])
    for cache, expected in zip(outputs[1:], plain[1:]):
        assert np.array_equal(cache, expected, equal_nan=True)


def continued(
    tokens: int,
    valid: tuple[int, ...],
    prefix: int,
    depth: int = 32,
    page: int | None = None,
    dtype: Any = np.float32,
    garbage: float = np.nan,
    **more: Any,
) -> tuple[Any, ...]:
    """New tokens of one sequence for each length of a cache; what is not valid in the caches is `garbage`."""
    count, capacity = len(valid), max(prefix, *valid) + tokens
    q, k, v, *_, scale = arguments(count * tokens, 4, 2, depth, count, dtype)
    positions = np.concatenate([np.arange(start, start + tokens) for start in valid]).astype(np.int32)
    k_cache = normal(8, count, 2, depth, capacity, dtype=dtype)
    v_cache = normal(9, count, 2, capacity, depth, dtype=dtype)
    slots = tables = None
    if page is not None:
        pages = -(-capacity // page)
        tables = np.random.default_rng(7).permutation(count * pages).reshape(count, pages).astype(np.int32)
        k_cache, v_cache = (normal(seed, count * pages, page, 2, depth, dtype=dtype) for seed in (8, 9))
        sequence = np.arange(count).repeat(tokens)
        slots = (tables[sequence, positions // page] * page + positions % page)[:, None].astype(np.int32)
    for i, start in enumerate(valid):
        if page is None or tables is None:
            k_cache[i, :, :, start:] = v_cache[i, :, start:] = garbage
        else:
            for position in range(start, tables.shape[1] * page):
                place = tables[i, position // page], position % page
                k_cache[place] = v_cache[place] = garbage
    given = q, k, v, k_cache, v_cache, scale
    return options(given, positions[:, None], prefix, slots, tables, **more)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_tiles_of_all_keys_on_every_chip(target: str, dtype: type) -> None:
    """Longest tiles of several steps of each kind; in bfloat16 some scores are computed twice."""
    check(*PREFILL, arguments(1300, 1, 1, 16, dtype=dtype), target)


@pytest.mark.parametrize("tokens", [127, 128, 129, 300])
def test_sequences_together_equal_each_alone(tokens: int) -> None:
    given = arguments(2 * tokens, 4, 2, 32, 2)
    together = run(kernels.attention_prefill, given, "trn2")
    for i in range(2):
        rows = slice(i * tokens, (i + 1) * tokens)
        parts = [each[rows] for each in given[:3]] + [each[i : i + 1] for each in given[3:5]]
        alone = run(kernels.attention_prefill, (*parts, given[5]), "trn2")
        assert np.array_equal(together[0][rows], alone[0])
        for cache, own in zip(together[1:], alone[1:]):
            assert np.array_equal(cache[i : i + 1], own)


@pytest.mark.parametrize("tokens", [8, 31, 33, 64])
def test_short_sequences_with_several_heads_on_the_partitions(tokens: int) -> None:
    check(*PREFILL, arguments(3 * tokens, 4, 1, 16, 3), "trn2")


@pytest.mark.parametrize("window", [1, 5, 127, 128, 129, 200, 256, 300, 1000])
def test_windows_of_any_size(window: int) -> None:
    check(*PREFILL, options(arguments(400, 2, 1, 16), window=window), "trn2")


def test_windows_with_scores_computed_twice() -> None:
    check(*PREFILL, options(arguments(1280, 1, 1, 16, dtype=BF16), window=1024), "trn2")


@pytest.mark.parametrize("keys", [1, 127, 128, 129, 300])
def test_every_token_sees_every_key_without_causal(keys: int) -> None:
    q = arguments(140, 4, 2, 16, 2)[0]
    _, k, v, *rest = arguments(2 * keys, 4, 2, 16, 2)
    check(*PREFILL, options((q, k, v, *rest), causal=False), "trn2")


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("depth", [129, 192, 256, 260, 512])
def test_heads_in_several_parts(depth: int, dtype: type) -> None:
    """Parts of one height, and with a last one that is shorter; a product of 512 dims and its sum takes two banks."""
    check(*PREFILL, arguments(129, 2, 1, depth, dtype=dtype), "trn2")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("depth", "page"), [(262, None), (512, 16)])
def test_tall_heads_after_cached_positions(target: str, depth: int, page: int | None) -> None:
    close(continued(33, (77, 0), 128, depth, page, BF16), target)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("largest", [1e2, 1e4])
def test_scores_of_any_size_and_sign(largest: float, dtype: type) -> None:
    """Random ones; a single large one among very small ones, first, in the middle and last; equal ones of both signs.

    Tiles of 640 keys have a block whose scores are computed twice.
    """
    q, k, v, *rest = arguments(640, 1, 1, 128, dtype=dtype)
    factor = (largest * 128**0.5) ** 0.5
    close(((q * factor).astype(dtype), (k / 3 * factor).astype(dtype), v, *rest))
    one = np.zeros_like(q)
    one[:, 0] = factor
    for place in (0, 300, 639):
        keys = -one
        keys[place] = one[place]
        close((one, keys, v, *rest))
    close((one, one, v, *rest))
    close((one, -one, v, *rest))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("padding", [np.nan, np.inf, -np.inf])
def test_padded_tokens_do_not_reach_others(padding: float, dtype: type) -> None:
    given = arguments(600, 2, 1, 32, 2, dtype=dtype)
    clean = run(kernels.attention_prefill, given, "trn2")
    padded = copied(given)
    for each in padded[:3]:
        each.reshape(2, 300, -1)[:, 200:] = padding
    result = run(kernels.attention_prefill, padded, "trn2")
    rows = [each[0].reshape(2, 300, -1)[:, :200] for each in (clean, result)]
    assert np.array_equal(*rows)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("page", [None, 16, 128])
def test_new_tokens_after_cached_ones(target: str, page: int | None) -> None:
    """As many valid positions as the bucket has, fewer, and none; what is behind them is NaN."""
    close(continued(33, (128, 77, 0), 128, page=page), target)
    close(continued(130, (100, 1), 112, page=page, dtype=BF16), target)


@pytest.mark.parametrize("garbage", [np.inf, -np.inf, 3e38])
def test_cached_positions_behind_the_valid_ones_do_not_count(garbage: float) -> None:
    close(continued(40, (100,), 128, garbage=garbage))


@pytest.mark.parametrize("tokens", [127, 128, 129])
def test_a_prompt_in_pieces_equals_the_whole(tokens: int) -> None:
    q, k, v, k_cache, v_cache, scale = arguments(3 * tokens, 4, 2, 32)
    whole = run(kernels.attention_prefill, (q, k, v, k_cache.copy(), v_cache.copy(), scale), "trn2")
    truth = kernels.attention_prefill_reference(
        *(in_float64(each) for each in (q, k, v, k_cache, v_cache)), scale
    )
    results = []
    for i in range(3):
        rows = slice(i * tokens, (i + 1) * tokens)
        positions = np.arange(i * tokens, (i + 1) * tokens, dtype=np.int32)[:, None]
        given = q[rows], k[rows], v[rows], k_cache, v_cache, scale
        o, k_cache, v_cache = run(kernels.attention_prefill, options(given, positions, i * tokens), "trn2")
        results.append(o)
    compare(np.concatenate(results), truth[0], whole[0])
    assert np.array_equal(k_cache, whole[1])
    assert np.array_equal(v_cache, whole[2])


@pytest.mark.parametrize("window", [5, 60, 128, 200, 1000])
def test_windows_that_reach_into_cached_positions(window: int) -> None:
    close(continued(150, (100, 128), 128, window=window))


@pytest.mark.parametrize("logit", [1.0, 1e4, -1e4])
def test_sinks_take_part_in_the_sum_only(logit: float) -> None:
    close(continued(140, (100,), 128, sinks=normal(5, 1, 4) + np.float32(logit)))
    close(continued(20, (0,), 0, dtype=BF16, sinks=normal(5, 1, 4) + np.float32(logit)))


SLOPES = np.float32([[0.5, 0.125, 0.7071067, 0.011]])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_slopes_make_far_keys_count_less(target: str, dtype: type) -> None:
    """Heads alone and side by side, sequences of one token, slopes that bfloat16 does not hold."""
    for tokens, sequences in ((300, 1), (3 * 40, 3), (2, 2)):
        close((*options(arguments(tokens, 4, 2, 16, sequences, dtype)), SLOPES), target)


@pytest.mark.parametrize("page", [None, 16])
def test_slopes_count_distances_from_cached_positions(page: int | None) -> None:
    """As many valid ones as the bucket has, fewer, and none; a slope that would let padding exceed all scores."""
    close((*continued(130, (128, 77, 0), 128, page=page), SLOPES * 1000))
    close((*continued(40, (100, 0), 128, page=page, dtype=BF16, window=60), SLOPES))


def test_refuses_slopes_that_no_model_has() -> None:
    given = arguments(4, 4, 2, 8)
    for more, message in (
        ({"causal": False}, "slopes need causal attention"),
        ({"softcap": 5.0}, "slopes go with neither a soft cap nor sinks"),
        ({"sinks": SLOPES}, "slopes go with neither a soft cap nor sinks"),
    ):
        with pytest.raises(AssertionError, match=message):
            run(kernels.attention_prefill, (*options(given, **more), SLOPES), "trn2")
    with pytest.raises(AssertionError, match=r"slopes is \[1, 4\], not \(1, 3\)"):
        run(kernels.attention_prefill, (*options(given), SLOPES[:, :3]), "trn2")


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_scores_with_a_soft_cap(softcap: float) -> None:
    close(continued(140, (100,), 128, softcap=softcap))
    close(continued(20, (0,), 0, dtype=BF16, softcap=softcap, sinks=normal(5, 1, 4)))


def test_stream_does_not_depend_on_lengths_slots_and_tables() -> None:
    texts = set()
    for valid in ((0, 5), (100, 128)):
        launch = simulate.World("trn2").launch(
            kernels.attention_prefill, [(continued(40, valid, 128, page=16)[:-1], {})]
        )
        texts.add(launch.streams[0].text())
    assert len(texts) == 1


def test_prefix_in_several_spans() -> None:
    """Keys beyond one span: an online softmax over the spans of a tile, in float32 of 4,096 keys."""
    close(continued(128, (4500,), 4608, depth=8))


@pytest.mark.slow
def test_largest_sizes_fit_on_the_smallest_chip_in_both_dtypes() -> None:
    """Planned and placed without computing numbers; a launch refuses tiles that do not fit."""
    for dtype in (np.float32, BF16):
        q, k, v = (np.empty((8192, width), dtype) for width in (256, 256, 256))
        cache = np.empty((1, 2, 128, 8192), dtype), np.empty((1, 2, 8192, 128), dtype)
        world = simulate.World("trn1")
        world.launch(kernels.attention_prefill, [((q, k, v, *cache, 0.1), {})], mode=simulate.Mode.dry)


@pytest.mark.parametrize(
    ("keys", "depth", "dtype"),
    [
        (12288, 128, BF16),
        (8192, 256, BF16),
        (4096, 512, BF16),
        (8192, 128, np.float32),
        (4096, 256, np.float32),
        (2048, 512, np.float32),
    ],
)
def test_takes_the_most_keys_that_fit_and_refuses_one_more(keys: int, depth: int, dtype: type) -> None:
    """Planned and placed without computing numbers, on the chip with the smallest SBUF."""
    for prefix in (keys - 300, keys - 299):
        q, k, v = (np.empty((300, depth), dtype) for _ in range(3))
        cache = np.empty((1, 1, depth, keys + 1), dtype), np.empty((1, 1, keys + 1, depth), dtype)
        given = options((q, k, v, *cache, 0.1), np.zeros((300, 1), np.int32), prefix)
        world = simulate.World("trn1")
        if prefix + 300 == keys:
            world.launch(kernels.attention_prefill, [(given, {})], mode=simulate.Mode.dry)
            continue
        with pytest.raises(
            AssertionError, match=f"at most {keys} keys for heads of {depth} in .*, not {keys + 1}"
        ):
            world.launch(kernels.attention_prefill, [(given, {})], mode=simulate.Mode.dry)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "keys", "most"), [(np.float32, 2048, 10), (BF16, 4096, 13)])
def test_takes_the_most_query_heads_that_fit_and_refuses_one_more(dtype: type, keys: int, most: int) -> None:
    """Planned and placed without computing numbers, on the chip with the smallest SBUF, at the most keys of 512."""
    for group in (most, most + 1):
        q, k, v = (np.empty((256, heads * 512), dtype) for heads in (group, 1, 1))
        cache = np.empty((1, 1, 512, keys), dtype), np.empty((1, 1, keys, 512), dtype)
        given = options((q, k, v, *cache, 0.1), np.zeros((256, 1), np.int32), keys - 256)
        world = simulate.World("trn1")
        if group == most:
            world.launch(kernels.attention_prefill, [(given, {})], mode=simulate.Mode.dry)
            continue
        with pytest.raises(
            AssertionError, match=f"at most {most} query heads of a key/value head for .*, not {most + 1}"
        ):
            world.launch(kernels.attention_prefill, [(given, {})], mode=simulate.Mode.dry)


def test_refuses_what_it_does_not_compute_and_takes_the_next() -> None:
    given = arguments(6, 2, 1, 8, 2)
    q, k, v, *rest = given
    for wrong, sentence in (
        (options((q[:5], k, v, *rest)), "5 tokens do not divide into 2 sequences"),
        (options((q[:4], k, v, *rest)), r"k is \[4, 8\] for 1 heads of 8, not \(6, 8\)"),
        (options(given, prefix=4), "a prefix takes positions, whose first ones tell its length"),
        (options(given, np.zeros((6, 1), np.int32), 4), "a prefix of 4 positions, caches of 3"),
        (options(given, slots=np.zeros((6, 1), np.int32)), "a paged cache takes both slots and block_tables"),
        (options(given, softcap=0.0), "softcap is 0.0, not above 0"),
        (options(given, sinks=np.zeros((1, 1), np.float32)), r"sinks is \[1, 2\], not \(1, 1\)"),
        (options(given, window=0), "a window of 0 tokens needs causal attention and at least 1"),
        (
            options(given, window=3, causal=False),
            "a window of 3 tokens needs causal attention and at least 1",
        ),
        (options(arguments(4, 2, 1, 513)), "heads of at most 512 elements, not 513"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernels.attention_prefill, wrong)
    run(kernels.attention_prefill, options(given, window=1))
    run(kernels.attention_prefill, options(given, np.zeros((6, 1), np.int32), 3))
    run(kernels.attention_prefill, options(given, softcap=1.0, sinks=np.zeros((1, 2), np.float32)))
    run(kernels.attention_prefill, options((q[:4], k, v, *rest), causal=False))


def test_reference_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the independent reference of the references")
    given = [in_float64(each) for each in arguments(74, 6, 2, 16, 2)]
    heads = [torch.from_numpy(each.copy()).reshape(2, 37, -1, 16).transpose(1, 2) for each in given[:3]]
    distance = np.arange(37)[:, None] - np.arange(37)
    for window, causal in ((None, True), (5, True), (None, False)):
        seen = (distance >= 0) & (distance < (window or 37)) if causal else np.ones((37, 37), bool)
        truth = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=torch.from_numpy(seen), scale=given[5], enable_gqa=True
        )
        own = kernels.attention_prefill_reference(*copied(given), window=window, causal=causal)[0]
        assert np.allclose(own, truth.transpose(1, 2).reshape(74, -1).numpy(), rtol=1e-12, atol=1e-12)
