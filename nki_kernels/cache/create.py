"""Which cache the arguments of a kernel describe: the one place that asks for the kind of a cache."""

from __future__ import annotations

from nki_kernels.cache.contiguous import ContiguousCache
from nki_kernels.cache.named_rows import RowCache
from nki_kernels.cache.pages import PagedCache
from nki_kernels.tiles import expect_dims


def create_cache(k_cache, v_cache, slots, block_tables, cache_rows, tokens, stored=False):
    """Return the cache of a decode step of `tokens` new tokens; refuse arguments that do not fit together.

    stored: the cache has the keys and values of the new tokens already, so nothing is written.
    """
    if stored:
        assert slots is None, "slots come with k and v, which are written there"
    else:
        assert (slots is None) == (block_tables is None), "slots and block_tables come together"
    if block_tables is not None:
        expect_dims(4, k_cache, "k_cache [pages, block, Hk, D]")
        expect_dims(2, block_tables, "block_tables [B, N]")
        cache = PagedCache(k_cache, v_cache, slots, block_tables)
    else:
        expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
        cache = create_contiguous(k_cache, v_cache, cache_rows)
    cache.check(tokens)
    assert cache_rows is None or (stored and block_tables is None), (
        "cache_rows come without k and v, which would be written, and without block_tables"
    )
    return cache


def create_prompt_cache(k_cache, v_cache, slots, block_tables, cache_rows):
    """Return the cache that prompts are written to and read from; refuse arguments that do not fit together."""
    assert (slots is None) == (block_tables is None), "a paged cache takes both slots and block_tables"
    if block_tables is None:
        expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
        expect_dims(4, v_cache, "v_cache [B, Hk, S, Dv]")
        return create_contiguous(k_cache, v_cache, cache_rows)
    expect_dims(4, k_cache, "k_cache [P, page, Hk, D]")
    expect_dims(4, v_cache, "v_cache [P, page, Hk, D]")
    assert cache_rows is None, "cache_rows name rows of contiguous caches; pages come with block_tables alone"
    return PagedCache(k_cache, v_cache, slots, block_tables)


def create_contiguous(k_cache, v_cache, cache_rows):
    """Return the cache of contiguous keys and values, with the rows of sequences where these are named."""
    if cache_rows is None:
        return ContiguousCache(k_cache, v_cache)
    expect_dims(2, cache_rows, "cache_rows [B, 1]")
    return RowCache(k_cache, v_cache, cache_rows)
