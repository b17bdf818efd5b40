"""copy_pages: pages of a cache, or slots of states, get the contents of others, by numbers that are read at run time.

Dimensions:
    N   copies; P pages of `block` positions, of Hk key/value heads of D elements each; or P slots of two states.

Arguments:
    cache, other      [P, …] @ HBM, any dtype: keys and values, [P, block, Hk, D], or the two states of a recurrent
                      layer; the pages that `destinations` names are written. `other` is None where
                      there is one array alone, as of latent attention
    sources           [N, 1] @ HBM, int32: the pages that are read
    destinations      [N, 1] @ HBM, int32: the pages that are written. A page that stands there several times is copied
                      from the same source each time
    returns           the arrays

Layout
    A page lies on one partition: its elements follow each other in HBM, so one descriptor moves many of them. One of
    more than 16384 elements, as states have, lies in equal *rows* on as many partitions as divide it, a power of two.

Tiling
    for pieces of a row of up to 16384 elements:
        all copies of both arrays are read, then all are written. So a page may be the source of one copy and the
        destination of another: what is read is what was there before.
    On two cores each copies one array; the first one copies an only array.

Limits:
    N up to 128.

Cost
    HBM: each page read and written once. Predicted on trn2 for keys and values of pages of 16 positions, 8 heads of 128
    in bfloat16: 10 us for one page, which is latency, 13 us for 16 and 56 us for 128. For states [32, 128, 128] and
    [8192, 3] in float32: 27 us for one slot, 335 us for 16.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.tiles import PARTITIONS, expect_dims, load

cores = (1, 2)

PIECE = 16384
"""Elements of a row that one DMA moves; several such tiles fit in SBUF, so that loads run ahead of stores."""


@nki.jit
def copy_pages(cache: nt.mutable_tensor, other: nt.mutable_tensor, sources, destinations):
    """Copy page sources[i] of `cache`, and of `other` if given, over page destinations[i], for all i, in place.

    All pages are read before any is written. Returns the cache, or (cache, other). AssertionError if shapes
    do not fit together, or for more than 128 copies.
    """
    check_copies(cache, other, sources, destinations)
    arrays = [cache] if other is None else [cache, other]
    rows = count_page_rows(arrays, sources.shape[0])
    if nl.num_programs() == 2:
        core = nl.program_id(0)
        arrays = arrays[core : core + 1]
    read, written = compute_row_indices(sources, rows), compute_row_indices(destinations, rows)
    longest = 0
    for i in range(len(arrays)):
        arrays[i] = view_rows(arrays[i], rows)
        longest = max(longest, arrays[i].shape[1])
    for first in range(0, longest, PIECE):
        pieces = []
        for array in arrays:
            pieces.append(load_piece(array, read, first) if first < array.shape[1] else None)
        for i in range(len(arrays)):
            if pieces[i] is not None:
                store_piece(arrays[i], written, first, pieces[i])
    if other is None:
        return cache
    return cache, other


def check_copies(cache, other, sources, destinations):
    """Raise AssertionError unless both arrays have as many pages, and sources and destinations are [N, 1], N <= 128."""
    expect_dims(2, sources, "sources [N, 1]")
    assert len(cache.shape) > 1, f"expected cache [P, …], not a tensor of shape {cache.shape}"
    if other is not None:
        assert len(other.shape) > 1, f"expected other [P, …], not a tensor of shape {other.shape}"
        assert other.shape[0] == cache.shape[0], (
            f"cache is {cache.shape}, other is {other.shape}; both need equally many pages"
        )
    count = sources.shape[0]
    assert count <= PARTITIONS, (
        f"copy_pages makes at most {PARTITIONS} copies, not {count}: launch it several times"
    )
    for name, numbers in (("sources", sources), ("destinations", destinations)):
        assert numbers.shape == (count, 1), f"{name} have to be [{count}, 1], not {numbers.shape}"


def count_page_elements(array):
    """Return the number of elements of a page: the product of all dims of `array` [P, …] but the first."""
    elements = 1
    for size in array.shape[1:]:
        elements = elements * size
    return elements


def count_page_rows(arrays, count):
    """Return into how many equal rows each page is cut, a power of two; each row takes one partition.

    Pages of at most PIECE elements are not cut: the result is 1. Larger ones are halved while all of `count`
    pages' rows fit on 128 partitions, and while the pages of all arrays can be halved.
    """
    largest = 0
    for array in arrays:
        largest = max(largest, count_page_elements(array))
    rows = 1
    while largest > PIECE and 2 * rows * count <= PARTITIONS:
        for array in arrays:
            if count_page_elements(array) % (2 * rows) > 0:
                return rows
        rows = 2 * rows
    return rows


def view_rows(array, rows):
    """View `array` [P, …] in HBM as [P * rows, elements of a row]: each page is cut into `rows` rows."""
    return array.reshape((array.shape[0] * rows, count_page_elements(array) // rows))


def compute_row_indices(pages, rows):
    """Return the indices of all rows of the given pages, as rows of `view_rows`: [N * rows, 1] int32 in SBUF.

    Page p has rows p * rows … p * rows + rows - 1. Indices are computed in float32, which is exact below
    2^24.

    Args:
        pages: page numbers [N, 1] int32 @ HBM.
    """
    count = pages.shape[0]
    result = nl.ndarray((count * rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    if rows == 1:
        nisa.dma_copy(dst=result, src=pages)
        return result
    repeated = nl.ndarray((count * rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=repeated, src=pages.broadcast(1, rows))
    row = nl.ndarray((1, count, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[0, count], [1, rows]])
    within = nl.ndarray((count * rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=within, src=row)
    nisa.scalar_tensor_tensor(
        dst=result, data=repeated, op0=nl.multiply, operand0=float(rows), op1=nl.add, operand1=within
    )
    return result


def view_piece(array, numbers, first):
    """View elements `first` … first + PIECE - 1 of some rows of `array` in HBM: [rows, at most PIECE].

    numbers: indices of the rows, [rows, 1] int32 in SBUF, which the DMA reads at run time.
    """
    elements = array.shape[1]
    pattern = [[elements, numbers.shape[0]], [1, min(PIECE, elements - first)]]
    return array.ap(pattern=pattern, offset=first, vector_offset=numbers)


def load_piece(array, read, first):
    """Load elements `first` … first + PIECE - 1 of rows `read` into a new SBUF tile; see `view_piece`."""
    return load(view_piece(array, read, first), array.dtype)


def store_piece(array, written, first, piece):
    """Store `piece` [rows, elements] in SBUF to elements `first` … of the rows `written`; see `view_piece`."""
    nisa.dma_copy(dst=view_piece(array, written, first), src=piece)


def copy_pages_reference(
    cache: np.ndarray, other: np.ndarray | None, sources: np.ndarray, destinations: np.ndarray
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Copy pages with NumPy, all read before any is written. Updates and returns the cache, or (cache, other)."""
    for array in (cache, other):
        if array is not None:
            array[destinations[:, 0]] = array[sources[:, 0]]
    return cache if other is None else (cache, other)
