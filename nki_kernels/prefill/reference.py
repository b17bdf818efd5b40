"""Numpy references of attention over the rows of one sequence, from which that of attention_prefill is made."""

from __future__ import annotations

import numpy as np

from nki_kernels.cache.nibble_pages import round_reference
from nki_kernels.precision import widened

ScoreOptions = tuple[
    float, int | None, float | None, np.ndarray | None, bool, np.ndarray | None, np.ndarray | None
]
"""Arguments of attention_prefill that change scores: scale, window, softcap, sinks, causal, slopes, position_bias."""


def attend_sequence_reference(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, options: ScoreOptions, first: int = 0
) -> np.ndarray:
    """Return the attention of one sequence's queries to its keys, [queries, Hq * Dv], in float32 or float64.

    Args:
        queries: [queries, Hk, Hq / Hk, D].
        keys: [keys, Hk, D].
        values: [keys, Hk, Dv].
        options: changes of the scores.
        first: position of the first query; that of the first key is 0.
    """
    queries, keys, values = widened(queries), widened(keys), widened(values)
    scale, window, softcap, sinks, causal, slopes, position_bias = options
    heads = keys.shape[1]
    keys, values = keys.transpose(1, 2, 0)[:, None], values.transpose(1, 0, 2)[:, None]
    scores = queries.transpose(1, 2, 0, 3) @ keys * queries.dtype.type(scale)
    if softcap is not None:
        cap = queries.dtype.type(softcap)
        scores = np.tanh(scores / cap) * cap
    distance = first + np.arange(len(queries))[:, None] - np.arange(keys.shape[-1])
    if slopes is not None:
        scores = scores - widened(slopes).reshape(heads, -1, 1, 1) * distance.astype(scores.dtype)
    if position_bias is not None:
        columns = len(queries) - 1 - distance
        scores = scores + widened(position_bias)[:, columns][:, None]
    hidden = distance < (0 if causal else -keys.shape[-1])
    if window is not None:
        hidden |= distance >= window
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:
        logits = np.broadcast_to(widened(sinks).reshape(heads, -1, 1, 1), (*scores.shape[:3], 1))
        scores = np.concatenate([scores, logits], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    o = weights[..., : keys.shape[-1]] @ values
    return np.asarray(o.transpose(2, 0, 1, 3).reshape(len(queries), -1))


def attend_new_reference(
    tokens: tuple[np.ndarray, np.ndarray, np.ndarray],
    heads: int,
    sequences: int,
    options: ScoreOptions,
    key_lengths: np.ndarray | None,
) -> np.ndarray:
    """Return o of a launch without caches, in q's dtype.

    Args:
        tokens: q, k and v of all sequences.
        heads: number of key/value heads.
        sequences: number of sequences.
        options: changes of the scores.
        key_lengths: as of the kernel.
    """
    q, k, v = tokens
    depth = k.shape[1] // heads
    results = []
    for b in range(sequences):
        queries, keys, values = (np.split(rows, sequences)[b] for rows in (q, k, v))
        queries = queries.reshape(len(queries), heads, -1, depth)
        seen = None if key_lengths is None else int(key_lengths[b, 0])
        keys, values = (rows[:seen].reshape(len(rows[:seen]), heads, -1) for rows in (keys, values))
        results.append(attend_sequence_reference(queries, keys, values, options))
    return np.concatenate(results).astype(q.dtype)


def attend_jointly_reference(
    tokens: tuple[np.ndarray, np.ndarray, np.ndarray],
    text: tuple[np.ndarray, np.ndarray, np.ndarray],
    heads: int,
    sequences: int,
    options: ScoreOptions,
) -> tuple[np.ndarray, ...]:
    """Return o of both streams of joint attention, as attention over their rows laid end to end in each sequence."""
    joint = []
    for first_rows, text_rows in zip(tokens, text):
        pairs = zip(np.split(first_rows, sequences), np.split(text_rows, sequences))
        joint.append(np.concatenate([np.concatenate(pair) for pair in pairs]))
    o = attend_new_reference((joint[0], joint[1], joint[2]), heads, sequences, options, None)
    count = len(tokens[0]) // sequences
    by_sequence = np.split(o, sequences)
    return tuple(
        np.concatenate([rows[stream] for rows in by_sequence])
        for stream in (slice(count), slice(count, None))
    )


def hide_rows_reference(rows: tuple[np.ndarray, np.ndarray], key_lengths: np.ndarray) -> list[np.ndarray]:
    """Return k and v as a cache gets them: behind a sequence's key length, copies of its first key and zeros."""
    keys, values = (np.array(np.split(array, len(key_lengths))) for array in rows)
    for b, length in enumerate(key_lengths[:, 0]):
        keys[b, length:], values[b, length:] = keys[b, 0], 0
    return [array.reshape(-1, array.shape[-1]) for array in (keys, values)]


def attend_pages_reference(
    tokens: tuple[np.ndarray, np.ndarray, np.ndarray],
    pages: tuple[np.ndarray, np.ndarray],
    block_tables: np.ndarray,
    positions: np.ndarray | None,
    options: ScoreOptions,
) -> np.ndarray:
    """Return o of prompts with pages of 4 bits, in q's dtype: a page attends to itself and to earlier pages, rounded.

    Args:
        tokens: q, k and v.
        pages: widened keys and values, [P, page, Hk, D] each.
        block_tables: pages of each sequence.
        positions: of the tokens, or None if no position is cached.
        options: changes of the scores.
    """
    sequences, (_, page, heads, depth) = len(block_tables), pages[0].shape
    results = []
    for b in range(sequences):
        q, k, v = (np.split(rows, sequences)[b] for rows in tokens)
        valid = 0 if positions is None else int(np.split(positions, sequences)[b][0, 0])
        old = [cache[block_tables[b]].reshape(-1, heads, depth)[:valid] for cache in pages]
        for start in range(0, len(q), page):
            new = slice(start, start + page)
            rows = [array[new].reshape(-1, heads, depth) for array in (k, v)]
            keys, values = (np.concatenate(pair) for pair in zip(old, rows))
            queries = q[new].reshape(len(rows[0]), heads, -1, depth)
            results.append(attend_sequence_reference(queries, keys, values, options, valid + start))
            old = [
                np.concatenate([earlier, array.astype(q.dtype)])
                for earlier, array in zip(old, round_reference(*rows))
            ]
    return np.concatenate(results).astype(tokens[0].dtype)
