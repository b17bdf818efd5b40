"""Kernels of a layer that reads another layer's caches: queries alone are projected, and nothing is written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from tests.kernels import test_attention_prefill as prompts
from tests.kernels.accuracy import (
    TARGETS,
    as_tuple,
    check,
    compare_all,
    copied,
    find_faults,
    in_order,
    named,
    normal,
    run,
)
from tests.kernels.divided import divided
from tests.kernels.test_attention_decode import DECODE, batch, in_pages, tables
from tests.kernels.test_attention_prefill import PREFILL, continued, options
from tests.kernels.test_qkv_projection import CASE as PROJECTION
from tests.kernels.test_qkv_projection import EPS
from tests.kernels.test_qkv_projection import arguments as projected

BF16 = ml_dtypes.bfloat16
NOTHING = None, None, None, None, 1e-6
"""cos, sin, q_norm, k_norm, eps."""


def after(reference: Any, given: tuple[Any, ...], garbage: float = np.nan) -> tuple[Any, ...]:
    """The arguments of a second layer that reads what a first one left in its caches.

    Contiguous caches hold `garbage` behind the last new position.
    """
    q, _, _, *rest = given
    _, *caches = reference(*copied(given))
    if reference is DECODE[1] and len(given) < 15:
        new = len(q) // len(caches[0])
        for sequence, last in enumerate(given[5][new - 1 :: new, 0]):
            caches[0][sequence, :, :, last + 1 :] = caches[1][sequence, :, last + 1 :] = garbage
    return q, None, None, *caches, *rest[2:]


def silent(
    pair: tuple[Any, Any], given: tuple[Any, ...], target: str = "trn2", cores: int = 1, seeds: int = 0
) -> None:
    """Compare a launch with the reference; it has no findings, returns o alone and leaves the caches as they are."""
    own = copied(given)
    done: list[Any] = []
    world = simulate.World(target, 1, cores)
    found = find_faults(lambda: done.append(world.launch(pair[0], [(own, {})])), seeds=seeds)
    assert found == []
    compare_all(as_tuple(done[0].outputs[0]), pair[1], given)
    for cache, before in zip(own[3:5], given[3:5]):
        assert np.array_equal(cache, before, equal_nan=True)


def step(
    *sizes: Any, dtype: Any = np.float32, choices: tuple[Any, ...] = (None, None, None)
) -> tuple[Any, ...]:
    """A second layer's step after `batch(*sizes)`: window, soft cap and sinks are `choices`."""
    first = after(DECODE[1], batch(*sizes, dtype=dtype))
    return (*first, sizes[2], *NOTHING, None, None, *choices)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_prompt_reads_what_another_layer_wrote(target: str, dtype: type) -> None:
    sinks = normal(12, 1, 2)
    for given in (
        prompts.arguments(258, 4, 2, 16, 2, dtype),
        options(prompts.arguments(129, 2, 1, 130, dtype=dtype), window=100, softcap=5.0, sinks=sinks),
        continued(33, (128, 77, 0), 128, dtype=dtype),
        continued(129, (100, 1), 112, page=16, dtype=dtype),
    ):
        shared = after(PREFILL[1], given)
        silent(PREFILL, shared, target)
        assert np.array_equal(
            run(kernels.attention_prefill, shared, target), run(kernels.attention_prefill, given, target)[0]
        )


def test_a_prompt_reads_caches_of_a_narrower_dtype() -> None:
    for page in (None, 16):
        given = list(after(PREFILL[1], continued(40, (100, 7), 128, page=page, garbage=0.0)))
        given[3:5] = (cache.astype(BF16) for cache in given[3:5])
        silent(PREFILL, tuple(given))


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_padded_tokens_of_a_prompt_do_not_reach_others(garbage: float) -> None:
    given = copied(after(PREFILL[1], prompts.arguments(200, 2, 1, 32)))
    clean = run(kernels.attention_prefill, given, "trn2")
    given[3][:, :, :, 150:] = given[4][:, :, 150:] = garbage
    assert np.array_equal(run(kernels.attention_prefill, given, "trn2")[:150], clean[:150])


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (1, 1)])
def test_a_prompt_on_two_cores(heads: tuple[int, int]) -> None:
    silent(PREFILL, after(PREFILL[1], prompts.arguments(129, *heads, 16)), "trn3", 2, 8)
    silent(PREFILL, after(PREFILL[1], continued(129, (100,), 128, 8, 16)), "trn2", 2)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_step_reads_what_another_layer_wrote(target: str, dtype: type) -> None:
    sinks = normal(12, 1, 4)
    silent(DECODE, step([0, 130, 171], 4, 2, 32, 172, dtype=dtype), target)
    silent(DECODE, step([0, 70, 125], 4, 2, 16, 128, 3, dtype=dtype, choices=(None, 2.0, sinks)), target)
    silent(DECODE, step([0, 70, 125], 4, 1, 16, 129, 3, dtype=dtype, choices=(3, None, sinks)), target)
    *rest, _, numbers = in_pages(batch([5, 100, 253], 4, 2, 16, 256, 2, dtype=dtype), 16)
    shared = after(DECODE[1], (*rest, _, numbers))
    silent(DECODE, (*shared[:13], None, numbers, 60, None, sinks), target)


def test_queries_of_a_step_are_normalised_and_rotated_alone() -> None:
    given = after(DECODE[1], batch([20, 0], 6, 3, 48, 24))
    given = *given, 3, *tables(24, 20), normal(6, 1, 48), None, 1e-5
    check(*DECODE, given, "trn2")


@pytest.mark.parametrize(
    "sizes", [([0, 130], 4, 2, 8, 172), ([129, 2, 128], 3, 1, 8, 172, 3), ([2100], 3, 3, 8, 4000)]
)
def test_a_step_on_two_cores(sizes: tuple[Any, ...]) -> None:
    silent(DECODE, step(*sizes, choices=(None, None, normal(12, 1, sizes[1]))), "trn2", 2, 8)


@pytest.mark.parametrize("block", [0, 128])
def test_a_step_over_ranks_that_divide_positions(block: int) -> None:
    whole = batch([3, 250, 510], 8, 2, 16, 512, 2)
    _, *caches = DECODE[1](*copied(whole))
    shares = divided((*whole[:3], *caches, *whole[5:]), 2, block)
    given = []
    for q, _, _, *rest in shares:
        *rest, group, ranks, place = rest
        rest[10] = None  # slots
        given.append(((q, None, None, *rest, group, ranks, place), {}))
    outputs = simulate.World("trn2", 2).launch(kernels.attention_decode, given).outputs
    heads = [each.reshape(6, 2, -1, 16) for each in outputs]
    own = np.stack(heads, axis=2).reshape(whole[0].shape)
    compare_all([own], DECODE[1], (whole[0], None, None, *caches, *whole[5:]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [5, 131])
def test_queries_are_projected_alone(target: str, dtype: Any, tokens: int) -> None:
    whole = projected(tokens, 300, rotated=16, dtype=dtype, q_norm=True, bias=True, norm_offset=1.0)
    given = named(kernels.qkv_projection, whole)
    for name in ("w_qkv", "bias"):
        given[name] = given[name][:, : given["q_size"]].copy()
    check(*PROJECTION, in_order(kernels.qkv_projection, **given | {"kv_size": 0}), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("tokens", [5, 131])
def test_heads_of_values_are_normalised(target: str, dtype: Any, tokens: int) -> None:
    """Beside norms and rotation of queries and keys, and alone; columns of several groups."""
    for given in (
        projected(tokens, 300, rotated=6, head_dim=16, dtype=dtype, q_norm=True, k_norm=True, v_norm=True),
        projected(tokens, 64, 12, 6, 144, head_dim=144, dtype=dtype, bias=True, v_norm=True),
    ):
        check(*PROJECTION, given, target)


def test_the_reference_normalises_values_as_their_moments_say() -> None:
    plain, normed = (
        PROJECTION[1](*projected(4, 24, 2, 2, 8, head_dim=8, norm=False, v_norm=flag))
        for flag in (False, True)
    )
    heads = plain[2].reshape(4, 2, 8).astype(np.float64)
    wanted = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + EPS)
    # A sum of squares passes at most 9 roundings: of a square, 7 sums, the sum with eps. The root halves their error.
    # The root, its reciprocal and a product are three more.
    assert np.allclose(normed[2].reshape(4, 2, 8), wanted, rtol=(4.5 + 3) * 2.0**-24, atol=0)
    assert np.array_equal(normed[1], plain[1])


def test_refuses_what_belongs_to_new_keys_and_takes_the_twin() -> None:
    norm = np.ones((1, 8), np.float32)
    decode = after(DECODE[1], batch([2, 3], 4, 2, 8, 16))
    prefill = after(PREFILL[1], prompts.arguments(6, 2, 1, 8, 2))
    only = named(kernels.qkv_projection, projected(9, 24, head=8, head_dim=8, q_norm=True))
    only |= {"w_qkv": only["w_qkv"][:, : only["q_size"]].copy(), "kv_size": 0}
    for kernel, given, sentence in (
        (kernels.attention_decode, (decode[0], decode[0], *decode[2:]), "k and v come together"),
        (kernels.attention_decode, (*decode, 2, None, None, norm, norm), "k_norm is given without k"),
        (
            kernels.attention_decode,
            (*decode, 2, *NOTHING, np.zeros((2, 1), np.int32)),
            "slots come with k and v, which are written there",
        ),
        (
            kernels.attention_decode,
            (decode[0][:, 1:].copy(), *decode[1:]),
            "q has rows of 31, no multiple of 16",
        ),
        (kernels.attention_prefill, (prefill[0], None, prefill[0], *prefill[3:]), "k and v come together"),
        (kernels.attention_prefill, (prefill[0][:5].copy(), *prefill[1:]), "5 tokens do not divide into 2"),
        (
            kernels.qkv_projection,
            in_order(kernels.qkv_projection, **only | {"k_norm": norm}),
            "k_norm or v_norm is given, and kv_size is 0",
        ),
        (
            kernels.qkv_projection,
            in_order(kernels.qkv_projection, **only | {"v_norm": True}),
            "k_norm or v_norm is given, and kv_size is 0",
        ),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernel, given)
    run(kernels.attention_decode, (*decode, 2, None, None, norm, None))
    run(kernels.attention_prefill, prefill)
    run(kernels.qkv_projection, in_order(kernels.qkv_projection, **only))
