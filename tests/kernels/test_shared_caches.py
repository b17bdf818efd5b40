"""Attention to caches of another layer, where nothing is written, and to rows of caches that a launch names."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import copied, normal
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Settings,
    Undefined,
    refuse,
    together,
    vary,
)
from tests.kernels.divided import OverPositions
from tests.kernels.test_attention_decode import READ_ONLY, from_position_on, step
from tests.kernels.test_attention_prefill import arguments, attended, continued

SINKS = normal(12, 1, 4)
NORM = dict(q_norm=normal(6, 1, 16))
IN_PAGES = dict(slots=lambda _: None)
SPEECH = dict(tokens=10, sequences=2, causal=False)
WIDE = np.zeros((2, 2), np.int32)
FIRSTS = (0, 70, 120)


def read_only(*rows: Settings) -> list[Settings]:
    """Return settings of launches without new keys and values."""
    return [{**READ_ONLY, **row} for row in rows]


def in_rows(*rows: int, count: int = 5) -> dict[str, Any]:
    """Return settings of sequences in some rows of caches that hold all their keys; other rows are NaN."""

    def spread(cache: np.ndarray) -> np.ndarray:
        spread_cache = np.full((count, *cache.shape[1:]), np.nan, cache.dtype)
        spread_cache[list(rows)] = cache
        return spread_cache

    return READ_ONLY | dict(k_cache=spread, v_cache=spread, cache_rows=np.int32(rows)[:, None])


class TestDecode(KernelTests):
    """Queries alone are normalised and rotated; two cores divide heads, sequences and slots."""

    case = KernelCase(
        kernels.attention_decode,
        step,
        values=read_only(
            *vary(firsts=(0, 130, 171), depth=32, positions=172, dtype=[*DTYPES]),
            *vary(firsts=(0, 70, 125), positions=128, new=3, softcap=2.0, sinks=SINKS, dtype=[*DTYPES]),
            *vary(
                firsts=(0, 70, 125), kv_heads=1, positions=129, new=3, window=3, sinks=SINKS, dtype=[*DTYPES]
            ),
            dict(firsts=(20, 0), heads=6, kv_heads=3, depth=48, half=20, q_norm=normal(6, 1, 48), eps=1e-5),
        ),
        every_chip=read_only(
            *vary(
                firsts=(5, 100, 253),
                positions=256,
                new=2,
                block=16,
                window=60,
                sinks=SINKS,
                dtype=[*DTYPES],
                **IN_PAGES,
            )
        ),
        refusals=[
            refuse("one of k and v is None: give both", READ_ONLY, k=normal(1, 2, 32)),
            refuse("k_norm is given without k", READ_ONLY | NORM, k_norm=normal(6, 1, 16)),
            refuse("slots come with k and v, which are written there", READ_ONLY, slots=np.int32([[0], [0]])),
            refuse("q has 63 columns, no multiple of 32", READ_ONLY, q=lambda q: q[:, 1:]),
        ],
        undefined=[
            Undefined(
                from_position_on([first + 3 for first in FIRSTS], 128),
                READ_ONLY | dict(firsts=FIRSTS, positions=128, new=3, dtype=BF16),
                value,
            )
            for value in (np.nan, np.inf)
        ],
        two_sums=read_only(
            dict(firsts=(0, 130), depth=8, positions=172, sinks=SINKS),
            dict(
                firsts=(129, 2, 128), heads=3, kv_heads=1, depth=8, positions=172, new=3, sinks=SINKS[:, :3]
            ),
            dict(firsts=(2100,), heads=3, kv_heads=3, depth=8, positions=4000, sinks=SINKS[:, :3]),
        ),
        ranks=[
            OverPositions(2, settings=row, paged="block" in row)
            for row in read_only(
                *(
                    dict(firsts=(3, 250, 510), heads=8, positions=512, new=2, **pages)
                    for pages in ({}, dict(block=256, **IN_PAGES))
                )
            )
        ],
        seeds=8,
        replays=False,
    )


class TestPrefill(KernelTests):
    """Padded tokens reach no others; two cores divide heads, groups of heads and tiles."""

    case = KernelCase(
        kernels.attention_prefill,
        arguments,
        every_chip=read_only(
            *vary(tokens=258, sequences=2, dtype=[*DTYPES]),
            *vary(
                tokens=129,
                heads=2,
                kv_heads=1,
                depth=130,
                window=100,
                softcap=5.0,
                sinks=SINKS[:, :2],
                dtype=[*DTYPES],
            ),
        ),
        refusals=[
            refuse("k and v come together", READ_ONLY, v=normal(1, 20, 32)),
            refuse(
                "5 tokens do not divide into 2", READ_ONLY | dict(tokens=6, sequences=2), q=lambda q: q[:5]
            ),
        ],
        undefined=[
            Undefined(
                dict(k_cache=np.s_[:, :, :, 150:], v_cache=np.s_[:, :, 150:]),
                READ_ONLY | dict(tokens=200, heads=2, kv_heads=1, depth=32),
                value,
                kept=lambda _, outputs: [outputs[0][:150]],
                chips=["trn2"],
            )
            for value in (np.nan, np.inf)
        ],
        two_sums=read_only(*together("heads kv_heads", (4, 2), (4, 1), (1, 1), tokens=129)),
        seeds=8,
        replays=False,
    )


@wraps(continued)
def written(**settings: Any) -> tuple[Any, ...]:
    """Draw new tokens whose keys and values the caches hold already."""
    inputs = continued(**settings)
    caches = kernels.attention_prefill_reference(*copied(inputs))[1:]
    return (inputs[0], *caches, inputs[3], None, None, *inputs[6:])


class TestPrefillAfterCachedPositions(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        written,
        every_chip=[
            *vary(dtype=[*DTYPES]),
            *vary(tokens=129, valid=(100, 1), prefix=112, page=16, dtype=[*DTYPES]),
        ],
        values=[
            dict(tokens=40, valid=(100, 7), page=page, garbage=0.0)
            | dict.fromkeys(("k_cache", "v_cache"), lambda cache: cache.astype(BF16))
            for page in (None, 16)
        ],
        two_sums=[dict(tokens=129, valid=(100,), depth=8, page=16)],
        seeds=0,
        replays=False,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [None, 16])
def test_keys_in_the_caches_count_as_new_ones(page: int | None, dtype: Any) -> None:
    settings = dict(tokens=129, valid=(100, 1), prefix=112, page=page, dtype=dtype)
    new, stored = (KernelCase(kernels.attention_prefill, draw) for draw in (continued, written))
    assert np.array_equal(*(case.run(case.arguments(settings))[0] for case in (new, stored)))


class TestDecodeInRows(KernelTests):
    """Heads of several parts, groups of sequences, and two sequences that read one row."""

    case = KernelCase(
        kernels.attention_decode,
        step,
        every_chip=[
            *(
                in_rows(3, 0, 2) | dict(firsts=(size - 1, 5, size - 1), depth=32, positions=size, dtype=dtype)
                for size in (127, 128, 129, 300)
                for dtype in DTYPES
            ),
            in_rows(4, 1) | dict(firsts=(40, 199), heads=2, kv_heads=1, depth=144, positions=200),
            in_rows(0, 4, 2) | dict(firsts=(699, 650, 1), heads=6, kv_heads=3, positions=700, dtype=BF16),
            in_rows(1, 3) | dict(firsts=(20, 30), depth=8, positions=40, new=3),
            in_rows(3, 3, 0) | dict(firsts=(20, 30, 30), heads=2, depth=8, positions=40),
        ],
        refusals=[
            refuse("cache_rows are [B, 1], not (2, 2)", in_rows(1, 3), cache_rows=WIDE),
            refuse("cache_rows come without k and v", in_rows(1, 3), k=normal(1, 2, 32), v=normal(1, 2, 32)),
        ],
        undefined=[
            Undefined(
                dict(k_cache=np.s_[0, :, :, 6:], v_cache=np.s_[0, :, 6:]),
                in_rows(3, 0, 2) | dict(firsts=(127, 5, 127), positions=128),
            )
        ],
        two_sums=[
            in_rows(3, 0) | dict(firsts=(0, 130), depth=8, positions=172),
            in_rows(3, 0, 2) | dict(firsts=(129, 2, 128), heads=3, kv_heads=1, depth=8, positions=172),
            in_rows(3) | dict(firsts=(2100,), heads=3, kv_heads=3, depth=8, positions=4000),
        ],
        seeds=8,
        replays=False,
    )


def draw_speech(keys: int = 4, dtype: Any = F32, in_order: bool = False) -> tuple[Any, ...]:
    """Draw two prompts of 5 tokens that see all keys, which are written to rows of caches of NaN."""
    q = arguments(10, sequences=2, dtype=dtype)[0]
    _, *caches, scale, k, v = arguments(2 * keys, sequences=2, dtype=dtype)
    if not in_order:
        caches = [np.full((4, *cache.shape[1:]), np.nan, dtype) for cache in caches]
    rows = None if in_order else np.int32([[2], [0]])
    return (q, *caches, scale, k, v, None, None, 0, None, None, None, None, None, False, None, rows)


class TestPrefillInRows(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        draw_speech,
        every_chip=vary(keys=[127, 128, 129, 300], dtype=[*DTYPES]),
        refusals=[
            refuse("cache_rows are [B, 1], not (2, 2)", cache_rows=WIDE),
            refuse(
                "pages come with block_tables alone",
                **dict.fromkeys(("k_cache", "v_cache"), np.zeros((2, 4, 2, 16), F32)),
                slots=np.zeros((8, 1), np.int32),
                block_tables=np.zeros((2, 1), np.int32),
            ),
            refuse(
                "cache_rows name rows that k and v are written to from position 0 on",
                positions=np.zeros((10, 1), np.int32),
                prefix=1,
            ),
        ],
        tolerance=attended,
        replays=False,
    )


def test_the_references_take_rows() -> None:
    """Against sequences whose caches are in order."""
    decode, prefill = TestDecodeInRows.case, TestPrefillInRows.case
    settings = dict(firsts=(20, 30), depth=8, positions=40)
    o, plain_o = (
        kernels.attention_decode_reference(**decode.arguments(settings | rows))
        for rows in (in_rows(3, 1), READ_ONLY)
    )
    assert np.array_equal(o, plain_o)
    (_, *caches), (_, *plain) = (
        kernels.attention_prefill_reference(**prefill.arguments(dict(keys=20, in_order=in_order)))
        for in_order in (False, True)
    )
    for cache, expected in zip(caches, plain):
        assert np.array_equal(cache[[2, 0]], expected)
        assert np.isnan(cache[[1, 3]]).all()
