"""Caches of which a launch names the rows of its sequences: windows of speech that attention to an encoder keeps."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels import test_attention_prefill as prompts
from tests.kernels.accuracy import TARGETS, check, copied, run
from tests.kernels.test_attention_decode import DECODE, batch
from tests.kernels.test_attention_prefill import PREFILL, options
from tests.kernels.test_shared_caches import NOTHING, after, silent

BF16 = ml_dtypes.bfloat16
LEFT_OUT = None, None, None, None, None, None, None, 1, None
"""From slots to position_rank."""


def rows_of(*numbers: int) -> np.ndarray:
    """[B, 1] int32."""
    return np.array(numbers, np.int32)[:, None]


def spread(cache: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """A cache of `count` rows: those of sequences where `rows` say, all others NaN."""
    result = np.full((count, *cache.shape[1:]), np.nan, cache.dtype)
    result[rows[:, 0]] = cache
    return result


def step(
    sizes: tuple[Any, ...], rows: np.ndarray, count: int = 5, dtype: Any = np.float32
) -> tuple[Any, ...]:
    """A step whose sequences lie in some rows of the caches."""
    q, k, v, *caches, positions, scale = after(DECODE[1], batch(*sizes, dtype=dtype))
    caches = [spread(each, rows, count) for each in caches]
    return (q, k, v, *caches, positions, scale, sizes[2], *NOTHING, *LEFT_OUT, rows)


def prompt(tokens: int, keys: int, rows: np.ndarray, heads: tuple[int, int], dtype: Any) -> tuple[Any, ...]:
    """Prompts that attend to all keys of their own sequence, and write these to rows of caches that hold NaN."""
    sequences = len(rows)
    q = prompts.arguments(tokens * sequences, *heads, 16, sequences, dtype)[0]
    _, k, v, *caches, scale = prompts.arguments(keys * sequences, *heads, 16, sequences, dtype)
    caches = [np.full((4, *each.shape[1:]), np.nan, each.dtype) for each in caches]
    return (*options((q, k, v, *caches, scale), causal=False), None, rows)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("positions", [127, 128, 129, 300])
def test_a_step_finds_its_sequences_in_rows(target: str, dtype: Any, positions: int) -> None:
    last = positions - 1
    silent(DECODE, step(([last, 5, last], 4, 2, 32, positions), rows_of(3, 0, 2), dtype=dtype), target)


def test_heads_of_several_parts_and_groups_of_sequences() -> None:
    silent(DECODE, step(([40, 199], 2, 1, 144, 200), rows_of(4, 1)))
    silent(DECODE, step(([699, 650, 1], 6, 3, 16, 700), rows_of(0, 4, 2), dtype=BF16))
    silent(DECODE, step(([20, 30], 4, 2, 8, 40, 3), rows_of(1, 3)))


def test_two_sequences_read_one_row() -> None:
    given = list(step(([20, 30, 30], 2, 2, 8, 40), rows_of(1, 3, 0)))
    given[-1] = rows_of(3, 3, 0)
    silent(DECODE, tuple(given))


@pytest.mark.parametrize(
    "sizes", [([0, 130], 4, 2, 8, 172), ([129, 2, 128], 3, 1, 8, 172), ([2100], 3, 3, 8, 4000)]
)
def test_a_step_on_two_cores(sizes: tuple[Any, ...]) -> None:
    """Which divide heads, sequences and slots."""
    silent(DECODE, step(sizes, rows_of(3, 0, 2)[: len(sizes[0])]), "trn2", 2, 8)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("keys", [127, 128, 129, 300])
def test_a_prompt_writes_to_its_rows_alone(target: str, dtype: Any, keys: int) -> None:
    given = prompt(5, keys, rows_of(2, 0), (4, 2), dtype)
    in_order = (*given[:3], *(each[:2] for each in given[3:5]), *given[5:-1])
    check(*PREFILL, in_order, target)
    o, *caches = run(kernels.attention_prefill, copied(in_order), target)
    own_o, *own_caches = run(kernels.attention_prefill, copied(given), target)
    assert np.array_equal(o, own_o)
    for own, plain in zip(own_caches, caches):
        assert np.array_equal(own[[2, 0]], plain)
        assert np.isnan(own[[1, 3]].astype(np.float32)).all()


def test_rows_are_refused_beside_what_they_do_not_go_with() -> None:
    given = step(([20, 30], 2, 2, 8, 40), rows_of(1, 3))
    new = batch([20, 30], 2, 2, 8, 40)
    for wrong, sentence in (
        ((*given[:-1], np.zeros((2, 2), np.int32)), r"cache_rows are \[B, 1\], not \(2, 2\)"),
        ((*new, 2, *NOTHING, *LEFT_OUT, rows_of(0, 1)), "cache_rows come without k and v"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernels.attention_decode, wrong, "trn2")
    run(kernels.attention_decode, given, "trn2")

    given = prompt(3, 4, rows_of(2, 0), (2, 1), np.float32)
    paged = (np.zeros((8, 1), np.int32), np.zeros((2, 1), np.int32))
    pages = [np.zeros((2, 4, 1, 16), np.float32)] * 2
    zeros = np.zeros((6, 1), np.int32)
    for wrong, sentence in (
        ((*given[:-1], np.zeros((2, 2), np.int32)), r"cache_rows are \[B, 1\], not \(2, 2\)"),
        ((*given[:3], *pages, *given[5:9], *paged, *given[11:]), "pages come with block_tables alone"),
        ((*given[:7], zeros, 1, *given[9:]), "cache_rows come with k and v, and without a prefix"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            run(kernels.attention_prefill, wrong, "trn2")
    run(kernels.attention_prefill, given, "trn2")


def test_the_references_take_rows() -> None:
    """Against sequences whose caches lie in order."""
    given = step(([20, 30], 4, 2, 8, 40), rows_of(3, 1))
    in_order = (*given[:3], *(each[[3, 1]] for each in given[3:5]), *given[5:13])
    assert np.array_equal(DECODE[1](*copied(given)), DECODE[1](*copied(in_order)))
    given = prompt(3, 20, rows_of(2, 0), (2, 1), np.float32)
    plain = (*given[:3], *(np.zeros_like(each[:2]) for each in given[3:5]), *given[5:-1])
    for found, expected in zip(PREFILL[1](*copied(given))[1:], PREFILL[1](*copied(plain))[1:]):
        assert np.array_equal(found[[2, 0]], expected)
