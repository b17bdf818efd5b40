"""What attention_prefill refuses: arguments that do not fit together, and sizes beyond the chip's."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.prefill.load_ahead import LEAST_QUERIES, bytes_of_queries
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims

MAX_KEYS = 12288
MAX_HEAD_BYTES = 65792
"""Keys and values of one head, in bytes per partition, that fit into the smallest SBUF beside all else."""
MAX_DEPTH = 512


def check_prefill(prompts, num_kv_heads, most_tokens):
    """Refuse what this kernel does not compute."""
    q, cache = prompts.q, prompts.cache
    expect_dims(2, q, "q [T, Hq * D]")
    rows = new_rows(prompts)
    cache.check_prompts(rows)
    sequences, kv_heads, depth = prompts.sequences, prompts.kv_heads, prompts.depth
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"{num_kv_heads} key/value heads, caches for {kv_heads}"
    )
    for size in (depth, prompts.value_depth):
        assert size <= MAX_DEPTH, f"attention_prefill takes heads of at most {MAX_DEPTH} elements, not {size}"
    assert q.shape[0] % sequences == 0, f"{q.shape[0]} tokens do not divide into {sequences} sequences"
    width = kv_heads * depth
    if not prompts.stored:
        check_new(prompts, kv_heads, depth, prompts.value_depth)
    assert rows % sequences == 0, f"{rows} keys do not divide into {sequences} sequences"
    assert q.shape[1] % width == 0, (
        f"q has rows of {q.shape[1]}, no multiple of {width}, {kv_heads} heads of {depth}"
    )
    assert q.dtype == nl.float32 or q.dtype == nl.bfloat16, (
        f"attention_prefill takes float32 or bfloat16, not {q.dtype}"
    )
    check_lengths(prompts, rows // sequences, cache.capacity, most_tokens)
    check_options(prompts)


def new_rows(prompts):
    """How many new keys there are; keys without values are refused."""
    assert (prompts.k is None) == (prompts.v is None), "k and v come together"
    if prompts.stored:
        return prompts.q.shape[0]
    expect_dims(2, prompts.k, "k [T, Hk * D]")
    return prompts.k.shape[0]


def check_new(prompts, kv_heads, depth, value_depth):
    """Refuse new keys and values that do not fit the queries or the heads of the caches."""
    q, k, v = prompts.q, prompts.k, prompts.v
    assert k.shape[1] == kv_heads * depth and (k.shape[0] == q.shape[0] or not prompts.step.causal), (
        f"k is [{q.shape[0]}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    v_shape = (k.shape[0], kv_heads * value_depth)
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


def check_lengths(prompts, tokens, capacity, most_tokens):
    """Refuse more keys than the caches or SBUF hold."""
    assert tokens <= capacity, f"a prompt of {tokens} tokens does not fit into caches of {capacity} positions"
    assert prompts.cached == 0 or prompts.positions is not None, (
        "a prefix takes positions, whose first ones tell its length"
    )
    assert prompts.cached <= capacity, f"a prefix of {prompts.cached} positions, caches of {capacity}"
    assert tokens <= most_tokens, f"attention_prefill takes at most {most_tokens} tokens, not {tokens}"
    keys = prompts.cached + tokens
    depth, value_depth = prompts.depth, prompts.value_depth
    size = 2 if prompts.q.dtype == nl.bfloat16 else 4
    block_bytes = (blocks(depth) * PARTITIONS + value_depth + 1) * size
    most = min(MAX_KEYS, MAX_HEAD_BYTES // block_bytes * PARTITIONS)
    assert keys <= most, (
        f"attention_prefill takes at most {most} keys for heads of {depth} in {prompts.q.dtype}, not {keys}"
    )


def check_options(prompts):
    """Refuse a scale, a window, a cap, sinks or slopes that mean nothing."""
    step = prompts.step
    assert step.scale > 0, f"scale is {step.scale}; the running maximum needs a positive one"
    assert step.window is None or (step.causal and step.window > 0), (
        f"a window of {step.window} tokens needs causal attention and at least 1"
    )
    assert step.softcap is None or step.softcap > 0, f"softcap is {step.softcap}, not above 0"
    heads = prompts.q.shape[1] // prompts.depth
    assert step.sinks is None or step.sinks.shape == (1, heads), (
        f"sinks is [1, {heads}], not {step.sinks.shape}"
    )
    if step.slopes is not None:
        assert step.slopes.shape == (1, heads), f"slopes is [1, {heads}], not {step.slopes.shape}"
        assert step.causal, "slopes need causal attention, where no key lies behind its query"
        assert step.softcap is None and step.sinks is None, "slopes go with neither a soft cap nor sinks"
