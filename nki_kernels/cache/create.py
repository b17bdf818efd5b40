"""Which cache the arguments of a kernel describe: the one place that asks for the kind of a cache."""

from __future__ import annotations

from nki_kernels.cache.contiguous import ContiguousCache
from nki_kernels.cache.named_rows import RowCache
from nki_kernels.cache.pages import PagedCache


def create_cache(k_cache, v_cache, slots, block_tables, cache_rows, tokens, stored=False):
    """Return the cache of a decode step of `tokens` new tokens; refuse arguments that do not fit together.

    stored: the cache has the keys and values of the new tokens already, so nothing is written.
    """
    if stored:
        assert slots is None, "slots come with k and v, which are written there"
    else:
        assert (slots is None) == (block_tables is None), "slots and block_tables come together"
    if block_tables is not None:
        cache = PagedCache(k_cache, v_cache, slots, block_tables)
    elif cache_rows is not None:
        cache = RowCache(k_cache, v_cache, cache_rows)
    else:
        cache = ContiguousCache(k_cache, v_cache)
    cache.check(tokens)
    assert cache_rows is None or (stored and block_tables is None), (
        "cache_rows come without k and v, which would be written, and without block_tables"
    )
    return cache
