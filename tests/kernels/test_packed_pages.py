"""Attention with full pages of 4 bits: earlier pages as 4 bits hold them, the page of each query as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import as_tuple, in_order, normal
from tests.kernels.case import BF16, F32, Arguments, KernelCase, KernelTests, Undefined, limit, refuse, vary
from tests.kernels.test_pack_pages import create_pages

SINKS = normal(12, 1, 4) * 3


def draw_pages(count: int, block: int, heads: int, depth: int, dtype: Any) -> dict[str, np.ndarray]:
    """Return full pages of random keys and values in 4 bits."""
    k_pages, v_pages = create_pages(count, block, heads, depth)
    numbers = np.arange(count, dtype=np.int32)[:, None]
    caches = (normal(seed, count, block, heads, depth, dtype=dtype) for seed in (3, 4))
    kernels.pack_pages_reference(k_pages, v_pages, *caches, numbers, numbers)
    return dict(k_pages=k_pages, v_pages=v_pages)


def step(
    firsts: tuple[int, ...] = (20, 7),
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 16,
    block: int = 16,
    positions: int = 128,
    dtype: Any = F32,
) -> tuple[Any, ...]:
    """Draw sequences that decode one token each; unread pages and positions have random numbers."""
    count, blocks = len(firsts), positions // block
    random = np.random.default_rng(2)
    tables = random.permutation(count * blocks + 3)[: count * blocks].reshape(count, blocks).astype(np.int32)
    newest = random.permutation(count + 2)[:count, None].astype(np.int32)
    first_column = np.array(firsts, np.int32)[:, None]
    q, k, v = (
        normal(seed, count, width * depth, dtype=dtype)
        for seed, width in enumerate((heads, kv_heads, kv_heads))
    )
    k_cache, v_cache = (normal(seed, count + 2, block, kv_heads, depth, dtype=dtype) for seed in (5, 6))
    return in_order(
        kernels.attention_decode,
        **dict(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, positions=first_column, scale=depth**-0.5),
        **dict(slots=newest * block + first_column % block, block_tables=tables, newest_tables=newest),
        **draw_pages(count * blocks + 3, block, kv_heads, depth, dtype),
    )


def find_unread(arguments: Arguments) -> tuple[np.ndarray, ...]:
    """Return the index of the positions of newest pages from the new token of each sequence on."""
    block = arguments["k_cache"].shape[1]
    unread = np.ones(arguments["k_cache"].shape[:2], bool)
    for page, position in zip(arguments["newest_tables"][:, 0], arguments["positions"][:, 0]):
        unread[page, : position % block] = False
    return np.nonzero(unread)


def find_later_pages(arguments: Arguments) -> np.ndarray:
    """Return the full pages that no token of the step reads."""
    block = arguments["k_cache"].shape[1]
    read = [
        table[: position // block]
        for table, position in zip(arguments["block_tables"], arguments["positions"][:, 0])
    ]
    return np.setdiff1d(np.arange(len(arguments["k_pages"])), np.concatenate(read))


class TestDecode(KernelTests):
    case = KernelCase(
        kernels.attention_decode,
        step,
        values=[
            dict(firsts=(0, 15, 16, 17, 127)),
            *vary(block=[1, 8, 32, 128], firsts=(127, 128, 129, 255), positions=256, kv_heads=1),
            dict(positions=384, firsts=(383, 200, 5), depth=64, heads=6, kv_heads=3, dtype=BF16),
            dict(sinks=SINKS, softcap=2.0),
            dict(depth=24, kv_heads=4),
        ],
        every_chip=[dict(depth=128, kv_heads=1, dtype=BF16)],
        refusals=[
            refuse("pages of 4 bits take no window", window=8),
            refuse("no k_scale", k_scale=np.ones((1, 2), F32), v_scale=np.ones((1, 2), F32)),
            refuse("k_pages and v_pages come together", v_pages=lambda _: None),
            refuse("newest_tables come with k_pages", k_pages=lambda _: None, v_pages=lambda _: None),
            refuse("slots, block_tables and newest_tables; pass all", newest_tables=lambda _: None),
            refuse("newest_tables have 1 rows, block_tables 2", newest_tables=lambda tables: tables[:1]),
            refuse("a multiple of 128 positions, not 112", block_tables=lambda tables: tables[:, :7]),
            refuse(
                "take one new token of a sequence, not 4 tokens of 2 sequences",
                **dict.fromkeys(
                    ("q", "k", "v", "positions", "slots"), lambda rows: np.repeat(rows, 2, axis=0)
                ),
            ),
        ],
        limits=[
            limit("depth", 128, "elements, not 136", step=8, kv_heads=1, heads=1, firsts=(20,)),
            limit(
                *("positions", 16256, "caches of at most 16384 positions, not 16400"),
                **dict(step=128, dry=True, depth=128, kv_heads=1, heads=1, firsts=(5,), dtype=BF16),
            ),
        ],
        fits=[
            dict(positions=14336, depth=128, kv_heads=1, firsts=(14000, 5), dtype=BF16),
            dict(positions=4096, block=128, depth=128, heads=16, kv_heads=4, firsts=(14, 5), dtype=BF16),
        ],
        undefined=[
            Undefined(
                dict(k_cache=find_unread, v_cache=find_unread),
                dict(firsts=(5, 20, 37)),
                kept=lambda _, outputs: outputs[:1],
            ),
            Undefined(
                dict(k_pages=find_later_pages, v_pages=find_later_pages), dict(firsts=(5, 20, 37)), value=255
            ),
        ],
        two_cores=[dict(firsts=(100, 7, 30)), dict(firsts=(100,), heads=2, kv_heads=1)],
        replays=False,
    )


def prompts(
    tokens: int = 40,
    cached: tuple[int, ...] = (0,),
    prefix: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 16,
    block: int = 16,
    dtype: Any = F32,
) -> tuple[Any, ...]:
    """Draw prompts of `tokens` new tokens each behind some cached positions, which are complete pages."""
    count, blocks, new = len(cached), -(-(prefix + tokens) // block), -(-tokens // block)
    random = np.random.default_rng(2)
    tables = random.permutation(count * blocks + 3)[: count * blocks].reshape(count, blocks).astype(np.int32)
    newest = random.permutation(count * new + 1)[: count * new].reshape(count, new).astype(np.int32)
    index = np.arange(tokens)
    slots = newest[:, index // block] * block + index % block
    q, k, v = (
        normal(seed, count * tokens, width * depth, dtype=dtype)
        for seed, width in enumerate((heads, kv_heads, kv_heads))
    )
    k_cache, v_cache = (normal(seed, count * new + 1, block, kv_heads, depth, dtype=dtype) for seed in (5, 6))
    return in_order(
        kernels.attention_prefill,
        **dict(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, scale=depth**-0.5, prefix=prefix),
        positions=(np.array(cached)[:, None] + index).reshape(-1, 1).astype(np.int32),
        slots=slots.reshape(-1, 1).astype(np.int32),
        block_tables=tables,
        **draw_pages(count * blocks + 3, block, kv_heads, depth, dtype),
    )


class TestPrefill(KernelTests):
    case = KernelCase(
        kernels.attention_prefill,
        prompts,
        values=[
            *vary(tokens=[1, 15, 16, 17, 127, 128, 129]),
            *vary(block=[1, 4, 128], tokens=150, kv_heads=1, dtype=BF16),
            dict(tokens=40, cached=(32, 16), prefix=64),
            dict(tokens=150, cached=(128, 256), prefix=256, block=4, dtype=BF16),
            dict(tokens=150, sinks=SINKS, softcap=2.0),
        ],
        every_chip=[dict(tokens=300, block=32, depth=128, kv_heads=1, heads=2, dtype=BF16)],
        refusals=[
            refuse("no window and no slopes", window=8),
            refuse("no window and no slopes", slopes=np.ones((1, 4), F32)),
            refuse("causal attention", causal=False),
            refuse("heads of 8, 16, 24 … 128 elements, not 12", depth=12),
            refuse("k_pages and v_pages come together", k_pages=lambda _: None),
        ],
        limits=[limit("tokens", 6144, "at most 12288 keys", kv_heads=1, heads=1, dry=True)],
        two_cores=[dict(tokens=150)],
        two_sums=[dict(tokens=150, cached=(32,), prefix=64, kv_heads=1)],
        replays=False,
    )


def test_a_prompt_in_parts_equals_the_whole_and_decoding() -> None:
    """Each token reads the same numbers with its prompt, in a chunk behind packed pages, and as a new token."""
    settings = dict(tokens=64, block=16)
    prefill, decode = TestPrefill.case, TestDecode.case
    inputs = prefill.arguments(settings)
    inputs |= dict(
        slots=np.arange(64, dtype=np.int32)[:, None], block_tables=np.arange(8, dtype=np.int32)[None]
    )
    inputs |= {name: np.zeros((8, *inputs[name].shape[1:]), np.uint8) for name in ("k_pages", "v_pages")}
    inputs |= {name: np.zeros((4, 16, 2, 16), F32) for name in ("k_cache", "v_cache")}
    complete, k_cache, v_cache = prefill.run(inputs)
    numbers = np.arange(4, dtype=np.int32)[:, None]
    pages = as_tuple(
        KernelCase(kernels.pack_pages, lambda: ()).run(
            dict(k_pages=inputs["k_pages"], v_pages=inputs["v_pages"], k_cache=k_cache, v_cache=v_cache)
            | dict(sources=numbers, destinations=numbers)
        )
    )
    # Sums of 64 products in other orders, of weights up to 1 and values up to 4.
    tolerance = 64 * 4 * np.finfo(F32).eps
    behind = inputs | dict(prefix=32, k_pages=pages[0], v_pages=pages[1], k_cache=k_cache, v_cache=v_cache)
    last = prefill.run(behind | {name: inputs[name][32:] for name in ("q", "k", "v", "positions", "slots")})[
        0
    ]
    assert np.abs(last - complete[32:]).max() <= tolerance
    for position in (0, 15, 16, 50, 63):
        row = slice(position, position + 1)
        token = decode.arguments({}) | {
            name: inputs[name][row] for name in ("q", "k", "v", "positions", "slots")
        }
        token |= {name: behind[name] for name in ("k_cache", "v_cache", "k_pages", "v_pages", "block_tables")}
        token |= dict(newest_tables=np.array([[position // 16]], np.int32))
        assert np.abs(decode.run(token)[0] - complete[row]).max() <= tolerance


def mixed(dtype: Any = F32, **settings: Any) -> tuple[Any, ...]:
    """Draw sequences that decode, and prompts behind cached pages, on the same pages."""
    decoding = TestDecode.case.arguments(dict(dtype=dtype) | settings)
    chunks = TestPrefill.case.arguments(dict(dtype=dtype, tokens=20, cached=(32, 0), prefix=48))
    count, newest_count = len(decoding["k_pages"]), len(decoding["k_cache"])
    block = decoding["k_cache"].shape[1]
    joined = {
        name: np.concatenate([decoding[name], chunks[name]])
        for name in ("q", "k", "v", "positions", "k_cache", "v_cache", "k_pages", "v_pages")
    }
    return in_order(
        kernels.attention_mixed,
        **joined,
        scale=decoding["scale"],
        decoding=len(decoding["q"]),
        slots=np.concatenate([decoding["slots"], chunks["slots"] + newest_count * block]),
        block_tables=decoding["block_tables"],
        newest_tables=decoding["newest_tables"],
        prompt_tables=chunks["block_tables"] + np.int32(count),
        prefix=48,
    )


class TestMixed(KernelTests):
    case = KernelCase(
        kernels.attention_mixed,
        mixed,
        every_chip=vary(dtype=[F32, BF16]),
        refusals=[refuse("pages of 4 bits take no window", window=lambda _: 8)],
        two_cores=[dict()],
        replays=False,
    )


@pytest.mark.parametrize("draw", [step, prompts])
def test_earlier_pages_are_read_in_4_bits(draw: Any) -> None:
    """Scales that are twice as large change the outputs of tokens behind the first page, and of these only."""
    case = TestDecode.case if draw is step else TestPrefill.case
    settings: dict[str, Any] = (
        dict(firsts=(5, 20)) if draw is step else dict(cached=(0, 16), prefix=16, tokens=8)
    )
    inputs = case.arguments(settings)
    doubled = inputs["v_pages"].copy()
    scales = np.ascontiguousarray(doubled[..., -4:]).view(F32) * F32(2)
    doubled[..., -4:] = scales.view(np.uint8)
    first, second = (
        as_tuple(case.run(inputs | dict(v_pages=pages)))[0] for pages in (inputs["v_pages"], doubled)
    )
    rows = len(first) // 2
    assert np.array_equal(first[:rows], second[:rows])
    assert (np.abs(first[rows:] - second[rows:]).max(axis=1) > 0.01).all()
