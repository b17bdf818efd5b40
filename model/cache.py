"""The key/value cache: per rank and layer, keys [heads, head_dim, length] and values [heads, length, head_dim].

Keys lie transposed because a decode step contracts over head_dim, which then is the partition axis of a tile read
straight from HBM; values contract over positions. The length is a bucket, a multiple of 128 (the partitions of a
tile), so that a generation runs one compiled graph for all its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BUCKET = 128


def bucket_length(needed: int, max_positions: int) -> int:
    """The cache length for `needed` positions, which are not more than the context of `max_positions`."""
    assert 0 < needed <= max_positions, f"{needed} of {max_positions} positions"
    return -(-needed // BUCKET) * BUCKET


@dataclass
class LayerCache:
    """Keys and values of one layer on one rank, in the dtype of the activations."""

    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def empty(cls, heads: int, head_dim: int, length: int, dtype: np.dtype) -> LayerCache:
        """A cache of zeros; rows beyond the current position are never looked at."""
        return cls(
            np.zeros((heads, head_dim, length), dtype),
            np.zeros((heads, length, head_dim), dtype),
        )


def empty_cache(
    ranks: int, layers: int, heads: int, head_dim: int, length: int, dtype: np.dtype
) -> list[list[LayerCache]]:
    """Caches by rank, then by layer; `heads` is what one rank holds."""
    return [[LayerCache.empty(heads, head_dim, length, dtype) for _ in range(layers)] for _ in range(ranks)]
