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
    q, cache = case.q, case.cache
    expect_dims(2, q, "q [T, Hq * D]")
    rows = new_rows(case)
    cache.check_prompts(rows)
    sequences, kv_heads, depth = case.sequences, case.kv_heads, case.depth
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"{num_kv_heads} key/value heads, caches for {kv_heads}"
    )
    for size in (depth, case.value_depth):
        assert size <= MAX_DEPTH, f"attention_prefill takes heads of at most {MAX_DEPTH} elements, not {size}"
    assert q.shape[0] % sequences == 0, f"{q.shape[0]} tokens do not divide into {sequences} sequences"
    width = kv_heads * depth
    if not case.stored:
        check_new(case, kv_heads, depth, case.value_depth)
    assert rows % sequences == 0, f"{rows} keys do not divide into {sequences} sequences"
    assert q.shape[1] % width == 0, (
        f"q has rows of {q.shape[1]}, no multiple of {width}, {kv_heads} heads of {depth}"
    )
    assert q.dtype == nl.float32 or q.dtype == nl.bfloat16, (
        f"attention_prefill takes float32 or bfloat16, not {q.dtype}"
    )
    check_lengths(case, rows // sequences, cache.capacity, most_tokens)
    check_options(case)


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
    depth, value_depth = case.depth, case.value_depth
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
    heads = case.q.shape[1] // case.depth
    assert case.sinks is None or case.sinks.shape == (1, heads), (
        f"sinks is [1, {heads}], not {case.sinks.shape}"
    )
    if case.slopes is not None:
        assert case.slopes.shape == (1, heads), f"slopes is [1, {heads}], not {case.slopes.shape}"
        assert case.causal, "slopes need causal attention, where no key lies behind its query"
        assert case.softcap is None and case.sinks is None, "slopes go with neither a soft cap nor sinks"
