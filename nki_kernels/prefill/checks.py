"""Checks of the arguments and sizes of attention_prefill; each raises AssertionError with the value and the limit.

`attention_prefill` and `attention_mixed` call `check_prefill` before they issue anything, and `attention_prefill` calls
`check_room` once it knows what each core takes.
"""

from __future__ import annotations

import nki.language as nl

from nki_kernels.prefill.load_ahead import LEAST_QUERIES, count_query_bytes
from nki_kernels.tiles import PARTITIONS, blocks, expect_dims

MAX_TOKENS = 8192
MAX_KEYS = 12288
MAX_HEAD_BYTES = 65792
"""Keys and values of one head, in bytes per partition, that fit into the smallest SBUF beside all else."""
MAX_DEPTH = 512
MAX_BIASED_TOKENS = 2048
MAX_BOUNDED_SCORE = 64
"""Largest magnitude of bounded scores: sums of 12288 times exp of it are 8e31, and exp of its negative 2e-28."""


def check_prefill(tokens, cache, step, num_kv_heads, text=(None, None, None)):
    """Raise AssertionError if q, k, v, a cache and a step do not fit together or exceed the limits.

    Args:
        tokens: (q, k, v) @ HBM; k and v may both be None.
        step: a `PromptStep`.
        num_kv_heads: the number of key/value heads that the caches must have, or None.
        text: (q, k, v) @ HBM of the second stream of joint attention, or three times None.
    """
    q, k, _ = tokens
    rows = count_new_rows(tokens)
    cache.check_prompts(rows)
    sequences, kv_heads, depth = cache.sequences, cache.kv_heads, cache.depth
    assert num_kv_heads is None or num_kv_heads == kv_heads, (
        f"num_kv_heads is {num_kv_heads}, but the caches have {kv_heads} heads; pass {kv_heads} or None"
    )
    for size in (depth, cache.value_depth):
        assert size <= MAX_DEPTH, (
            f"attention_prefill takes heads of at most {MAX_DEPTH} elements, not {size}; use smaller heads"
        )
    assert q.shape[0] % sequences == 0, (
        f"{q.shape[0]} tokens do not divide into {sequences} sequences; pass equally many for each, padded if need be"
    )
    width = kv_heads * depth
    if k is not None:
        check_new(tokens, cache, step.causal)
    assert rows % sequences == 0, (
        f"{rows} rows of k do not divide into {sequences} sequences; pass equally many for each"
    )
    assert q.shape[1] % width == 0, (
        f"q has {q.shape[1]} columns; the caches have {kv_heads} heads of {depth}, so pass a multiple of {width}"
    )
    assert q.dtype == nl.float32 or q.dtype == nl.bfloat16, (
        f"attention_prefill takes float32 or bfloat16, not {q.dtype}; cast q, k and v"
    )
    assert cache.newest_positions == 0 or (
        k is not None and step.causal and step.window is None and step.slopes is None
    ), "pages of 4 bits take k and v, causal attention, no window and no slopes; leave these out"
    streams = [rows // sequences]
    if check_text(tokens, text, cache, step):
        streams.append(text[1].shape[0] // sequences)
    check_lengths(streams, q.dtype, cache, step)
    check_key_lengths(tokens, cache, step)
    check_position_bias(tokens, cache, step)
    check_options(step, q.shape[1] // depth)
    assert not step.bounded or (cache.k_cache is None and not step.causal and step.sinks is None), (
        "bounded scores go without caches, causal attention and sinks; leave these out, or set bounded to False"
    )
    assert not step.bounded or (step.softcap is None and step.position_bias is None), (
        "bounded scores go without a soft cap and position_bias; leave these out, or set bounded to False"
    )


def count_new_rows(tokens):
    """Return the number of rows of k, or of q if k and v are None.

    Raises: AssertionError if only one of k and v is None, or k does not have two dims.
    """
    q, k, v = tokens
    assert (k is None) == (v is None), (
        "k and v come together: pass both, or None for both if the caches hold the new keys and values already"
    )
    if k is None:
        return q.shape[0]
    expect_dims(2, k, "k [T, Hk * D]")
    return k.shape[0]


def check_new(tokens, cache, causal):
    """Raise AssertionError if k and v do not have the widths of the caches' heads, as many rows each, and q's dtype.

    k may have another number of rows than q only if not `causal`.
    """
    q, k, v = tokens
    kv_heads, depth = cache.kv_heads, cache.depth
    assert k.shape[1] == kv_heads * depth and (k.shape[0] == q.shape[0] or not causal), (
        f"k is [{q.shape[0]}, {kv_heads * depth}] for {kv_heads} heads of {depth}, not {k.shape}"
    )
    v_shape = (k.shape[0], kv_heads * cache.value_depth)
    assert v.shape == v_shape, f"v is {list(v_shape)} beside k {k.shape}, not {v.shape}"
    assert q.dtype == k.dtype and q.dtype == v.dtype, (
        f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one dtype"
    )


def check_room(launch):
    """Raise AssertionError if LEAST_QUERIES tiles of queries do not fit into SBUF with a head's keys and values.

    A tile of queries has up to 128 queries of all query heads that share a key/value head. The message names the most
    such heads that fit.
    """
    prompts = launch.prompts
    group = prompts.share.group
    most = launch.ahead.query_room // (LEAST_QUERIES * count_query_bytes(prompts) // group)
    assert group <= most, (
        f"attention_prefill takes at most {most} query heads of a key/value head for {prompts.keys} keys of "
        f"{prompts.depth} elements in {prompts.dtype}, not {group}; shorten the prompt or its prefix, or divide the "
        "query heads among more ranks"
    )


def check_text(tokens, text, cache, step):
    """Return whether there is a second stream; raise AssertionError if it does not go with the rest.

    Args:
        tokens: (q, k, v) @ HBM of the first stream.
        text: (q, k, v) @ HBM of the second stream, or three times None.
    """
    if text[0] is None and text[1] is None and text[2] is None:
        return False
    assert text[0] is not None and text[1] is not None and text[2] is not None, (
        "text_q, text_k and text_v come together: pass all three, or none"
    )
    alone = cache.k_cache is None and not step.causal and step.key_lengths is None
    assert alone and step.position_bias is None, (
        "text_q, text_k and text_v go without caches, causal attention, key_lengths and position_bias; leave these out"
    )
    expect_dims(2, text[0], "text_q [T, Hq * D]")
    expect_dims(2, text[1], "text_k [T, Hk * D]")
    assert text[0].shape[1] == tokens[0].shape[1] and text[0].dtype == tokens[0].dtype, (
        f"text_q has {text[0].shape[1]} columns of {text[0].dtype}, not {tokens[0].shape[1]} of {tokens[0].dtype} as q"
    )
    check_new(text, cache, False)
    for rows in (text[0].shape[0], text[1].shape[0]):
        assert rows % cache.sequences == 0, (
            f"{rows} rows of text do not divide into {cache.sequences} sequences; pass equally many for each"
        )
    return True


def check_lengths(streams, dtype, cache, step):
    """Raise AssertionError if a prompt and its prefix have more keys than the caches, the kernel or SBUF hold.

    Args:
        streams: number of new keys of each sequence in each stream.
        dtype: q's dtype, in which keys and values lie in SBUF.
        step: a `PromptStep`; a prefix above 0 needs its positions.
    """
    tokens = streams[0]
    assert tokens <= cache.capacity, (
        f"a prompt of {tokens} tokens does not fit into caches of {cache.capacity} positions; shorten it, or allocate "
        "longer caches"
    )
    assert step.prefix == 0 or step.positions is not None, (
        f"prefix is {step.prefix} without positions; pass positions [T, 1], whose first one in each sequence is "
        "the number of valid cached positions"
    )
    assert step.prefix <= cache.capacity, (
        f"a prefix of {step.prefix} positions does not fit into caches of {cache.capacity}; lower prefix"
    )
    for count in streams:
        assert count <= MAX_TOKENS, (
            f"attention_prefill takes at most {MAX_TOKENS} tokens, not {count}; divide the prompt into chunks, "
            "with a prefix"
        )
    # Pages of 4 bits have new keys twice: as they are, and as later pages read them.
    keys = step.prefix + tokens * (2 if cache.newest_positions > 0 else 1)
    if len(streams) > 1:
        keys = blocks(tokens) * PARTITIONS + streams[1]
    size = 2 if dtype == nl.bfloat16 else 4
    block_bytes = (blocks(cache.depth) * PARTITIONS + cache.value_depth + 1) * size
    most = min(MAX_KEYS, MAX_HEAD_BYTES // block_bytes * PARTITIONS)
    assert keys <= most, (
        f"attention_prefill takes at most {most} keys for heads of {cache.depth} in {dtype}, not {keys}; shorten the "
        "prompt or its prefix"
    )


def check_key_lengths(tokens, cache, step):
    """Raise AssertionError if a step has key lengths that are not [sequences, 1] int32 or do not go with the rest.

    Args:
        tokens: (q, k, v) @ HBM.
    """
    lengths = step.key_lengths
    if lengths is None:
        return
    assert lengths.shape == (cache.sequences, 1) and lengths.dtype == nl.int32, (
        f"key_lengths is [{cache.sequences}, 1] int32, not {lengths.shape} {lengths.dtype}"
    )
    assert tokens[1] is not None and not step.causal and step.prefix == 0, (
        "key_lengths go with k and v, without causal attention and prefix; set causal to False, or pass no key_lengths"
    )


def check_position_bias(tokens, cache, step):
    """Raise AssertionError if a step has a position bias of another shape, or one that does not go with the rest.

    Args:
        tokens: (q, k, v) @ HBM.
    """
    bias = step.position_bias
    if bias is None:
        return
    q, k, _ = tokens
    assert k is not None and k.shape[0] == q.shape[0] and not step.causal and step.prefix == 0, (
        "position_bias goes with k and v of as many rows as q, without causal attention and prefix; pass none, or set "
        "causal to False"
    )
    assert q.shape[1] == cache.kv_heads * cache.depth, (
        f"position_bias goes with one query head for each key/value head, not {q.shape[1] // cache.depth} for "
        f"{cache.kv_heads}; repeat k and v, or pass no position_bias"
    )
    assert step.softcap is None, "position_bias goes with no soft cap; pass one of them"
    count = q.shape[0] // cache.sequences
    assert bias.shape == (cache.kv_heads, 2 * count - 1), (
        f"position_bias is [{cache.kv_heads}, {2 * count - 1}], not {bias.shape}"
    )
    assert bias.dtype == nl.float32 or bias.dtype == nl.bfloat16, (
        f"position_bias is float32 or bfloat16, not {bias.dtype}; cast it"
    )
    assert count <= MAX_BIASED_TOKENS, (
        f"attention_prefill takes position_bias for at most {MAX_BIASED_TOKENS} tokens of a sequence, not {count}"
    )


def check_options(step, heads):
    """Raise AssertionError if scale, window, softcap, sinks or slopes of a step are invalid or exclude one another.

    `heads` is the number of query heads: sinks and slopes are [1, heads].
    """
    assert step.scale > 0, f"scale is {step.scale}; the running maximum of scores needs a positive scale"
    assert step.window is None or (step.causal and step.window > 0), (
        f"a window of {step.window} tokens needs causal attention and at least 1"
    )
    assert step.softcap is None or step.softcap > 0, (
        f"softcap is {step.softcap}; pass a number above 0, or None for no cap"
    )
    assert step.sinks is None or step.sinks.shape == (1, heads), (
        f"sinks is [1, {heads}], not {step.sinks.shape}"
    )
    if step.slopes is not None:
        assert step.slopes.shape == (1, heads), f"slopes is [1, {heads}], not {step.slopes.shape}"
        assert step.causal, "slopes need causal attention; set causal, or pass no slopes"
        assert step.softcap is None and step.sinks is None, (
            "slopes go with neither a soft cap nor sinks; pass only slopes, or none"
        )
