"""Draws the next tokens of many rows at once, from their logits, on the host.

A row draws what the kernel `sample` draws from as many candidates as the vocabulary has tokens, with the same sums of
float32 in the same order. Only rows that top-k or top-p cut short are sorted, each alone, so a row's draw does not
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.sampling import RowSampling

_MASKED = np.float32(-1e30)
_MISSING = np.float32(-2e38)
_LARGEST = np.float32(1e37)
"""As the kernel has them: logits that are masked, that are no number, and the largest ones that are told apart."""

LEAST_TEMPERATURE = np.float32(1e-6)
"""Temperatures between 0 and this one draw as this one does."""

_LEAST_EXPONENT = np.float32(-200)
_LARGEST_UNIFORM = np.float32(1 - 2**-24)


def draw(logits: np.ndarray, rows: Sequence[RowSampling]) -> np.ndarray:
    """The tokens that rows draw from logits [rows, vocabulary] float32."""
    wide = np.where(np.isnan(logits), _MISSING, np.clip(logits, -_LARGEST, _LARGEST))
    for number, row in enumerate(rows):
        if row.adjusts:
            wide[number] = _adjusted(logits[number], row)
    tokens = wide.argmax(axis=1)
    sampled = np.flatnonzero([row.temperature > 0 for row in rows])
    if len(sampled):
        tokens[sampled] = _sampled(
            wide[sampled], tokens[sampled], [rows[number] for number in sampled.tolist()]
        )
    return tokens


def _adjusted(logits: np.ndarray, row: RowSampling) -> np.ndarray:
    """Logits of one row with bias and penalties."""
    wide = logits if row.bias is None else logits + row.bias
    missing, wide = np.isnan(wide), np.clip(wide, -_LARGEST, _LARGEST)
    if row.output_counts is not None:
        assert row.prompt_counts is not None
        repetition, counts = np.float32(row.repetition), row.output_counts
        factor = np.where(wide > 0, 1 / repetition, repetition)
        wide = np.where(counts + row.prompt_counts > 0, wide * factor, wide)
        wide = wide - (counts * np.float32(row.frequency) + (counts > 0) * np.float32(row.presence))
    return np.where(missing, _MISSING, wide)


def _sampled(wide: np.ndarray, best: np.ndarray, rows: Sequence[RowSampling]) -> np.ndarray:
    """The tokens of rows with a temperature; `best` are the likeliest ones, which always keep their weight."""

    def column(name: str) -> np.ndarray:
        return np.array([[getattr(row, name)] for row in rows], np.float32)

    lanes, inverse = np.arange(len(rows)), 1 / np.maximum(column("temperature"), LEAST_TEMPERATURE)
    with np.errstate(over="ignore"):  # a quotient of minus infinity is a weight of 0
        exponents = (wide - wide[lanes, best][:, None]) * inverse
    weights = np.exp(np.maximum(exponents, _LEAST_EXPONENT))
    weights *= wide > _MASKED
    for row, scores, own in zip(rows, wide, weights):
        if 0 < row.top_k < len(own):
            own *= _are_largest(scores, row.top_k)
    weights[lanes, best] = 1
    for row, scores, own in zip(rows, wide, weights):
        if row.top_p < 1:
            _keep_likeliest(own, scores, np.float32(row.top_p))
    weights *= weights >= column("min_p")
    bounds = np.cumsum(weights, axis=1)
    drawn = np.minimum(column("uniform"), _LARGEST_UNIFORM) * bounds[:, -1:]
    return np.asarray((bounds <= drawn).sum(axis=1))


def _are_largest(scores: np.ndarray, count: int) -> np.ndarray:
    """Which scores are the `count` largest; of equal ones the first."""
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = scores > least
    equal = np.flatnonzero(scores == least)
    above[equal[: count - int(above.sum())]] = True
    return above


def _keep_likeliest(weights: np.ndarray, scores: np.ndarray, top_p: np.float32) -> None:
    """Set the weights of one row to 0 before which the likelier ones already have the share `top_p` of the sum.

    The likeliest token keeps its weight, also where `top_p` times the sum is 0.
    """
    some = np.flatnonzero(weights)
    order = some[_descending(scores[some])]
    sums = np.cumsum(weights[order])
    ahead = np.concatenate([sums[:1] * 0 - 1, sums[:-1]])
    weights[order[ahead >= sums[-1] * top_p]] = 0


def _descending(scores: np.ndarray) -> np.ndarray:
    """The places of scores, the largest first, of equal ones the first: one sort of integers of both."""
    bits = (scores + 0).view(np.int32)  # minus zero becomes zero
    rising = np.where(bits < 0, ~(bits & 0x7FFFFFFF), bits).astype(np.int64)
    return np.sort(-rising * 2**32 + np.arange(len(scores))) & 0xFFFFFFFF
