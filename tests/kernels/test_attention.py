"""attention_prefill: groups, ragged sizes, caches, and what a decode step makes of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import (
    ODD_SIZES,
    TARGETS,
    check,
    compare,
    copied,
    in_every_way,
    in_float64,
    normal,
    run,
)
from tests.kernels.bounds import rounding_bound

BF16 = ml_dtypes.bfloat16
PREFILL = (kernels.attention_prefill, kernels.attention_prefill_reference)


def caches(heads: int, depth: int, positions: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    return normal(8, 1, heads, depth, positions, dtype=dtype), normal(
        9, 1, heads, positions, depth, dtype=dtype
    )


def prompt(
    tokens: int, heads: int, kv_heads: int, depth: int, dtype: Any = np.float32
) -> tuple[np.ndarray, ...]:
    return (
        normal(1, tokens, heads * depth, dtype=dtype),
        normal(2, tokens, kv_heads * depth, dtype=dtype),
        normal(3, tokens, kv_heads * depth, dtype=dtype),
    )


def prefill_arguments(
    tokens: int,
    heads: int,
    kv_heads: int,
    depth: int,
    positions: int,
    dtype: Any = np.float32,
    cache: Any = np.float32,
) -> tuple[Any, ...]:
    return (
        *prompt(tokens, heads, kv_heads, depth, dtype),
        *caches(kv_heads, depth, positions, cache),
        depth**-0.5,
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups_and_dtypes_on_every_chip(target: str, dtype: type, group: int) -> None:
    check(*PREFILL, prefill_arguments(129, 2 * group, 2, 16, 130, dtype, dtype), target)


@pytest.mark.parametrize("size", [1, *ODD_SIZES])
def test_any_number_of_tokens_and_positions(size: int) -> None:
    check(*PREFILL, prefill_arguments(size, 4, 2, 8, 172))


@pytest.mark.parametrize("depth", [1, 8, 48, 64, 127, 128])
def test_any_head_size(depth: int) -> None:
    check(*PREFILL, prefill_arguments(20, 4, 2, depth, 24))


@pytest.mark.parametrize("tokens", [511, 512, 513, 700])
def test_prompts_over_several_key_blocks(tokens: int) -> None:
    check(*PREFILL, prefill_arguments(tokens, 2, 1, 8, 768))


@pytest.mark.parametrize("steepness", [4, 300])
def test_maximum_that_moves_from_key_block_to_key_block(steepness: int) -> None:
    """The steep one spans more than the exponents of float32 hold: only the running maximum keeps exp finite.

    A rounding of a large score moves its weight as much as the score is large: the bound is that of such roundings.
    """
    q, k, v, k_cache, v_cache, scale = prefill_arguments(1100, 1, 1, 8, 1100)
    growing = np.linspace(0, steepness, 1100, dtype=np.float32)[:, None]
    for factors in (growing, growing[::-1]):
        given = np.abs(q), np.abs(k) * factors, v, k_cache, v_cache, scale
        wide = [in_float64(each) for each in given]
        truth = kernels.attention_prefill_reference(*copied(wide))[0]
        bounds = [
            rounding_bound(wide[0][row], wide[1][: row + 1], wide[2][: row + 1], scale) for row in range(1100)
        ]
        for outputs in in_every_way(kernels.attention_prefill, given):
            assert (np.abs(outputs[0] - truth) <= np.array(bounds)[:, None]).all()


def test_caches_in_bfloat16_with_float32_activations() -> None:
    check(*PREFILL, prefill_arguments(130, 4, 2, 16, 256, np.float32, BF16))


def test_prefill_writes_the_prompt_into_the_caches_and_nothing_else() -> None:
    q, k, v, k_cache, v_cache, scale = prefill_arguments(129, 4, 2, 16, 172)
    before = k_cache.copy(), v_cache.copy()
    _, new_k, new_v = (
        simulate.World("trn1")
        .launch(kernels.attention_prefill, [((q, k, v, k_cache, v_cache, scale), {})])
        .outputs[0]
    )
    assert new_k is k_cache
    assert new_v is v_cache
    for head in range(2):
        columns = slice(head * 16, (head + 1) * 16)
        assert np.array_equal(k_cache[0, head, :, :129], k[:, columns].T)
        assert np.array_equal(v_cache[0, head, :129], v[:, columns])
    assert np.array_equal(k_cache[..., 129:], before[0][..., 129:])
    assert np.array_equal(v_cache[:, :, 129:], before[1][:, :, 129:])


def test_later_tokens_do_not_change_earlier_outputs() -> None:
    q, k, v, *rest = prefill_arguments(200, 4, 2, 16, 256)
    changed = k.copy(), v.copy()
    for array in changed:
        array[150:] += 1
    first, second = (
        run(kernels.attention_prefill, (q, k, v, *rest)),
        run(kernels.attention_prefill, (q, *changed, *rest)),
    )
    assert np.array_equal(first[0][:150], second[0][:150])
    assert not np.array_equal(first[0][150:], second[0][150:])


@pytest.mark.parametrize("tokens", [1, 63, 127, 128, 129, 600])
def test_decode_after_prefill_equals_prefill_of_one_token_more(tokens: int) -> None:
    q, k, v = prompt(tokens + 1, 4, 2, 16)
    k_cache, v_cache = caches(2, 16, tokens + 40)
    scale = 0.25
    longer = run(kernels.attention_prefill, (q, k, v, k_cache, v_cache, scale))
    before = tokens
    _, k_cache, v_cache = run(
        kernels.attention_prefill, (q[:before], k[:before], v[:before], k_cache, v_cache, scale)
    )
    step = run(
        kernels.attention_decode,
        (q[before:], k[before:], v[before:], k_cache, v_cache, np.int32([[tokens]]), scale),
    )
    assert np.array_equal(step[1], longer[1])
    assert np.array_equal(step[2], longer[2])
    for head in range(4):
        own, shared = slice(head * 16, head * 16 + 16), slice(head // 2 * 16, head // 2 * 16 + 16)
        bound = rounding_bound(q[-1, own].astype(np.float64), k[:, shared], v[:, shared], scale)
        assert np.abs(step[0][0, own].astype(np.float64) - longer[0][-1, own]).max() <= bound


def test_reference_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is the independent reference of the references")
    q, k, v, k_cache, v_cache, scale = (in_float64(a) for a in prefill_arguments(37, 6, 2, 16, 40))
    heads = [torch.from_numpy(a.copy()).reshape(37, -1, 16).transpose(0, 1) for a in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    truth = (
        attend(*heads, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1).reshape(37, -1).numpy()
    )
    whole = kernels.attention_prefill_reference(q, k, v, *copied((k_cache, v_cache)), scale)
    compare(whole[0].astype(np.float32), truth, truth.astype(np.float32))


def test_takes_a_prompt_that_fills_the_caches_and_refuses_one_more() -> None:
    check(*PREFILL, prefill_arguments(24, 4, 2, 8, 24))
    with pytest.raises(
        AssertionError, match="a prompt of 25 tokens does not fit into caches of 24 positions"
    ):
        run(kernels.attention_prefill, prefill_arguments(25, 4, 2, 8, 24))


def test_refuses_operands_that_do_not_fit() -> None:
    q, k, v, k_cache, v_cache, scale = prefill_arguments(4, 4, 2, 8, 16)
    for arguments, sentence in (
        ((q, k[:, 1:].copy(), v, k_cache, v_cache, scale), r"k is \[4, 16\] for 2 heads of 8, not \(4, 15\)"),
        ((q, k, v[1:], k_cache, v_cache, scale), r"v is \[4, 16\] beside k \(4, 16\), not \(3, 16\)"),
        (
            (q[:, 1:].copy(), k, v, k_cache, v_cache, scale),
            "q has rows of 31, no multiple of 16, 2 heads of 8",
        ),
        ((q, k, v, k_cache, v_cache[:, :, 1:].copy(), scale), r"v_cache is \[1, 2, 16, 8\] beside k_cache"),
        ((q, k.astype(BF16), v, k_cache, v_cache, scale), "q, k and v are float32, bfloat16 and float32"),
        ((q, k, v, k_cache, v_cache, 0.0), "scale is 0.0; the running maximum needs a positive one"),
        ((q, k, v, k_cache, v_cache, scale, 4), "4 key/value heads, caches for 2"),
        (
            (q, k, v, k_cache[0], v_cache, scale),
            r"expected k_cache \[B, Hk, D, S\], not a tensor of shape \(2, 8, 16\)",
        ),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernels.attention_prefill, arguments)
    run(kernels.attention_prefill, (q, k, v, k_cache, v_cache, scale, 2))


def test_refuses_prompts_beyond_the_longest() -> None:
    with pytest.raises(AssertionError, match="attention_prefill takes at most 8192 tokens, not 8193"):
        run(kernels.attention_prefill, prefill_arguments(8193, 1, 1, 1, 8200))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_the_largest_sizes_fit_on_the_smallest_chip(dtype: type) -> None:
    """Planned and placed without computing numbers; a launch refuses tiles that do not fit."""
    world = simulate.World("trn1")
    q, k, v = (np.empty((8192, 128), dtype) for _ in range(3))
    cache = np.empty((1, 1, 128, 8192), BF16), np.empty((1, 1, 8192, 128), BF16)
    world.launch(kernels.attention_prefill, [((q, k, v, *cache, 0.1), {})], mode=simulate.Mode.dry)
