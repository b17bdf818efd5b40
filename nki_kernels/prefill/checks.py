"""What attention_prefill refuses: arguments that do not fit together, and sizes beyond the chip's."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.prefill.room import LEAST_QUERIES, query_bytes
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims

MAX_KEYS = 12288
MAX_HEAD_BYTES = 65792
"""Keys and values of one head, in bytes per partition, that fit into the smallest SBUF beside all else."""
MAX_DEPTH = 512


def check_prefill(case, num_kv_heads, most_tokens):
    """Refuse what this kernel does not compute."""
    q, k_cache, v_cache = case.q, case.k_cache, case.v_cache
    expect_dims(2, q, "q [T, Hq * D]")
    rows = new_rows(case)
    paged = case.slots is not None
    assert paged == (case.block_tables is not None), "a paged cache takes both slots and block_tables"
    expect_dims(4, k_cache, "k_cache [P, page, Hk, D]" if paged else "k_cache [B, Hk, D, S]")
    if paged:
        sequences = case.block_tables.shape[0]
        page, kv_heads, depth = k_cache.shape[1:]
        capacity = case.block_tables.shape[1] * page
        v_shape = k_cache.shape
        assert PARTITIONS % page == 0, f"a page has 1, 2, 4 … {PARTITIONS} positions, not {page}"
        assert case.slots.shape == (rows, 1), f"slots is [{rows}, 1], not {case.slots.shape}"
    else:
        sequences, kv_heads, depth, capacity = k_cache.shape
        expect_dims(4, v_cache, "v_cache [B, Hk, S, Dv]")
        v_shape = (sequences, kv_heads, capacity, v_cache.shape[3])
    if case.cache_rows is not None:
        check_rows(case, paged)
        sequences = case.cache_rows.shape[0]
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"{num_kv_heads} key/value heads, caches for {kv_heads}"
    )
    assert v_cache.shape == v_shape, (
        f"v_cache is {list(v_shape)} beside k_cache {k_cache.shape}, not {v_cache.shape}"
    )
    for size in (depth, v_cache.shape[3]):
        assert size <= MAX_DEPTH, f"attention_prefill takes heads of at most {MAX_DEPTH} elements, not {size}"
    assert q.shape[0] % sequences == 0, f"{q.shape[0]} tokens do not divide into {sequences} sequences"
    width = kv_heads * depth
    if not case.stored:
        check_new(case, kv_heads, depth, v_cache.shape[3])
    assert rows % sequences == 0, f"{rows} keys do not divide into {sequences} sequences"
    assert q.shape[1] % width == 0, (
        f"q has rows of {q.shape[1]}, no multiple of {width}, {kv_heads} heads of {depth}"
    )
    assert q.dtype == nl.float32 or q.dtype == nl.bfloat16, (
        f"attention_prefill takes float32 or bfloat16, not {q.dtype}"
    )
    check_lengths(case, rows // sequences, capacity, most_tokens)
    check_options(case)


def check_rows(case, paged):
    """Refuse rows of caches without new keys or with a prefix or pages, and of another shape than [B, 1]."""
    expect_dims(2, case.cache_rows, "cache_rows [B, 1]")
    assert case.cache_rows.shape[1] == 1, f"cache_rows are [B, 1], not {case.cache_rows.shape}"
    assert not paged, "cache_rows name rows of contiguous caches; pages come with block_tables alone"
    assert not case.stored and case.cached == 0, "cache_rows come with k and v, and without a prefix"


def output_width(q, k_cache, v_cache, paged):
    """Columns of the output: as many heads as q has, of the size of values."""
    expect_dims(2, q, "q [T, Hq * D]")
    expect_dims(4, k_cache, "k_cache [P, page, Hk, D]" if paged else "k_cache [B, Hk, D, S]")
    expect_dims(4, v_cache, "v_cache [P, page, Hk, D]" if paged else "v_cache [B, Hk, S, Dv]")
    return q.shape[1] // k_cache.shape[3 if paged else 2] * v_cache.shape[3]


def new_rows(case):
    """How many new keys there are; keys without values are refused."""
    assert (case.k is None) == (case.v is None), "k and v come together"
    if case.stored:
        return case.q.shape[0]
    expect_dims(2, case.k, "k [T, Hk * D]")
    return case.k.shape[0]


def check_new(case, kv_heads, depth, value_depth):
    """Refuse new keys and values that do not fit the queries or the heads of the caches."""
    q, k, v = case.q, case.k, case.v
    assert k.shape[1] == kv_heads * depth and (k.shape[0] == q.shape[0] or not case.causal), (
        f"k is [{q.shape[0]}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    v_shape = (k.shape[0], kv_heads * value_depth)
    assert v.shape == v_shape, f"v is {list(v_shape)} beside k {k.shape}, not {v.shape}"
    assert q.dtype == k.dtype and q.dtype == v.dtype, f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"


def check_room(case):
    """Refuse more query heads of a key/value head than fit into SBUF beside its keys and values."""
    each = LEAST_QUERIES * query_bytes(case) // case.group
    most = case.query_room // each
    assert case.group <= most, (
        f"attention_prefill takes at most {most} query heads of a key/value head for {case.keys} keys of "
        f"{case.depth} elements in {case.dtype}, not {case.group}"
    )


def check_lengths(case, tokens, capacity, most_tokens):
    """Refuse more keys than the caches or SBUF hold."""
    assert tokens <= capacity, f"a prompt of {tokens} tokens does not fit into caches of {capacity} positions"
    assert case.cached == 0 or case.positions is not None, (
        "a prefix takes positions, whose first ones tell its length"
    )
    assert case.cached <= capacity, f"a prefix of {case.cached} positions, caches of {capacity}"
    assert tokens <= most_tokens, f"attention_prefill takes at most {most_tokens} tokens, not {tokens}"
    keys = case.cached + tokens
    depth, value_depth = case.k_cache.shape[3 if case.slots is not None else 2], case.v_cache.shape[3]
    size = 2 if case.q.dtype == nl.bfloat16 else 4
    block_bytes = (blocks(depth) * PARTITIONS + value_depth + 1) * size
    most = min(MAX_KEYS, MAX_HEAD_BYTES // block_bytes * PARTITIONS)
    assert keys <= most, (
        f"attention_prefill takes at most {most} keys for heads of {depth} in {case.q.dtype}, not {keys}"
    )


def check_options(case):
    """Refuse a scale, a window, a cap, sinks or slopes that mean nothing."""
    assert case.scale > 0, f"scale is {case.scale}; the running maximum needs a positive one"
    assert case.window is None or (case.causal and case.window > 0), (
        f"a window of {case.window} tokens needs causal attention and at least 1"
    )
    assert case.softcap is None or case.softcap > 0, f"softcap is {case.softcap}, not above 0"
    heads = case.q.shape[1] // case.k_cache.shape[3 if case.slots is not None else 2]
    assert case.sinks is None or case.sinks.shape == (1, heads), (
        f"sinks is [1, {heads}], not {case.sinks.shape}"
    )
    if case.slopes is not None:
        assert case.slopes.shape == (1, heads), f"slopes is [1, {heads}], not {case.slopes.shape}"
        assert case.causal, "slopes need causal attention, where no key lies behind its query"
        assert case.softcap is None and case.sinks is None, "slopes go with neither a soft cap nor sinks"
