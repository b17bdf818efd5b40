"""Creation of the cache that a kernel's arguments describe: contiguous, with named rows, or paged.

`attention_decode`, `attention_prefill` and the kernels that contain them call it. It is the only code that asks what
sort of cache there is.
"""

from __future__ import annotations

from nki_kernels.cache.contiguous import ContiguousCache
from nki_kernels.cache.named_rows import RowCache
from nki_kernels.cache.packed_pages import PackedPages
from nki_kernels.cache.pages import PagedCache
from nki_kernels.tiles import expect_dims


def create_cache(k_cache, v_cache, slots, block_tables, cache_rows, tokens, stored=False, pages=None):
    """Return the cache of a decode step, which the arguments describe.

    It is a `PackedPages` with pages of 4 bits, a `PagedCache` with block_tables, a `RowCache` with cache_rows, else a
    `ContiguousCache`.

    Args:
        tokens: number of new tokens, T.
        stored: whether the cache has the new tokens' keys and values already, so that nothing is written.
        pages: `PageArguments`, or None for a kernel that takes no pages of 4 bits.

    Raises:
        AssertionError: arguments do not fit together: slots without block_tables, cache_rows for a cache that is
            written or paged, pages of 4 bits without a newest page, or shapes of another cache.
    """
    if stored:
        assert slots is None, "slots come with k and v, which are written there; without k and v omit slots"
    else:
        assert (slots is None) == (block_tables is None), (
            "slots and block_tables come together: pass both for paged caches, neither for contiguous ones"
        )
    if pages is not None and pages.is_given():
        assert slots is not None and pages.newest_tables is not None, (
            "pages of 4 bits take k, v, slots, block_tables and newest_tables; pass all of them"
        )
        expect_dims(2, pages.newest_tables, "newest_tables [B, M]")
        cache = create_packed(k_cache, v_cache, slots, block_tables, pages)
    elif block_tables is not None:
        expect_dims(4, k_cache, "k_cache [pages, block, Hk, D]")
        expect_dims(2, block_tables, "block_tables [B, N]")
        cache = PagedCache(k_cache, v_cache, slots, block_tables)
    else:
        expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
        cache = create_contiguous(k_cache, v_cache, cache_rows)
    cache.check(tokens)
    assert cache_rows is None or (stored and block_tables is None), (
        "cache_rows come without k and v, because a step only reads named rows, and without block_tables; omit these"
    )
    return cache


def create_prompt_cache(k_cache, v_cache, slots, block_tables, cache_rows, pages=None):
    """Return the cache that prompts are read from and written to.

    It is a `PackedPages` with pages of 4 bits, a `PagedCache` with slots and block_tables, a `RowCache` with
    cache_rows, else a `ContiguousCache`. `pages` are `PageArguments`, or None for other caches.

    Raises:
        AssertionError: only one of slots and block_tables is given, cache_rows come with them, or a cache does not
            have four axes.
    """
    assert (slots is None) == (block_tables is None), (
        "a paged cache takes both slots and block_tables; omit both for contiguous caches"
    )
    if block_tables is None:
        expect_dims(4, k_cache, "k_cache [B, Hk, D, S]")
        expect_dims(4, v_cache, "v_cache [B, Hk, S, Dv]")
        return create_contiguous(k_cache, v_cache, cache_rows)
    expect_dims(4, k_cache, "k_cache [P, page, Hk, D]")
    expect_dims(4, v_cache, "v_cache [P, page, Hk, D]")
    assert cache_rows is None, (
        "cache_rows name rows of contiguous caches; pages come with block_tables alone, so omit cache_rows"
    )
    if pages is not None and pages.is_given():
        return create_packed(k_cache, v_cache, slots, block_tables, pages)
    return PagedCache(k_cache, v_cache, slots, block_tables)


def create_packed(k_cache, v_cache, slots, block_tables, pages):
    """Return the `PackedPages` that arguments of a kernel describe, of which `pages` are the `PageArguments`.

    The newest pages of prompts need no table: their new tokens begin a page.
    """
    expect_dims(4, k_cache, "k_cache [pages, block, Hk, D]")
    expect_dims(4, v_cache, "v_cache [pages, block, Hk, D]")
    expect_dims(2, block_tables, "block_tables [B, N]")
    tables = block_tables if pages.newest_tables is None else pages.newest_tables
    return PackedPages(
        PagedCache(k_cache, v_cache, slots, tables), pages.k_pages, pages.v_pages, block_tables
    )


def create_contiguous(k_cache, v_cache, cache_rows):
    """Return a `RowCache` if `cache_rows` [B, 1] names the rows of the sequences, else a `ContiguousCache`.

    Raises AssertionError if cache_rows does not have two axes.
    """
    if cache_rows is None:
        return ContiguousCache(k_cache, v_cache)
    expect_dims(2, cache_rows, "cache_rows [B, 1]")
    return RowCache(k_cache, v_cache, cache_rows)
