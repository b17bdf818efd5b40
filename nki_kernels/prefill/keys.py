"""Keys and values of one key/value head of one sequence in SBUF, as attention_prefill multiplies them.

Keys lie [d, block, part of d, key]: a head of more than 128 dims is contracted in two to four parts. Values lie
[key, block, Dv + 1]: the last column holds ones, so that the product with the weights of a softmax has their sum beside
it. Blocks have 128 keys. Blocks of cached positions come first, padded to whole ones, then those of the new tokens.

Keys and values of padded tokens may be NaN or infinite. Those elements become 0, since a weight of 0 does not keep
them out of a product. The caches get what the products take.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import round_to_cache
from nki_kernels.prefill.cores import query_head
from nki_kernels.tiles import PARTITIONS, aligned_tile, blocks

LOADED_BLOCKS = 8
"""Blocks of keys or values that one DMA brings: 256 KiB of a head of 128 dims in bfloat16."""


class Head(nl.NKIObject):
    """A key/value head of a sequence; once loaded, keys [part of D, block, part, 128], values [128, block, Dv + 1].

    `first` is its first tile of queries. Once `ready`, its keys are clean, and its writes to the caches noted.
    """

    def __init__(self, sequence, number, first):
        self.sequence = sequence
        self.number = number
        self.first = first
        self.ready = False
        self.cached = None
        self.keys = None
        self.values = None


def allocate(case, head):
    """Tiles for the keys and values of a head; the values' column of ones is filled."""
    count = blocks(case.keys)
    shape = (case.part_depth, count, case.parts, PARTITIONS)
    head.keys = nl.ndarray(shape, dtype=case.dtype, buffer=nl.sbuf)
    head.values = nl.ndarray((PARTITIONS, count, case.value_depth + 1), dtype=case.dtype, buffer=nl.sbuf)
    nisa.memset(dst=head.values[:, :, case.value_depth : case.value_depth + 1], value=1.0)


def load_queries(case, queries):
    """Queries as a tile [part of D, head, part, query], transposed by DMA."""
    first = queries.sequence * case.queries + queries.first
    start = query_head(case, queries, 0) * case.depth
    source = case.q[first : first + queries.count, start : start + case.group * case.depth]
    source = source.reshape_dim(1, (case.group, case.depth))
    shape = (case.part_depth, case.group, case.parts, queries.count)
    queries.tile = aligned_tile(shape, case.dtype)
    for part, end, height in case.pieces:
        columns = source[:, :, part * case.part_depth : part * case.part_depth + (end - part) * height]
        tile = queries.tile[0:height, :, part:end, :]
        nisa.dma_transpose(dst=tile, src=columns.reshape_dim(2, (end - part, height)))
        if case.scales is not None:
            scale = case.scales.keys[0:height, queries.head : queries.head + 1]
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)


def load_new_keys(case, head, first):
    """Load up to LOADED_BLOCKS blocks of new keys, from block `first` of them on, transposed by DMA."""
    start, end = row_range(case, first)
    columns = case.k[:, head.number * case.depth : (head.number + 1) * case.depth]
    base = head.sequence * case.new_keys
    at = case.prefix // PARTITIONS + first
    full = (end - start) // PARTITIONS
    split = start + full * PARTITIONS
    if full > 0:
        source = columns[base + start : base + split].reshape_dim(0, (full, PARTITIONS)).permute((1, 0, 2))
        place_keys(case, head.keys[:, at : at + full], source)
    if end > split:
        source = columns[base + split : base + end].reshape_dim(1, (1, case.depth))
        place_keys(case, head.keys[:, at + full : at + full + 1, :, 0 : end - split], source)


def place_keys(case, keys, source):
    """Transpose keys [key, block, D] by DMA into a tile [part of D, block, part, key]."""
    for part, end, height in case.pieces:
        columns = source[:, :, part * case.part_depth : part * case.part_depth + (end - part) * height]
        nisa.dma_transpose(
            dst=keys[0:height, :, part:end, :], src=columns.reshape_dim(2, (end - part, height))
        )


def clean_new_keys(case, head):
    """Clean the new keys of a head, as many at a time as one DMA brings, and round them to a cache with scales."""
    inverses = None if case.scales is None else case.scales.inverse_keys[:, head.number : head.number + 1]
    for first in range(0, blocks(case.new_keys), LOADED_BLOCKS):
        start, end = row_range(case, first)
        at = case.prefix // PARTITIONS + first
        full = (end - start) // PARTITIONS
        used = (end - start) % PARTITIONS
        for part, last, height in case.pieces:
            if full > 0:
                clean(case, head.keys[0:height, at : at + full, part:last, :], inverses)
            if used > 0:
                clean(case, head.keys[0:height, at + full : at + full + 1, part:last, 0:used], inverses)


def load_new_values(case, head, first):
    """Load up to LOADED_BLOCKS blocks of new values, from block `first` of them on."""
    start, end = row_range(case, first)
    columns = case.v[:, head.number * case.value_depth : (head.number + 1) * case.value_depth]
    base = head.sequence * case.new_keys
    split = end // PARTITIONS * PARTITIONS
    whole, rest = new_values(case, head, first)
    if split > start:
        count = (split - start) // PARTITIONS
        source = columns[base + start : base + split].reshape_dim(0, (count, PARTITIONS)).permute((1, 0, 2))
        nisa.dma_copy(dst=whole, src=source)
    if end > split:
        nisa.dma_copy(dst=rest, src=columns[base + split : base + end])


def clean_new_values(case, head, first, end):
    """Clean the values that load_new_values brings, and round them to a cache with scales; an agenda's step."""
    inverses = None if case.scales is None else case.scales.inverse_values[:, head.number : head.number + 1]
    for tile in new_values(case, head, first):
        if tile is not None:
            clean(case, tile, inverses)


def new_values(case, head, first):
    """Where load_new_values puts whole blocks, and a last short one; None if there are none."""
    start, end = row_range(case, first)
    at = case.prefix // PARTITIONS + first
    count = (end - start) // PARTITIONS
    used = (end - start) % PARTITIONS
    whole = None
    rest = None
    if count > 0:
        whole = head.values[:, at : at + count, 0 : case.value_depth]
    if used > 0:
        rest = head.values[0:used, at + count, 0 : case.value_depth]
    return whole, rest


def row_range(case, first):
    """First row, and the row after the last, of the blocks that one DMA brings."""
    start = first * PARTITIONS
    return start, min(case.new_keys, start + LOADED_BLOCKS * PARTITIONS)


def clean(case, tile, inverses):
    """Set elements that are NaN or infinite to 0, and round new ones to a cache whose scales have `inverses` [128, 1].

    0 * x == 0 tells finite elements. The bits of the tile, as integers, are multiplied by that 0 or 1: a product with
    the element itself would keep a NaN. 16-bit integers are exact in the float32 of the engines, 32-bit ones on GpSimd.
    """
    integer = nl.int16 if tile.dtype == nl.bfloat16 else nl.int32
    finite = nl.ndarray(tile.shape, dtype=integer, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=finite, data=tile, op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0)
    bits = tile.view(integer)
    engine = nisa.engine.gpsimd
    if case.filling and integer == nl.int16:
        engine = nisa.engine.vector
    nisa.tensor_tensor(dst=bits, data1=bits, data2=finite, op=nl.multiply, engine=engine)
    if inverses is not None and not case.stored:
        round_to_cache(tile, inverses[0 : tile.shape[0], :], case.scales.dtype)
