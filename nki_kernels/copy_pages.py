"""copy_pages: pages of a paged cache get the contents of other pages, by numbers that are read at run time.

Dimensions
    N   copies; P pages of `block` positions, of Hk key/value heads of D elements each.

Arguments
    k_cache, v_cache  [P, block, Hk, D] @ HBM, any dtype; the pages that `destinations` names are written
    sources           [N, 1] @ HBM, int32: the pages that are read
    destinations      [N, 1] @ HBM, int32: the pages that are written. A page that stands there several times is copied
                      from the same source each time
    returns           the two caches

Layout
    A page lies on one partition: its elements follow each other in HBM, so one descriptor moves many of them.

Tiling
    for pieces of a page of up to 16384 elements:
        all copies of keys and values are read, then all are written. So a page may be the source of one copy and the
        destination of another: what is read is what was there before.
    On two cores one copies keys and the other values.

Limits
    N up to 128.

Cost
    HBM: each page read and written once. Predicted on trn2 for keys and values of pages of 16 positions, 8 heads of 128
    in bfloat16: 10 us for one page, which is latency, 13 us for 16 and 56 us for 128.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.tiles import PARTITIONS, expect_dims

PIECE = 16384
"""Elements of a page that one DMA moves; several such tiles fit in SBUF, so that loads run ahead of stores."""


@nki.jit
def copy_pages(k_cache: nt.mutable_tensor, v_cache: nt.mutable_tensor, sources, destinations):
    """Copy pages of keys and values."""
    check_copies(k_cache, v_cache, sources, destinations)
    caches = [k_cache, v_cache]
    if nl.num_programs() == 2:
        caches = [caches[nl.program_id(0)]]
    read, written = page_numbers(sources), page_numbers(destinations)
    for first in range(0, page_elements(k_cache), PIECE):
        pieces = []
        for cache in caches:
            pieces.append(load_piece(cache, read, first))
        for i in range(len(caches)):
            store_piece(caches[i], written, first, pieces[i])
    return k_cache, v_cache


def check_copies(k_cache, v_cache, sources, destinations):
    """Refuse caches that are not pages of one shape, and other numbers of sources than of destinations."""
    expect_dims(4, k_cache, "k_cache [pages, block, Hk, D]")
    expect_dims(2, sources, "sources [N, 1]")
    assert v_cache.shape == k_cache.shape, f"k_cache is {k_cache.shape}, v_cache is {v_cache.shape}"
    count = sources.shape[0]
    assert count <= PARTITIONS, f"copy_pages makes at most {PARTITIONS} copies, not {count}"
    for name, numbers in (("sources", sources), ("destinations", destinations)):
        assert numbers.shape == (count, 1), f"{name} are [{count}, 1], not {numbers.shape}"


def page_numbers(column):
    """A column of numbers in SBUF."""
    result = nl.ndarray(column.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=result, src=column)
    return result


def page_elements(cache):
    """Elements of a page."""
    return cache.shape[1] * cache.shape[2] * cache.shape[3]


def piece_of(cache, numbers, first):
    """A piece of the pages of some numbers, from an element on: [N, elements] in HBM."""
    elements = page_elements(cache)
    pattern = [[elements, numbers.shape[0]], [1, min(PIECE, elements - first)]]
    return cache.reshape((cache.shape[0], elements)).ap(pattern=pattern, offset=first, vector_offset=numbers)


def load_piece(cache, read, first):
    """Bring a piece of the pages that are read."""
    shape = (read.shape[0], min(PIECE, page_elements(cache) - first))
    piece = nl.ndarray(shape, dtype=cache.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=piece, src=piece_of(cache, read, first))
    return piece


def store_piece(cache, written, first, piece):
    """Write a piece of the pages that are written."""
    nisa.dma_copy(dst=piece_of(cache, written, first), src=piece)


def copy_pages_reference(
    k_cache: np.ndarray, v_cache: np.ndarray, sources: np.ndarray, destinations: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of pages, read before any is written; the caches are updated in place."""
    for cache in (k_cache, v_cache):
        cache[destinations[:, 0]] = cache[sources[:, 0]]
    return k_cache, v_cache
