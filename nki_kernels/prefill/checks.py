"""What attention_prefill refuses: arguments that do not fit together, and sizes beyond the chip's."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.prefill.load_ahead import LEAST_QUERIES, bytes_of_queries
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims

MAX_TOKENS = 8192
MAX_KEYS = 12288
MAX_HEAD_BYTES = 65792
"""Keys and values of one head, in bytes per partition, that fit into the smallest SBUF beside all else."""
MAX_DEPTH = 512


def check_prefill(tokens, cache, step, num_kv_heads):
    """Refuse tokens q, k and v, a cache and a step that this kernel does not compute together."""
    q, k, _ = tokens
    rows = count_new_rows(tokens)
    cache.check_prompts(rows)
    sequences, kv_heads, depth = cache.sequences, cache.kv_heads, cache.depth
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"{num_kv_heads} key/value heads, caches for {kv_heads}"
    )
    for size in (depth, cache.value_depth):
        assert size <= MAX_DEPTH, f"attention_prefill takes heads of at most {MAX_DEPTH} elements, not {size}"
    assert q.shape[0] % sequences == 0, f"{q.shape[0]} tokens do not divide into {sequences} sequences"
    width = kv_heads * depth
    if k is not None:
        check_new(tokens, cache, step.causal)
    assert rows % sequences == 0, f"{rows} keys do not divide into {sequences} sequences"
    assert q.shape[1] % width == 0, (
        f"q has rows of {q.shape[1]}, no multiple of {width}, {kv_heads} heads of {depth}"
    )
    assert q.dtype == nl.float32 or q.dtype == nl.bfloat16, (
        f"attention_prefill takes float32 or bfloat16, not {q.dtype}"
    )
    check_lengths(rows // sequences, q.dtype, cache, step)
    check_options(step, q.shape[1] // depth)


def count_new_rows(tokens):
    """Return the number of new keys; refuse keys without values."""
    q, k, v = tokens
    assert (k is None) == (v is None), "k and v come together"
    if k is None:
        return q.shape[0]
    expect_dims(2, k, "k [T, Hk * D]")
    return k.shape[0]


def check_new(tokens, cache, causal):
    """Refuse new keys and values that do not fit the queries or the heads of the caches."""
    q, k, v = tokens
    kv_heads, depth = cache.kv_heads, cache.depth
    assert k.shape[1] == kv_heads * depth and (k.shape[0] == q.shape[0] or not causal), (
        f"k is [{q.shape[0]}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    v_shape = (k.shape[0], kv_heads * cache.value_depth)
    assert v.shape == v_shape, f"v is {list(v_shape)} beside k {k.shape}, not {v.shape}"
    assert q.dtype == k.dtype and q.dtype == v.dtype, f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"


def check_room(launch):
    """Refuse more query heads of a key/value head than fit into SBUF beside its keys and values."""
    prompts = launch.prompts
    group = prompts.share.group
    most = launch.ahead.query_room // (LEAST_QUERIES * bytes_of_queries(prompts) // group)
    assert group <= most, (
        f"attention_prefill takes at most {most} query heads of a key/value head for {prompts.keys} keys of "
        f"{prompts.depth} elements in {prompts.dtype}, not {group}"
    )


def check_lengths(tokens, dtype, cache, step):
    """Refuse more keys than the caches or SBUF hold: those of a prefix, and so many new tokens of a dtype."""
    assert tokens <= cache.capacity, (
        f"a prompt of {tokens} tokens does not fit into caches of {cache.capacity} positions"
    )
    assert step.prefix == 0 or step.positions is not None, (
        "a prefix takes positions, whose first ones tell its length"
    )
    assert step.prefix <= cache.capacity, f"a prefix of {step.prefix} positions, caches of {cache.capacity}"
    assert tokens <= MAX_TOKENS, f"attention_prefill takes at most {MAX_TOKENS} tokens, not {tokens}"
    keys = step.prefix + tokens
    size = 2 if dtype == nl.bfloat16 else 4
    block_bytes = (blocks(cache.depth) * PARTITIONS + cache.value_depth + 1) * size
    most = min(MAX_KEYS, MAX_HEAD_BYTES // block_bytes * PARTITIONS)
    assert keys <= most, (
        f"attention_prefill takes at most {most} keys for heads of {cache.depth} in {dtype}, not {keys}"
    )


def check_options(step, heads):
    """Refuse a scale, a window, a cap, and sinks or slopes of so many heads, that mean nothing."""
    assert step.scale > 0, f"scale is {step.scale}; the running maximum needs a positive one"
    assert step.window is None or (step.causal and step.window > 0), (
        f"a window of {step.window} tokens needs causal attention and at least 1"
    )
    assert step.softcap is None or step.softcap > 0, f"softcap is {step.softcap}, not above 0"
    assert step.sinks is None or step.sinks.shape == (1, heads), (
        f"sinks is [1, {heads}], not {step.sinks.shape}"
    )
    if step.slopes is not None:
        assert step.slopes.shape == (1, heads), f"slopes is [1, {heads}], not {step.slopes.shape}"
        assert step.causal, "slopes need causal attention, where no key lies behind its query"
        assert step.softcap is None and step.sinks is None, "slopes go with neither a soft cap nor sinks"
