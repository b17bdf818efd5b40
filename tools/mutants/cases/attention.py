"""Cases of attention: decode steps, the attention block of a decode step, and prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels
from tests.kernels import test_attention_divided, test_shared_caches
from tests.kernels.accuracy import compare, copied, in_float64, named, normal
from tests.kernels.case import KernelCase
from tests.kernels.divided import OverPositions
from tests.kernels.test_attention_decode import batch, in_pages
from tests.kernels.test_attention_mixed import mixed, stored
from tests.kernels.test_scaled_caches import (
    BOTH,
    IN_PAGES,
    TestBlockDecode,
    TestDecode,
    TestPrefill,
    TestPrefillAfterCachedPositions,
)
from tools.mutants.cases.case import BF16, EPS, Case, Outputs, by_case, by_reference, two_cores

OVER_POSITIONS = test_attention_divided.TestDecodeOverPositions.case


def _caches(heads: int, depth: int, positions: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Draw key and value caches of one sequence: [1, heads, depth, positions] and [1, heads, positions, depth]."""
    return normal(8, 1, heads, depth, positions, dtype=dtype), normal(
        9, 1, heads, positions, depth, dtype=dtype
    )


def prompt(
    tokens: int, heads: int, kv_heads: int, depth: int, dtype: Any = np.float32
) -> tuple[np.ndarray, ...]:
    """Draw queries, keys and values, [tokens, heads * depth] each with its own number of heads."""
    widths = heads * depth, kv_heads * depth, kv_heads * depth
    return tuple(normal(seed, tokens, width, dtype=dtype) for seed, width in enumerate(widths, 1))


def _step(
    target: str,
    firsts: list[int],
    heads: int,
    kv: int,
    depth: int,
    positions: int,
    dtype: Any,
    cache: Any,
    new: int = 1,
    rotated: int = 0,
) -> Case:
    """Return a step of `new` tokens for sequences with so many valid positions (`firsts`), in contiguous caches.

    Cache positions beyond the valid ones have values that only a correct mask hides. rotated: width of the tables of
    angles; if it is not 0, the kernel rotates and normalises queries and keys.
    """
    stored = [np.concatenate([array] * len(firsts)) for array in _caches(kv, depth, positions, cache)]
    for sequence, first in enumerate(firsts):
        # What no mask but an infinite or a very low one can hide; of rotated keys the reference has not the bytes.
        stored[0][sequence, :, :, first:] = 50 if rotated else 3e10
        stored[1][sequence, :, first:] = -50 if rotated else np.nan
    row_positions = (np.array(firsts)[:, None] + np.arange(new)).reshape(-1, 1).astype(np.int32)
    tables = [normal(seed, positions, rotated) for seed in (6, 7)] if rotated else [None, None]
    norms = [normal(seed, 1, depth) for seed in (4, 5)] if rotated else [None, None]
    q, k, v = prompt(len(row_positions), heads, kv, depth, dtype)
    arguments = q, *stored, row_positions, depth**-0.5, k, v, kv
    return by_reference("attention_decode", target, *arguments, *tables, *norms, EPS, copies=not rotated)


def _step_with(
    target: str,
    dtype: Any,
    block: int,
    *choices: Any,
    kv: int = 2,
    new: int = 2,
    firsts: tuple[int, ...] = (100, 128),
    capacity: int = 256,
) -> Case:
    """Return a step of `new` tokens for sequences with so many valid positions (`firsts`).

    block: positions per page, 0 for contiguous caches. choices: window, soft cap and sinks.
    """
    depth, pages, sequences = 16, capacity // (block or capacity), len(firsts)
    count = sequences * pages + 3
    table = np.random.default_rng(3).permutation(count)[: sequences * pages]
    table = table.reshape(sequences, pages).astype(np.int32)
    caches = (
        normal(8, sequences, kv, depth, capacity, dtype=dtype),
        normal(9, sequences, kv, capacity, depth, dtype=dtype),
    )
    all_positions = np.concatenate([start + np.arange(new) for start in firsts])
    slots = None
    if block:
        caches = tuple(normal(seed, count, block, kv, depth, dtype=dtype) for seed in (8, 9))
        slots = (
            table[np.arange(sequences).repeat(new), all_positions // block] * block + all_positions % block
        )[:, None].astype(np.int32)
    q, k, v = prompt(sequences * new, 4, kv, depth, dtype)
    arguments = q, *caches, all_positions[:, None].astype(np.int32), depth**-0.5, k, v, kv
    paged = (slots, table if block else None)
    return by_reference("attention_decode", target, *arguments, *(None,) * 4, EPS, *paged, *choices)


def _block(
    target: str,
    firsts: list[int],
    heads: int,
    kv: int,
    depth: int,
    positions: int,
    dtype: Any,
    weight_dtype: Any = None,
    rotated: bool = True,
    hidden: int = 130,
    ranks: int = 1,
) -> Case:
    """Return an attention block of a decode step, judged on all ranks together.

    rotated: with rotary tables and norms of queries and keys.
    """
    sequences = len(firsts)
    widths = heads * depth, kv * depth
    stored = [np.concatenate([array] * sequences) for array in _caches(kv, depth, positions, dtype)]
    tables = [normal(seed, positions, depth // 2) if rotated else None for seed in (6, 7)]
    norms = [normal(seed, 1, depth, dtype=dtype) if rotated else None for seed in (4, 5)]
    weights = (normal(11, hidden, widths[0] + 2 * widths[1]) / hidden**0.5).astype(weight_dtype or dtype)
    inputs = normal(10, sequences, hidden, dtype=dtype), normal(12, 1, hidden, dtype=dtype), weights
    row_positions = np.array(firsts, np.int32)[:, None]
    output = (normal(13, widths[0], hidden) / widths[0] ** 0.5).astype(weight_dtype or dtype)
    remaining = (*stored, row_positions, depth**-0.5, output, kv, *tables, *norms)
    reference_arguments = (*inputs, EPS, *widths, *remaining)
    if ranks == 1:
        return by_reference("attention_block_decode", target, *reference_arguments, copies=False)
    shards = [_shard_of_block(reference_arguments, rank, ranks) for rank in range(ranks)]
    alike = by_reference(
        "attention_block_decode", target, reference_arguments=reference_arguments, ranks=shards, copies=False
    )
    judge = alike.judge
    assert judge is not None
    return replace(alike, judge=lambda outputs: judge(_caches_joined(outputs)))


def _shard_of_block(reference_arguments: tuple[Any, ...], rank: int, ranks: int) -> tuple[Any, ...]:
    """Return one rank's part of the arguments of attention_block_decode."""
    x, norm, w_qkv, eps, q_size, kv_size, *caches, row_positions, scale, w_o, kv, cos, sin, _, _ = (
        reference_arguments
    )
    columns = [
        np.split(panel, ranks, axis=1)[rank] for panel in np.split(w_qkv, [q_size, q_size + kv_size], axis=1)
    ]
    cache_shards = [np.split(cache, ranks, axis=1)[rank].copy() for cache in caches]
    weights = np.concatenate(columns, axis=1), np.split(w_o, ranks)[rank].copy()
    widths = q_size // ranks, kv_size // ranks
    group = ReplicaGroup([list(range(ranks))])
    remaining = row_positions, scale, weights[1], kv // ranks, cos, sin, None, None, group
    return x, norm, weights[0], eps, *widths, *cache_shards, *remaining


def _caches_joined(outputs: Outputs) -> Outputs:
    """Return each rank's first output, followed by the key and value caches of all ranks joined along the heads."""
    caches = [np.concatenate([output[index] for output in outputs], axis=1) for index in (1, 2)]
    return [(output[0], *caches) for output in outputs]


def _decode() -> list[Case]:
    return [
        _step_with("trn2", np.float32, 16, None, None, None),
        _step_with("trn2", np.float32, 2, None, None, None),
        _step_with("trn2", BF16, 128, None, None, None),
        _step_with("trn1", BF16, 16, 50, None, normal(6, 1, 4), kv=1),
        _step_with("trn3", np.float32, 0, 70, 5.0, normal(6, 1, 4)),
        _turned_as("trn2", np.int32([[60], [5], [99], [0]])),
        _block("trn2", [60, 3], 4, 2, 32, 128, np.float32),
        _block("trn1", [5, 0, 8], 4, 1, 16, 9, BF16),
        _block("trn3", [5, 0, 8], 3, 1, 8, 9, BF16, np.float32, False, 4100),
        _block("trn2", [3] * 66, 32, 2, 4, 8, np.float32),
        _block("trn2", [3] * 66, 4, 1, 256, 8, np.float32, rotated=False),
        _block("trn1", [3, 7] * 65, 2, 1, 8, 8, np.float32),
        _block("trn2", [70, 2047, 3] * 3, 1, 1, 4, 2048, np.float32),
        _block("trn2", [5, 0, 8], 2, 2, 8, 9, np.float32, rotated=False, ranks=2),
        _step("trn2", [60], 6, 3, 48, 128, np.float32, np.float32, rotated=20),
        _step("trn1", [5, 0, 8], 4, 1, 16, 9, BF16, BF16, rotated=8),
        _step("trn1", [100, 257], 6, 2, 16, 300, np.float32, BF16, new=3, rotated=8),
        _step("trn2", [1001], 24, 1, 4, 2304, np.float32, np.float32, new=3),
        _step("trn3", [7, 3, 60] * 6, 80, 40, 130, 128, BF16, BF16),
        _shared(_step("trn2", [100, 257], 6, 2, 16, 300, np.float32, np.float32, new=3)),
        _shared(_step("trn2", [1001, 5], 24, 12, 4, 2304, np.float32, np.float32)),
        _shared(_step_with("trn1", BF16, 16, 50, None, normal(6, 1, 4), kv=1)),
        _shared(_step_with("trn3", np.float32, 0, 70, 5.0, normal(6, 1, 4))),
        _in_rows("trn1", (3, 0), firsts=(299, 5), depth=144, positions=300, dtype=BF16),
        _in_rows("trn2", (4, 1, 2), firsts=(127, 40, 90), heads=6, kv_heads=3, positions=128),
        two_cores(_in_rows("trn2", (3, 0, 2), firsts=(60, 3, 129), heads=3, kv_heads=1, positions=172)),
        two_cores(_in_rows("trn3", (2,), firsts=(2100,), heads=3, kv_heads=3, depth=8, positions=4000)),
    ]


def _in_rows(target: str, rows: tuple[int, ...], **settings: Any) -> Case:
    """Return a step whose sequences use the given rows of the caches, with other settings of its kernel test."""
    keywords = test_shared_caches.TestDecodeInRows.case.arguments(
        settings | test_shared_caches.in_rows(*rows)
    )
    return by_reference("attention_decode", target, *keywords.values())


def _turned_as(target: str, rows: np.ndarray) -> Case:
    """Return a step whose tokens use other rows of the rotary tables than their positions."""
    case = _step_with(target, np.float32, 16, 50, None, None)
    angles = {name: normal(seed, 100, 8) for name, seed in (("cos", 6), ("sin", 7))}
    keywords = named(nki_kernels.attention_decode, case.arguments[0]) | angles
    return by_reference("attention_decode", target, *keywords.values(), rows)


def _shared(case: Case) -> Case:
    """Return the case of a second layer that shares the caches which a case's launch leaves, and writes none."""
    reference = getattr(nki_kernels, f"{case.kernel}_reference")
    _, k_cache, v_cache = reference(*copied(case.arguments[0]))
    keywords = named(reference, case.arguments[0]) | {
        "k": None,
        "v": None,
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    if case.kernel == "attention_decode" and "slots" in keywords:
        keywords["slots"] = None  # nothing is written
    return replace(by_reference(case.kernel, case.target, *keywords.values()), cores=case.cores)


def _divided(target: str, ranks: OverPositions, case: KernelCase = OVER_POSITIONS) -> Case:
    """Return a case of ranks that divide the positions of the caches.

    Their outputs are joined before they are judged.
    """
    arguments = case.arguments(ranks.settings)

    def judge(outputs: Outputs) -> None:
        case.compare(ranks.join_outputs(outputs)[0], arguments)

    return Case("attention_decode", target, tuple(ranks.shards(arguments)), judge)


def _decode_divided() -> list[Case]:
    sinks = normal(6, 1, 4)
    alone = {"kv": 1, "firsts": (200,)}
    shared_page = batch([40, 70, 3], 2, 1, 16, 128)
    return [
        two_cores(_step_with("trn2", np.float32, 16, None, None, None)),
        two_cores(_step_with("trn2", BF16, 64, None, None, sinks, **alone, capacity=8192)),
        two_cores(_step_with("trn3", np.float32, 256, None, None, None, **alone)),
        two_cores(_step("trn2", [60, 3, 129], 3, 1, 16, 300, np.float32, np.float32)),
        two_cores(_step("trn2", [100], 3, 1, 16, 8192, np.float32, np.float32)),
        # One core writes to a page that the tables of the other name as well.
        by_reference("attention_decode", "trn2", *in_pages(batch([1000], 3, 3, 8, 1024), 16)),
        two_cores(by_reference("attention_decode", "trn2", *in_pages(shared_page, 16, shared=2))),
        two_cores(_block("trn2", [60, 3], 4, 2, 32, 128, np.float32)),
        two_cores(_block("trn2", [60], 2, 1, 8, 128, np.float32)),
        _divided("trn1", test_attention_divided.over(2, (0, 9, 126), 128, new=2)),
        _divided("trn2", test_attention_divided.over(4, (200,), 512, kv_heads=1, block=64, sinks=sinks)),
    ]


def _whole_prompt(
    target: str, tokens: int, heads: int, kv: int, depth: int, positions: int, dtype: Any, cache: Any
) -> Case:
    """Return a prompt without cached positions, whose keys and values fill contiguous caches."""
    q, k, v = prompt(tokens, heads, kv, depth, dtype)
    caches = _caches(kv, depth, positions, cache)
    return by_reference("attention_prefill", target, q, *caches, depth**-0.5, k, v)


def _climbing(target: str, tokens: int, first: float, step: float) -> Case:
    """Return a prompt whose scores are large whole numbers, exact in float32 and in no narrower dtype."""
    q, k, v = (
        np.zeros((tokens, 8), np.float32),
        np.zeros((tokens, 8), np.float32),
        prompt(tokens, 1, 1, 8)[2],
    )
    q[:, 0], k[:, 0] = 1, first + step * np.arange(tokens)
    return by_reference("attention_prefill", target, q, *_caches(1, 8, tokens), 1.0, k, v)


def _last_key(tokens: int) -> tuple[Any, ...]:
    """Return the arguments of a prompt with a huge last key, which is hidden from all tokens but the last."""
    q, k, v = prompt(tokens, 1, 1, 8)
    k[-1] *= 3e10
    return q, *_caches(1, 8, tokens), 8**-0.5, k, v


def _continued(
    target: str, dtype: Any, *options: Any, tokens: int = 40, depth: int = 8, pages: int = 26
) -> Case:
    """Return prompts of two sequences after 100 and 128 cached positions; `options` are arguments from `prefix` on.

    The caches are in pages if the options have slots.
    """
    q, k, v = prompt(2 * tokens, 2, 1, depth, dtype)
    positions = np.concatenate([start + np.arange(tokens) for start in (100, 128)]).astype(np.int32)
    caches = normal(8, 2, 1, depth, 200, dtype=dtype), normal(9, 2, 1, 200, depth, dtype=dtype)
    if options[1] is not None:
        caches = (normal(8, pages, 16, 1, depth, dtype=dtype), normal(9, pages, 16, 1, depth, dtype=dtype))
    arguments = q, *caches, depth**-0.5, k, v, None, positions[:, None], *options
    return by_reference("attention_prefill", target, *arguments)


def _padded(target: str, tokens: int, valid: int, dtype: Any) -> Case:
    """Return a prompt whose tokens from `valid` on are NaN or infinite and must not change earlier outputs."""
    q, k, v = prompt(tokens, 1, 1, 8, dtype)
    cache_arguments = *_caches(1, 8, tokens, dtype), 0.3
    clean = q, *cache_arguments, k, v
    padded = tuple(array.copy() for array in (q, k, v))
    for array, padding in zip(padded, (np.nan, -np.inf, np.inf)):
        array[valid:], array[-1] = padding, np.nan
    plain = nki_kernels.attention_prefill_reference(*copied(clean))[0][:valid]
    exact = nki_kernels.attention_prefill_reference(*map(in_float64, clean))[0][:valid]

    def judge(outputs: Outputs) -> None:
        compare(outputs[0][0][:valid], exact, plain)

    return Case("attention_prefill", target, ((padded[0], *cache_arguments, *padded[1:]),), judge)


def _pages(tokens: int, pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Return slots [2 * tokens, 1] and block tables [2, pages / 2] of new tokens of two sequences.

    Pages have 16 positions and are scattered; the sequences' new tokens start at positions 100 and 128.
    """
    tables = np.random.default_rng(3).permutation(pages).reshape(2, -1).astype(np.int32)
    row_positions = np.concatenate([start + np.arange(tokens) for start in (100, 128)])
    slots = tables[np.arange(2).repeat(tokens), row_positions // 16] * 16 + row_positions % 16
    return slots[:, None].astype(np.int32), tables


def _prefill() -> list[Case]:
    sinks = normal(6, 1, 2)
    long_cache = normal(8, 2, 1, 128, 6300), normal(9, 2, 1, 6300, 128)
    far = np.int32([[6200], [6100]])
    slopes = np.float32([[0.5, 0.07]])
    ahead = np.int32([[60], [61]])
    q, k, v = prompt(1100, 1, 1, 8)
    growing = np.linspace(0, 300, 1100, dtype=np.float32)[:, None]
    score_arguments = np.abs(q), *_caches(1, 8, 1100), 8**-0.5
    wide = prompt(1280, 1, 1, 8, BF16)
    two, sloped, behind = prompt(2, 2, 1, 8), prompt(300, 2, 1, 8), prompt(2, 1, 1, 128)
    return [
        by_reference("attention_prefill", "trn2", *_last_key(20)),
        _climbing("trn2", 20, 100_003.0, 1.0),
        _climbing("trn1", 20, 2.0**34, 2.0**20),
        _whole_prompt("trn1", 128, 2, 1, 8, 128, np.float32, np.float32),
        _whole_prompt("trn1", 512, 1, 1, 8, 512, np.float32, np.float32),
        _whole_prompt("trn2", 513, 1, 1, 8, 513, np.float32, np.float32),
        _whole_prompt("trn2", 129, 4, 2, 16, 130, np.float32, np.float32),
        _whole_prompt("trn1", 20, 2, 2, 48, 24, BF16, BF16),
        _whole_prompt("trn2", 20, 3, 3, 8, 24, np.float32, np.float32),
        _whole_prompt("trn3", 600, 2, 1, 8, 768, np.float32, BF16),
        by_reference("attention_prefill", "trn2", *score_arguments, np.abs(k) * growing, v),
        by_reference("attention_prefill", "trn1", *score_arguments, np.abs(k) * growing[::-1], v),
        _whole_prompt("trn2", 1300, 1, 1, 8, 1300, BF16, BF16),
        by_reference(
            "attention_prefill",
            "trn2",
            wide[0],
            *_caches(1, 8, 1280, BF16),
            0.3,
            *wide[1:],
            *(None, None, 0, None, None, 1024),
        ),
        _whole_prompt("trn1", 20, 2, 1, 130, 24, BF16, BF16),
        _whole_prompt("trn2", 20, 2, 1, 131, 24, np.float32, np.float32),
        _whole_prompt("trn3", 130, 1, 1, 512, 130, BF16, BF16),
        _padded("trn2", 300, 200, np.float32),
        _padded("trn1", 300, 280, BF16),
        two_cores(_whole_prompt("trn2", 20, 4, 2, 8, 24, np.float32, np.float32)),
        two_cores(_whole_prompt("trn2", 300, 2, 1, 8, 300, np.float32, np.float32)),
        two_cores(_whole_prompt("trn3", 300, 1, 1, 8, 300, np.float32, np.float32)),
        two_cores(_whole_prompt("trn2", 20, 1, 1, 8, 24, BF16, BF16)),
        two_cores(_continued("trn2", BF16, 128, *_pages(40, 26))),
        two_cores(
            by_reference(
                "attention_prefill",
                "trn2",
                two[0],
                *_caches(1, 8, 130),
                *(0.4, *two[1:], None, ahead, 64),
            )
        ),
        _continued("trn2", np.float32, 128, None, None, None, None, None, True, slopes),
        _continued("trn1", BF16, 128, *_pages(40, 26), 60, None, None, True, slopes),
        by_reference(
            "attention_prefill",
            "trn3",
            sloped[0],
            *_caches(1, 8, 300),
            *(0.3, *sloped[1:], None, None, 0, None, None, None, None, None, True, slopes),
        ),
        _continued("trn2", np.float32, 128, None, None, 60),
        by_reference("attention_prefill", "trn2", *test_shared_caches.draw_speech(300)),
        _shared(_continued("trn2", np.float32, 128, None, None, 60)),
        _shared(_continued("trn1", BF16, 128, *_pages(200, 42), tokens=200, pages=42)),
        _shared(two_cores(_whole_prompt("trn3", 300, 2, 1, 130, 300, BF16, np.float32))),
        _continued("trn2", np.float32, 130, None, None, None, 5.0, sinks),
        _continued("trn1", BF16, 128, *_pages(40, 26)),
        _continued("trn2", np.float32, 128, *_pages(200, 42), tokens=200, pages=42),
        _continued("trn2", np.float32, 128, None, None, None, None, None, False),
        by_reference("attention_prefill", "trn2", behind[0], *long_cache, 0.1, *behind[1:], None, far, 6200),
    ]


def _mixed() -> list[Case]:
    """Return cases of decoding sequences beside prompts, with and without arguments of only one phase."""
    window = {"window": 60, "sinks": normal(6, 1, 4)}
    cases = [
        by_reference("attention_mixed", "trn2", *mixed()),
        by_reference("attention_mixed", "trn1", *mixed(new=2, dtype=BF16, **window)),
        by_reference("attention_mixed", "trn3", *mixed(window=100)),
        by_reference("attention_mixed", "trn2", *stored(mixed((9,)))),
    ]
    return [*cases, two_cores(cases[0])]


def _scaled_caches() -> list[Case]:
    """Return cases of caches with scales, of int8 and float8_e4m3."""
    return [
        by_case(TestDecode.case, "trn1", dict(half=8) | BOTH[0]),
        by_case(TestDecode.case, "trn2", IN_PAGES | dict(new=2) | BOTH[1]),
        by_case(TestBlockDecode.case, "trn2", dict(new=3, block=16) | BOTH[0]),
        by_case(TestPrefill.case, "trn3", dict(tokens=400, heads=2) | BOTH[1]),
        by_case(TestPrefillAfterCachedPositions.case, "trn2", dict(page=16, garbage=0.0) | BOTH[0]),
        _divided("trn2", TestDecode.case.ranks[0], TestDecode.case),
    ]


def attention() -> list[Case]:
    """Return a step and a prompt, contiguous and in pages, with every option, and both in one launch."""
    return [*_decode(), *_decode_divided(), *_prefill(), *_mixed(), *_scaled_caches()]
