"""Attention in NumPy: the softmax of scores, and the weighted sum of values."""

from __future__ import annotations

import numpy as np

from model.config.mixers import GroupedAttention
from model.layers.arithmetic import Arithmetic, Seen, Span


def mixed_values(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mixer: GroupedAttention,
    span: Span,
    numpy: Arithmetic,
    sinks_of: str | None = None,
) -> np.ndarray:
    """The values, weighed by the softmax of the scores: [tokens, heads * head_dim].

    Arrays are [heads, tokens, head_dim]; `sinks_of` is the tensor of a score of each head that joins the sum.
    """
    group = mixer.heads // mixer.kv_heads
    scores = query @ np.repeat(keys, group, axis=0).swapaxes(1, 2)
    scores *= np.float32(mixer.score_scale)
    if mixer.softcap is not None:
        scores = np.float32(mixer.softcap) * np.tanh(scores / np.float32(mixer.softcap))
    tokens, length = scores.shape[1:]
    before = np.arange(length - tokens, length)[:, None] - np.arange(length)
    hidden = before < (0 if mixer.causal else -length)
    if mixer.window is not None:
        hidden |= before >= mixer.window
    scores[:, hidden] = -np.inf
    sinks = None if sinks_of is None else numpy.tensor(sinks_of)[:, None, None]
    largest = scores.max(axis=-1, keepdims=True)
    largest = largest if sinks is None else np.maximum(largest, sinks)
    scores = np.exp(scores - largest)
    weights = numpy.rounded(scores)
    total = (weights if span.start else scores).sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks - largest)
    numpy.observe(Seen.attention, weights / total)
    mixed = weights @ np.repeat(values, group, axis=0) / total
    return numpy.rounded(mixed).swapaxes(0, 1).reshape(tokens, -1)
