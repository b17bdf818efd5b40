"""Attention in NumPy for the references of layers: the softmax of scores, and the weighted sum of values."""

from __future__ import annotations

import numpy as np

from model.config.mixers import GroupedAttention
from model.layers.arithmetic import Arithmetic, Seen, Span


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mixer: GroupedAttention,
    span: Span,
    numpy: Arithmetic,
    sinks_tensor: str | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Return the sums of values weighted by the softmax of scores, [tokens, heads * head_dim] float32, rounded.

    The attention weights are passed to `numpy.observe`.

    Args:
        query: [heads, tokens, head_dim].
        keys: [key/value heads, positions, head_dim]; the last positions are those of the tokens.
        values: [key/value heads, positions, head_dim].
        mixer: Heads, scale, soft cap, window, and whether attention is causal.
        span: Positions of the tokens. If it starts at 0, exponentials are summed before they are rounded, as in the
            prefill kernels; otherwise after.
        numpy: Rounds results and receives the attention weights.
        sinks_tensor: Checkpoint tensor of a score for each head, whose exponential is added to the sum.
        bias: Numbers that are added to the scaled scores, [heads, tokens, positions].
    """
    group = mixer.heads // mixer.kv_heads
    scores = query @ np.repeat(keys, group, axis=0).swapaxes(1, 2)
    scores *= np.float32(mixer.score_scale)
    if mixer.softcap is not None:
        scores = np.float32(mixer.softcap) * np.tanh(scores / np.float32(mixer.softcap))
    if bias is not None:
        scores += bias
    tokens, length = scores.shape[1:]
    before = np.arange(length - tokens, length)[:, None] - np.arange(length)
    hidden = (before < 0) & mixer.causal
    if mixer.window is not None:
        hidden |= before >= mixer.window
    scores[:, hidden] = -np.inf
    sinks = None if sinks_tensor is None else numpy.load_tensor(sinks_tensor)[:, None, None]
    largest = scores.max(axis=-1, keepdims=True)
    largest = largest if sinks is None else np.maximum(largest, sinks)
    scores = np.exp(scores - largest)
    weights = numpy.round(scores)
    total = (weights if span.start else scores).sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks - largest)
    numpy.observe(Seen.attention, weights / total)
    mixed = weights @ np.repeat(values, group, axis=0) / total
    return numpy.round(mixed).swapaxes(0, 1).reshape(tokens, -1)
