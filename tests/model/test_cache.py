"""The key/value cache's lengths and layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from model.cache import bucket_length, empty_cache


@pytest.mark.parametrize(
    ("needed", "length"), [(1, 128), (127, 128), (128, 128), (129, 256), (200, 256), (256, 256)]
)
def test_length_is_a_bucket_of_128(needed, length) -> None:
    assert bucket_length(needed, 256) == length


@pytest.mark.parametrize(("context", "length"), [(127, 128), (128, 128), (129, 256), (200, 256)])
def test_length_is_at_most_the_context_rounded_up(context, length) -> None:
    assert bucket_length(context, context) == length


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_keys_lie_transposed_beside_values(dtype) -> None:
    caches = empty_cache(ranks=2, layers=3, heads=4, head_dim=8, length=128, dtype=np.dtype(dtype))
    assert [len(rank) for rank in caches] == [3, 3]
    for cache in (each for rank in caches for each in rank):
        assert cache.keys.shape == (4, 8, 128)
        assert cache.values.shape == (4, 128, 8)
        assert cache.keys.dtype == cache.values.dtype == dtype
