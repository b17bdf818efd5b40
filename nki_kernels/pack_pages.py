"""pack_pages: pages that became full are rounded to 4 bits, by numbers that are read at run time.

Dimensions:
    N   pages; Q and P pages of `block` positions, of Hk key/value heads of D elements each.

Arguments:
    k_pages         [P, block + 4, Hk, D / 2] @ HBM, uint8: keys in 4 bits; the pages that `destinations` names are
                    written. `cache.nibble_pages` has the layout and the rounding
    v_pages         [P, block, Hk, D / 2 + 4] @ HBM, uint8: values in 4 bits, as k_pages
    k_cache, v_cache  [Q, block, Hk, D] @ HBM, float32 or bfloat16
    sources         [N, 1] @ HBM, int32: the pages of k_cache and v_cache that are read
    destinations    [N, 1] @ HBM, int32: the pages that are written. A page that stands there several times is packed
                    from the same source each time
    returns         k_pages, v_pages

Layout
    Rows of up to 128 positions, of as many whole pages as fit, are on partitions. Scales of values are reduced along
    the elements of a row. Keys are transposed, so that those of an element are reduced along the free dimension; their
    nibbles and scales are transposed back, because pages have rows.

Tiling
    for the pages of up to 128 positions: keys of all heads, then values. On two cores one packs keys, the other values.
    Elements that are NaN or infinite count as 0, as in attention_prefill.

Limits:
    D = 8, 16, 24 … 128; pages of 1, 2, 4 … 128 positions.

Cost
    HBM: each page read once, and a quarter of it written. Vector: some ten instructions for a head of 128 positions.
    Predicted on trn2
    for one head of 128 in bfloat16: 17 us for a page of 16 positions, 33 us for 16 of them, 268 us for 16 of 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cache.nibble_pages import (
    SCALE_BYTES,
    SCALE_ROWS,
    check_pages,
    compute_scales,
    invert_scales,
    pack_reference,
    pack_steps,
    round_to_steps,
    split_bfloat16_reference,
)
from nki_kernels.cache.pages import PagedCache
from nki_kernels.precision import widened
from nki_kernels.prefill.keys import zero_not_finite
from nki_kernels.tiles import PARTITIONS, cast, expect_dims, load, ranges

cores = (1, 2)


@nki.jit
def pack_pages(
    k_pages: nt.mutable_tensor, v_pages: nt.mutable_tensor, k_cache, v_cache, sources, destinations
):
    """Round page sources[i] of k_cache and v_cache to page destinations[i] of k_pages and v_pages, for all i, in place.

    Returns (k_pages, v_pages). AssertionError if shapes or dtypes do not fit together.
    """
    check_packing(k_pages, v_pages, k_cache, v_cache, sources, destinations)
    both = [(k_pages, k_cache, pack_keys), (v_pages, v_cache, pack_values)]
    if nl.num_programs() == 2:
        core = nl.program_id(0)
        both = both[core : core + 1]
    block = k_cache.shape[1]
    tiles = []
    for first, last in ranges(0, sources.shape[0], PARTITIONS // block):
        tiles.append(compute_addresses(sources[first:last, :], destinations[first:last, :], block))
    for tile in tiles:
        loaded = []
        for _, cache, _ in both:
            loaded.append(load_rows(cache, tile.read))
        for i in range(len(both)):
            zero_not_finite(loaded[i], nisa.engine.gpsimd)
            pages, _, pack = both[i]
            pack(pages, loaded[i], tile)
    return k_pages, v_pages


def check_packing(k_pages, v_pages, k_cache, v_cache, sources, destinations):
    """Raise AssertionError unless pages fit each other and sources and destinations are [N, 1]."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect_dims(4, cache, f"{name} [pages, block, Hk, D]")
        assert cache.dtype == nl.float32 or cache.dtype == nl.bfloat16, (
            f"{name} is float32 or bfloat16, not {cache.dtype}"
        )
    expect_dims(2, sources, "sources [N, 1]")
    assert v_cache.shape == k_cache.shape, (
        f"k_cache is {k_cache.shape}, v_cache is {v_cache.shape}; pages of both have one shape"
    )
    check_pages(k_pages, v_pages, PagedCache(k_cache, v_cache, None, sources))
    for name, numbers in (("sources", sources), ("destinations", destinations)):
        shape = (sources.shape[0], 1)
        assert numbers.shape == shape, f"{name} have to be [{shape[0]}, 1], not {numbers.shape}"


@dataclass
class Addresses(nl.NKIObject):
    """Rows of all heads in HBM of the positions of some pages, and the first row of each page of keys in 4 bits.

    read: rows of k_cache and v_cache. keys, values: rows of k_pages and v_pages. Each of these is [position, 1] int32
    in SBUF, one page behind the other. pages: [page, 1] int32 in SBUF.
    """

    read: nl.NkiTensor
    keys: nl.NkiTensor
    values: nl.NkiTensor
    pages: nl.NkiTensor


def compute_addresses(sources, destinations, block):
    """Return the `Addresses` of pages of `block` positions, whose numbers are [page, 1] int32 in HBM.

    Rows are computed in float32, which is exact because caches have at most 2^24 of them.
    """
    count = sources.shape[0]
    rows = count * block
    positions = nl.ndarray((1, count, block), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=positions, pattern=[[0, count], [1, block]])
    within = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=within, src=positions)
    repeated = []
    for numbers in (sources, destinations):
        tile = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=numbers.broadcast(1, block))
        repeated.append(tile)
    pitch = block + SCALE_ROWS
    first_rows = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=first_rows, data=load(destinations, nl.int32), op0=nl.multiply, operand0=float(pitch)
    )
    return Addresses(
        add_rows(repeated[0], block, within),
        add_rows(repeated[1], pitch, within),
        add_rows(repeated[1], block, within),
        first_rows,
    )


def add_rows(pages, pitch, within):
    """Return pages * pitch + within as a new int32 SBUF tile [position, 1]."""
    rows = nl.ndarray(pages.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=rows, data=pages, op0=nl.multiply, operand0=float(pitch), op1=nl.add, operand1=within
    )
    return rows


def load_rows(cache, read):
    """Return keys or values of some positions, [position, Hk, D] in SBUF.

    Args:
        cache: [Q, block, Hk, D] in HBM.
        read: rows of all heads, [position, 1] int32 in SBUF.
    """
    tile = nl.ndarray((read.shape[0], cache.shape[2], cache.shape[3]), dtype=cache.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=view_rows(cache, read, 0, tile))
    return tile


def view_rows(pages, rows, row, tile):
    """View parts of pages in HBM, one for each partition of `tile` and as long as the tile's rows.

    Args:
        pages: [P, rows of a page, Hk, elements] in HBM.
        rows: numbers of rows of all heads, [parts, 1] int32 in SBUF.
        row: added to these numbers.
        tile: [parts, Hk, elements] in SBUF.
    """
    count, page_rows, heads, width = pages.shape
    pitch = heads * width
    return pages.reshape((count * page_rows, pitch)).ap(
        pattern=[[pitch, rows.shape[0]], [1, tile.shape[1] * tile.shape[2]]],
        offset=row * pitch,
        vector_offset=rows,
    )


def pack_keys(pages, keys, addresses):
    """Write keys to pages in HBM: nibbles, and the scales of elements.

    Args:
        pages: [P, block + 4, Hk, D / 2] in HBM.
        keys: [position, Hk, D] in SBUF.
        addresses: `Addresses` of the pages.
    """
    rows, heads, depth = keys.shape
    count = addresses.pages.shape[0]
    block = rows // count
    packed = nl.ndarray((rows, heads, depth // 2), dtype=nl.uint8, buffer=nl.sbuf)
    scale_rows = nl.ndarray((count, heads, depth), dtype=nl.bfloat16, buffer=nl.sbuf)
    for head in range(heads):
        bank = nl.ndarray((depth, rows), dtype=keys.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=keys[:, head, :])
        groups = bank.reshape((depth, count, block))
        scales = compute_scales(groups, nl.bfloat16)
        steps = round_to_steps(groups, invert_scales(scales).expand_dim(2).broadcast(2, block))
        # Small whole numbers are exact in every dtype that the Tensor engine transposes.
        exact = cast(steps.reshape((depth, rows)), keys.dtype)
        by_position = nl.ndarray((rows, depth), dtype=keys.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=by_position, data=exact)
        pack_steps(packed[:, head : head + 1, :], by_position.reshape((rows, 1, depth)))
        by_page = nl.ndarray((count, depth), dtype=nl.bfloat16, buffer=nl.psum)
        nisa.nc_transpose(dst=by_page, data=scales)
        nisa.tensor_copy(dst=scale_rows[:, head, :], src=by_page)
    nisa.dma_copy(dst=view_rows(pages, addresses.keys, 0, packed), src=packed)
    scale_bytes = scale_rows.view(nl.uint8)
    nisa.dma_copy(dst=view_rows(pages, addresses.pages, block, scale_bytes), src=scale_bytes)


def pack_values(pages, values, addresses):
    """Write values to pages in HBM: the nibbles of each position and head, and its scale.

    Args:
        pages: [P, block, Hk, D / 2 + 4] in HBM.
        values: [position, Hk, D] in SBUF.
        addresses: `Addresses` of the pages.
    """
    rows, heads, depth = values.shape
    half = depth // 2
    scales = compute_scales(values, nl.float32)
    steps = round_to_steps(values, invert_scales(scales).expand_dim(2).broadcast(2, depth))
    packed = nl.ndarray((rows, heads, half + SCALE_BYTES), dtype=nl.uint8, buffer=nl.sbuf)
    pack_steps(packed[:, :, 0:half], steps)
    nisa.tensor_copy(dst=packed[:, :, half:].view(nl.float32), src=scales.expand_dim(2))
    nisa.dma_copy(dst=view_rows(pages, addresses.values, 0, packed), src=packed)


def pack_pages_reference(
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    sources: np.ndarray,
    destinations: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Round pages to 4 bits with NumPy. Updates and returns k_pages and v_pages."""
    read, written = sources[:, 0], destinations[:, 0]
    k_cache, v_cache = (np.where(np.isfinite(widened(cache)), cache, 0) for cache in (k_cache, v_cache))
    packed, scales = pack_reference(k_cache[read], 1, 16)
    _, _, heads, half = packed.shape
    scale_rows = split_bfloat16_reference(scales).view(np.uint8).reshape(-1, SCALE_ROWS, heads, half)
    k_pages[written] = np.concatenate([packed, scale_rows], axis=1)
    packed, scales = pack_reference(v_cache[read], 3, 32)
    v_pages[written] = np.concatenate([packed, np.ascontiguousarray(scales).view(np.uint8)], axis=3)
    return k_pages, v_pages
