"""Decode attention over ranks that divide the positions of a cache: the arguments of each, and what all return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
from tests.kernels.accuracy import compare, copied, in_float64
from tests.kernels.test_attention_decode import in_pages


def divided(arguments: tuple[Any, ...], ranks: int, block: int = 0) -> list[tuple[Any, ...]]:
    """The arguments of each rank of a launch: its query heads and sinks, its slots, its place among the ranks."""
    q, k, v, k_cache, v_cache, positions, scale, *rest = arguments
    kv_heads = k_cache.shape[1]
    rest += [None] * (11 - len(rest))
    rest[5] = rest[5] or 1e-6
    heads = q.reshape(len(q), kv_heads, ranks, -1)
    group = ReplicaGroup([list(range(ranks))])
    found = []
    for rank in range(ranks):
        own = heads[:, :, rank].reshape(len(q), -1).copy()
        caches = k_cache[..., rank::ranks].copy(), v_cache[:, :, rank::ranks].copy()
        options = list(rest)
        if options[10] is not None:
            options[10] = options[10].reshape(1, kv_heads, ranks, -1)[:, :, rank].reshape(1, -1).copy()
        if block:
            # Slots number as positions of a shorter cache do, and the pages are the same on all ranks.
            paged = in_pages((own, k, v, *caches, positions // ranks, scale), block)
            caches, options[6], options[7] = paged[3:5], paged[-2], paged[-1]
        place = np.int32([[rank]])
        found.append(
            (own, k, v, *caches, positions, scale, kv_heads, *options[1:], None, group, ranks, place)
        )
    return found


def check_divided(
    arguments: tuple[Any, ...], shares: list[tuple[Any, ...]], outputs: Sequence[Any], block: int = 0
) -> None:
    """Outputs of all ranks as exact as numpy's of the whole caches, and each cache written as the whole one is."""
    ranks, (kv_heads, depth) = len(shares), arguments[3].shape[1:3]
    own = [each[0].reshape(len(arguments[0]), kv_heads, -1, depth) for each in outputs]
    o = np.stack(own, axis=2).reshape(arguments[0].shape)
    same_dtype, *written = kernels.attention_decode_reference(*copied(arguments))
    compare(o, kernels.attention_decode_reference(*map(in_float64, arguments))[0], same_dtype)
    for rank, (share, found) in enumerate(zip(shares, outputs)):
        whole = written[0][..., rank::ranks], written[1][:, :, rank::ranks]
        if block:
            whole = in_pages((*share[:3], *whole, share[5] // ranks, share[6]), block)[3:5]
        for cache, wanted in zip(found[1:], whole):
            assert np.array_equal(cache, wanted, equal_nan=True)
