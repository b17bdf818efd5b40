"""Sampling of the next tokens of many rows at once on the host, from their logits.

A row is one position whose next token is sampled. `sampler` calls `draw` for rows that the device did not sample. The
host samples the same token as the kernel `sample` with as many candidates as the vocabulary has tokens: it makes the
same float32 sums in the same order. Only rows with top-k or top-p are sorted, one by one, so a row's token does not
depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.sampling import RowSampling

_MASKED = np.float32(-1e30)
_MISSING = np.float32(-2e38)
_LARGEST = np.float32(1e37)
"""The kernel's values of masked logits, of NaN, and of the largest logits that it distinguishes."""

LEAST_TEMPERATURE = np.float32(1e-6)
"""The lowest temperature of a draw; lower temperatures above 0 are rounded up to it."""

_LEAST_EXPONENT = np.float32(-200)
_LARGEST_UNIFORM = np.float32(1 - 2**-24)


def draw(logits: np.ndarray, rows: Sequence[RowSampling]) -> np.ndarray:
    """Return one sampled token id for each row, int64 [rows].

    Args:
        logits: Logits of the rows, [rows, vocabulary] float32; not changed. NaN is treated as forbidden.
        rows: Sampling parameters of each row, its random number included. Temperature 0 takes the largest logit.
    """
    clipped = np.where(np.isnan(logits), _MISSING, np.clip(logits, -_LARGEST, _LARGEST))
    for index, row in enumerate(rows):
        if row.adjusts:
            clipped[index] = _adjust(logits[index], row)
    tokens = clipped.argmax(axis=1)
    sampled = np.flatnonzero([row.temperature > 0 for row in rows])
    if len(sampled):
        tokens[sampled] = _sample(
            clipped[sampled], tokens[sampled], [rows[index] for index in sampled.tolist()]
        )
    return tokens


def _adjust(logits: np.ndarray, row: RowSampling) -> np.ndarray:
    """Return the logits of one row with logit bias and penalties applied, [vocabulary] float32.

    A token whose bias or logit is NaN gets the lowest value, `_MISSING`.
    """
    adjusted = logits if row.bias is None else logits + row.bias
    missing, adjusted = np.isnan(adjusted), np.clip(adjusted, -_LARGEST, _LARGEST)
    if row.output_counts is not None:
        assert row.prompt_counts is not None
        repetition, counts = np.float32(row.repetition), row.output_counts
        factor = np.where(adjusted > 0, 1 / repetition, repetition)
        adjusted = np.where(counts + row.prompt_counts > 0, adjusted * factor, adjusted)
        adjusted = adjusted - (counts * np.float32(row.frequency) + (counts > 0) * np.float32(row.presence))
    return np.where(missing, _MISSING, adjusted)


def _sample(logits: np.ndarray, likeliest: np.ndarray, rows: Sequence[RowSampling]) -> np.ndarray:
    """Return sampled token ids [rows] for rows whose temperature is above 0.

    Args:
        logits: Adjusted logits of these rows, [rows, vocabulary] float32.
        likeliest: Index of the largest logit of each row, which top-k, top-p and min-p never exclude.
        rows: Sampling parameters of each row.
    """

    def column(name: str) -> np.ndarray:
        return np.array([[getattr(row, name)] for row in rows], np.float32)

    lanes, inverse = np.arange(len(rows)), 1 / np.maximum(column("temperature"), LEAST_TEMPERATURE)
    with np.errstate(over="ignore"):  # a quotient of minus infinity is a weight of 0
        exponents = (logits - logits[lanes, likeliest][:, None]) * inverse
    weights = np.exp(np.maximum(exponents, _LEAST_EXPONENT))
    weights *= logits > _MASKED
    for row, row_logits, row_weights in zip(rows, logits, weights):
        if 0 < row.top_k < len(row_weights):
            row_weights *= _are_largest(row_logits, row.top_k)
    weights[lanes, likeliest] = 1
    for row, row_logits, row_weights in zip(rows, logits, weights):
        if row.top_p < 1:
            _keep_likeliest(row_weights, row_logits, np.float32(row.top_p))
    weights *= weights >= column("min_p")
    bounds = np.cumsum(weights, axis=1)
    thresholds = np.minimum(column("uniform"), _LARGEST_UNIFORM) * bounds[:, -1:]
    return np.asarray((bounds <= thresholds).sum(axis=1))


def _are_largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Return a mask of the `count` largest scores, [vocabulary] bool; ties keep the lower index."""
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    is_largest = scores > least
    ties = np.flatnonzero(scores == least)
    is_largest[ties[: count - int(is_largest.sum())]] = True
    return is_largest


def _keep_likeliest(weights: np.ndarray, scores: np.ndarray, top_p: np.float32) -> None:
    """Set the weights of one row outside of top-p to 0, in place.

    A weight is kept if the larger weights together have less than the share `top_p` of the sum. The likeliest token
    always keeps its weight.

    Args:
        weights: Unnormalised probabilities, [vocabulary] float32.
        scores: Logits, which give the order; [vocabulary] float32.
        top_p: The share.
    """
    nonzero = np.flatnonzero(weights)
    order = nonzero[_argsort_descending(scores[nonzero])]
    sums = np.cumsum(weights[order])
    before = np.concatenate([sums[:1] * 0 - 1, sums[:-1]])
    weights[order[before >= sums[-1] * top_p]] = 0


def _argsort_descending(scores: np.ndarray) -> np.ndarray:
    """Return the indices that sort scores in descending order; ties keep the lower index.

    The bits of a score and its index are packed into one int64, so that a single sort suffices.
    """
    bits = (scores + 0).view(np.int32)  # minus zero becomes zero
    rising = np.where(bits < 0, ~(bits & 0x7FFFFFFF), bits).astype(np.int64)
    return np.sort(-rising * 2**32 + np.arange(len(scores))) & 0xFFFFFFFF
