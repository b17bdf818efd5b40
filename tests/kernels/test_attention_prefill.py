"""attention_prefill: batches, cached positions, masks, head sizes, large scores and padded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import (
    ODD_SIZES,
    as_tuple,
    compare,
    compare_all,
    copied,
    in_every_way,
    in_float64,
    normal,
    run,
)
from tests.kernels.bounds import rounding_bound
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    slow,
    together,
    vary,
)

PREFILL = (kernels.attention_prefill, kernels.attention_prefill_reference)


def arguments(
    tokens: int = 20,
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 16,
    sequences: int = 1,
    dtype: Any = F32,
    cache_dtype: Any = None,
    capacity: int = 0,
) -> tuple[Any, ...]:
    """Draw q, caches of as many positions as a sequence has tokens if no capacity is given, scale, k and v."""
    q, k, v = (
        normal(seed, tokens, count * depth, dtype=dtype)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    capacity = capacity or tokens // sequences
    k_cache = normal(8, sequences, kv_heads, depth, capacity, dtype=cache_dtype or dtype)
    v_cache = normal(9, sequences, kv_heads, capacity, depth, dtype=cache_dtype or dtype)
    return q, k_cache, v_cache, depth**-0.5, k, v


def options(
    inputs: tuple[Any, ...],
    positions: Any = None,
    prefix: int = 0,
    slots: Any = None,
    block_tables: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    causal: bool = True,
) -> tuple[Any, ...]:
    """Return arguments up to the last one."""
    return (*inputs, None, positions, prefix, slots, block_tables, window, softcap, sinks, causal)


def continued(
    tokens: int = 33,
    valid: tuple[int, ...] = (128, 77, 0),
    prefix: int = 128,
    depth: int = 32,
    page: int | None = None,
    dtype: Any = F32,
    garbage: float = np.nan,
    **more: Any,
) -> tuple[Any, ...]:
    """Return new tokens of one sequence for each length of a cache; what is not valid in the caches is `garbage`."""
    count, capacity = len(valid), max(prefix, *valid) + tokens
    q, _, _, scale, k, v = arguments(count * tokens, 4, 2, depth, count, dtype)
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
                index = tables[i, position // page], position % page
                k_cache[index] = v_cache[index] = garbage
    inputs = q, k_cache, v_cache, scale, k, v
    return options(inputs, positions[:, None], prefix, slots, tables, **more)


def attended(outputs: Sequence[np.ndarray], reference: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Assert outputs as near as numpy's; caches hold copies, so they are equal."""
    compare_all(outputs[:1], lambda *operands: as_tuple(reference(*operands))[:1], inputs)
    for cache, expected in zip(outputs[1:], as_tuple(reference(*copied(inputs)))[1:], strict=True):
        assert np.array_equal(cache, expected, equal_nan=True)


def settings_of_keys(keys: int) -> dict[str, Any]:
    """Return settings of two sequences of 70 tokens that see so many keys each."""
    _, k_cache, v_cache, _, k, v = arguments(2 * keys, sequences=2)
    return dict(tokens=140, sequences=2, causal=False, k=k, v=v, k_cache=k_cache, v_cache=v_cache)


def scores(largest: float, dtype: Any) -> list[dict[str, Any]]:
    """Return random scores; one large score among small ones, first, in the middle and last; equal ones of both signs.

    Tiles of 640 keys have a block whose scores are computed twice.
    """
    settings = dict(tokens=640, heads=1, kv_heads=1, depth=128, dtype=dtype)
    factor = (largest * 128**0.5) ** 0.5
    one = np.zeros((640, 128), dtype)
    one[:, 0] = factor
    keys = [one, -one]
    for index in (0, 300, 639):
        keys.append(-one)
        keys[-1][index] = one[index]
    random = dict(q=lambda q: (q * factor).astype(dtype), k=lambda k: (k / 3 * factor).astype(dtype))
    return [settings | change for change in (random, *(dict(q=one, k=k) for k in keys))]


SLOPES = F32([[0.5, 0.125, 0.7071067, 0.011]])


class TestAttentionPrefill(KernelTests):
    """Tiles of all keys are the longest, of several steps of each kind; in bfloat16 some scores are computed twice.

    Heads in several parts have parts of one height, or a shorter last one; a product of 512 dims and its sum takes two
    banks. Slopes are those of heads alone and side by side, of sequences of one token, and some bfloat16 does not hold.
    """

    case = KernelCase(
        kernels.attention_prefill,
        arguments,
        values=[
            *vary(tokens=[1, *ODD_SIZES], depth=8, capacity=172),
            *vary(depth=[1, 8, 48, 64, 127, 128], capacity=24),
            *vary(tokens=[511, 512, 513, 700], heads=2, kv_heads=1, depth=8, capacity=768),
            dict(tokens=130, capacity=256, cache_dtype=BF16),
            *vary(tokens=[24, 93, 99, 192], heads=4, kv_heads=1, sequences=3),
            *vary(tokens=400, heads=2, kv_heads=1, window=[1, 5, 127, 128, 129, 200, 256, 300, 1000]),
            dict(tokens=1280, heads=1, kv_heads=1, dtype=BF16, window=1024),
            *map(settings_of_keys, (1, 127, 128, 129, 300)),
            *vary(tokens=129, heads=2, kv_heads=1, depth=[129, 192, 256, 260, 512], dtype=[*DTYPES]),
            *(setting for largest in (1e2, 1e4) for dtype in DTYPES for setting in scores(largest, dtype)),
        ],
        every_chip=[
            *vary(tokens=129, heads=[2, 4, 8], capacity=130, dtype=[*DTYPES]),
            *vary(tokens=1300, heads=1, kv_heads=1, dtype=[*DTYPES]),
            *together("tokens sequences", (300, 1), (120, 3), (2, 2), dtype=[*DTYPES], slopes=SLOPES),
        ],
        refusals=[
            refuse("k is [20, 32] for 2 heads of 16, not (20, 31)", k=lambda k: k[:, 1:]),
            refuse("v is [20, 32] beside k (20, 32), not (19, 32)", v=lambda v: v[1:]),
            refuse(
                "q has 63 columns; the caches have 2 heads of 16, so pass a multiple of 32",
                q=lambda q: q[:, 1:],
            ),
            refuse("v_cache is [1, 2, 20, 16] beside k_cache", v_cache=lambda v: v[:, :, 1:]),
            refuse("q, k and v are float32, bfloat16 and float32", k=lambda k: k.astype(BF16)),
            refuse("scale is 0.0; the running maximum of scores needs a positive scale", scale=0.0),
            refuse("num_kv_heads is 4, but the caches have 2 heads", dict(num_kv_heads=2), num_kv_heads=4),
            refuse(
                "expected k_cache [B, Hk, D, S], not a tensor of shape (2, 16, 20)", k_cache=lambda k: k[0]
            ),
            refuse("19 tokens do not divide into 2 sequences", dict(sequences=2), q=lambda q: q[1:]),
            refuse("k is [18, 32] for 2 heads of 16, not (20, 32)", dict(sequences=2), q=lambda q: q[2:]),
            refuse("prefix is 4 without positions", prefix=4),
            refuse(
                "a prefix of 21 positions does not fit into caches of 20",
                dict(positions=np.zeros((20, 1), np.int32), prefix=20),
                prefix=21,
            ),
            refuse("a paged cache takes both slots and block_tables", slots=np.zeros((20, 1), np.int32)),
            refuse("softcap is 0.0; pass a number above 0", dict(softcap=1.0), softcap=0.0),
            refuse("sinks is [1, 4], not (1, 1)", dict(sinks=normal(1, 1, 4)), sinks=normal(1, 1, 1)),
            refuse("a window of 0 tokens needs causal attention and at least 1", dict(window=1), window=0),
            refuse(
                "a window of 3 tokens needs causal attention and at least 1", dict(window=3), causal=False
            ),
            refuse("slopes need causal attention", dict(slopes=SLOPES), causal=False),
            refuse("slopes go with neither a soft cap nor sinks", dict(slopes=SLOPES), softcap=5.0),
            refuse("slopes go with neither a soft cap nor sinks", dict(slopes=SLOPES), sinks=SLOPES),
            refuse("slopes is [1, 4], not (1, 3)", dict(slopes=SLOPES), slopes=SLOPES[:, :3]),
        ],
        limits=[
            limit(
                "tokens", 24, "a prompt of 25 tokens does not fit into caches of 24 positions", capacity=24
            ),
            limit("depth", 512, "heads of at most 512 elements, not 513", tokens=4, heads=2, kv_heads=1),
            limit(
                "tokens",
                8192,
                "attention_prefill takes at most 8192 tokens, not 8193",
                dry=True,
                heads=1,
                kv_heads=1,
                depth=1,
                capacity=8200,
            ),
        ],
        fits=[
            *vary(tokens=8192, heads=1, kv_heads=1, depth=128, dtype=[*DTYPES], cache_dtype=BF16),
            *slow(*vary(tokens=8192, heads=2, kv_heads=2, depth=128, dtype=[*DTYPES])),
        ],
        undefined=[
            # padding reaches no other tokens, nor do later tokens earlier ones
            Undefined(
                dict.fromkeys("qkv", np.r_[200:300, 500:600]),
                dict(tokens=600, heads=2, kv_heads=1, depth=32, sequences=2, dtype=dtype),
                value,
                rows=lambda _: [np.r_[200:300, 500:600]],
                kept=lambda _, outputs: outputs[:1],
                chips=["trn2"],
            )
            for dtype in DTYPES
            for value in (np.nan, np.inf, -np.inf)
        ],
        tolerance=attended,
    )


class TestAttentionPrefillAfterCachedPositions(KernelTests):
    """As many valid positions as the bucket has, fewer, and none; what is behind them is NaN.

    Keys beyond one span have an online softmax over the spans of a tile, in float32 of 4,096 keys. A slope may be so
    large that padding would exceed all scores.
    """

    case = KernelCase(
        kernels.attention_prefill,
        continued,
        values=[
            *vary(tokens=40, valid=(100,), garbage=[np.inf, -np.inf, 3e38]),
            *vary(tokens=150, valid=(100, 128), window=[5, 60, 128, 200, 1000]),
            *(
                setting
                for logit in (1.0, 1e4, -1e4)
                for setting in together(
                    "tokens valid prefix dtype",
                    *((140, (100,), 128, F32), (20, (0,), 0, BF16)),
                    sinks=normal(5, 1, 4) + F32(logit),
                )
            ),
            *vary(tokens=130, page=[None, 16], slopes=SLOPES * 1000),
            *vary(tokens=40, valid=(100, 0), page=[None, 16], dtype=BF16, window=60, slopes=SLOPES),
            *vary(tokens=140, valid=(100,), softcap=[0.5, 50.0]),
            *vary(tokens=20, valid=(0,), prefix=0, dtype=BF16, softcap=[0.5, 50.0], sinks=normal(5, 1, 4)),
            dict(tokens=128, valid=(4500,), prefix=4608, depth=8),
        ],
        every_chip=[
            *together("depth page", (262, None), (512, 16), valid=(77, 0), dtype=BF16),
            *vary(page=[None, 16, 128]),
            *vary(tokens=130, valid=(100, 1), prefix=112, page=[None, 16, 128], dtype=BF16),
        ],
        tolerance=attended,
        replays=False,
    )


def behind(
    prefix: int = 0, tokens: int = 300, group: int = 1, depth: int = 128, dtype: Any = BF16
) -> tuple[Any, ...]:
    """Return one key/value head behind so many positions."""
    inputs = arguments(tokens, group, 1, depth, 1, dtype, None, prefix + tokens)
    return options(inputs, np.zeros((tokens, 1), np.int32), prefix)


class TestMostKeysOfAttentionPrefill(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        behind,
        limits=[
            *(
                limit(
                    "prefix",
                    keys - 300,
                    f"at most {keys} keys for heads of {depth} in ",
                    dry=True,
                    depth=depth,
                    dtype=dtype,
                )
                for keys, depth, dtype in (
                    *((12288, 128, BF16), (8192, 256, BF16), (4096, 512, BF16)),
                    *((8192, 128, F32), (4096, 256, F32), (2048, 512, F32)),
                )
            ),
            *slow(
                *(
                    limit(
                        "group",
                        most,
                        f"at most {most} query heads of a key/value head for ",
                        dry=True,
                        prefix=keys - 256,
                        tokens=256,
                        depth=512,
                        dtype=dtype,
                    )
                    for dtype, keys, most in ((F32, 2048, 10), (BF16, 4096, 13))
                )
            ),
        ],
    )


@pytest.mark.parametrize("steepness", [4, 300])
def test_maximum_that_moves_from_key_block_to_key_block(steepness: int) -> None:
    """The steep one spans more than the exponents of float32 hold: only the running maximum keeps exp finite.

    A rounding of a large score moves its weight as much as the score is large: the bound is that of such roundings.
    """
    q, k_cache, v_cache, scale, k, v = arguments(1100, 1, 1, 8)
    growing = np.linspace(0, steepness, 1100, dtype=F32)[:, None]
    for factors in (growing, growing[::-1]):
        inputs = np.abs(q), k_cache, v_cache, scale, np.abs(k) * factors, v
        wide = [in_float64(array) for array in inputs]
        truth = kernels.attention_prefill_reference(*copied(wide))[0]
        bounds = [
            rounding_bound(wide[0][row], wide[4][: row + 1], wide[5][: row + 1], scale) for row in range(1100)
        ]
        for outputs in in_every_way(kernels.attention_prefill, inputs):
            assert (np.abs(outputs[0] - truth) <= np.array(bounds)[:, None]).all()


def test_prefill_writes_the_prompt_into_the_caches_and_nothing_else() -> None:
    inputs = arguments(129, capacity=172)
    _, k_cache, v_cache, _, k, v = inputs
    before = k_cache.copy(), v_cache.copy()
    _, new_k, new_v = simulate.World("trn1").launch(kernels.attention_prefill, [(inputs, {})]).outputs[0]
    assert new_k is k_cache
    assert new_v is v_cache
    for head in range(2):
        columns = slice(head * 16, (head + 1) * 16)
        assert np.array_equal(k_cache[0, head, :, :129], k[:, columns].T)
        assert np.array_equal(v_cache[0, head, :129], v[:, columns])
    assert np.array_equal(k_cache[..., 129:], before[0][..., 129:])
    assert np.array_equal(v_cache[:, :, 129:], before[1][:, :, 129:])


def test_later_tokens_do_not_change_earlier_outputs() -> None:
    *first_arguments, k, v = arguments(200, capacity=256)
    changed = k.copy(), v.copy()
    for array in changed:
        array[150:] += 1
    first, second = (
        run(kernels.attention_prefill, (*first_arguments, k, v)),
        run(kernels.attention_prefill, (*first_arguments, *changed)),
    )
    assert np.array_equal(first[0][:150], second[0][:150])
    assert not np.array_equal(first[0][150:], second[0][150:])


@pytest.mark.parametrize("tokens", [1, 63, 127, 128, 129, 600])
def test_decode_after_prefill_equals_prefill_of_one_token_more(tokens: int) -> None:
    inputs = arguments(tokens + 1, capacity=tokens + 40)
    q, k_cache, v_cache, scale, k, v = inputs
    longer = run(kernels.attention_prefill, inputs)
    before = tokens
    _, k_cache, v_cache = run(
        kernels.attention_prefill, (q[:before], k_cache, v_cache, scale, k[:before], v[:before])
    )
    step = run(
        kernels.attention_decode,
        (q[before:], k_cache, v_cache, np.int32([[tokens]]), scale, k[before:], v[before:]),
    )
    assert np.array_equal(step[1], longer[1])
    assert np.array_equal(step[2], longer[2])
    for head in range(4):
        columns, shared = slice(head * 16, head * 16 + 16), slice(head // 2 * 16, head // 2 * 16 + 16)
        bound = rounding_bound(q[-1, columns].astype(np.float64), k[:, shared], v[:, shared], scale)
        assert np.abs(step[0][0, columns].astype(np.float64) - longer[0][-1, columns]).max() <= bound


@pytest.mark.parametrize("tokens", [127, 128, 129, 300])
def test_sequences_together_equal_each_alone(tokens: int) -> None:
    inputs = arguments(2 * tokens, 4, 2, 32, 2)
    q, k_cache, v_cache, scale, k, v = inputs
    together = run(kernels.attention_prefill, inputs, "trn2")
    for i in range(2):
        rows = slice(i * tokens, (i + 1) * tokens)
        caches = (cache[i : i + 1] for cache in (k_cache, v_cache))
        alone = run(kernels.attention_prefill, (q[rows], *caches, scale, k[rows], v[rows]), "trn2")
        assert np.array_equal(together[0][rows], alone[0])
        for cache, expected in zip(together[1:], alone[1:]):
            assert np.array_equal(cache[i : i + 1], expected)


@pytest.mark.parametrize("tokens", [127, 128, 129])
def test_a_prompt_in_pieces_equals_the_whole(tokens: int) -> None:
    whole_prompt = arguments(3 * tokens, 4, 2, 32)
    q, k_cache, v_cache, scale, k, v = whole_prompt
    expected = run(kernels.attention_prefill, whole_prompt, "trn2")
    truth = kernels.attention_prefill_reference(*map(in_float64, whole_prompt))
    results = []
    for i in range(3):
        rows = slice(i * tokens, (i + 1) * tokens)
        positions = np.arange(i * tokens, (i + 1) * tokens, dtype=np.int32)[:, None]
        inputs = q[rows], k_cache, v_cache, scale, k[rows], v[rows]
        o, k_cache, v_cache = run(kernels.attention_prefill, options(inputs, positions, i * tokens), "trn2")
        results.append(o)
    compare(np.concatenate(results), truth[0], expected[0])
    assert np.array_equal(k_cache, expected[1])
    assert np.array_equal(v_cache, expected[2])


def test_reference_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the independent reference of the references")
    inputs = [in_float64(array) for array in arguments(74, 6, 2, 16, 2)]
    qkv = inputs[0], *inputs[4:]
    heads = [torch.from_numpy(rows.copy()).reshape(2, 37, -1, 16).transpose(1, 2) for rows in qkv]
    distance = np.arange(37)[:, None] - np.arange(37)
    for window, causal in ((None, True), (5, True), (None, False)):
        seen = (distance >= 0) & (distance < (window or 37)) if causal else np.ones((37, 37), bool)
        truth = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=torch.from_numpy(seen), scale=inputs[3], enable_gqa=True
        )
        reference = kernels.attention_prefill_reference(*copied(inputs), window=window, causal=causal)[0]
        assert np.allclose(reference, truth.transpose(1, 2).reshape(74, -1).numpy(), rtol=1e-12, atol=1e-12)
