"""Latents on their way to keys and values of every head: rows of a sequence, their transposes, and the two products."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.latent.output import load_columns
from nki_kernels.latent.rows import new_rows, write_rows
from nki_kernels.latent.sizes import heights
from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, load, ranges, transpose_into

GROUP_BYTES = 16384
"""Bytes per partition of one projection of a group of heads."""

STORED_POSITIONS = 2048
"""Positions of a head's keys that one DMA stores."""


class Expansion(nl.NKIObject):
    """The arguments and sizes of a launch; `count` positions of each sequence are expanded."""

    def __init__(self, kv, cache, projections, heads, prefix, block_tables):
        self.kv, self.cache, self.block_tables = kv, cache, block_tables
        self.w_uk, self.w_uv = projections
        self.heads, self.prefix = heads, prefix
        self.places, self.slots, self.tables, self.norm = None, None, None, None
        self.block, self.width = cache.shape[1], cache.shape[2]
        self.sequences, self.capacity = cache.shape[0], cache.shape[1]
        if block_tables is not None:
            self.sequences, self.capacity = block_tables.shape[0], block_tables.shape[1] * self.block
        self.dtype = kv.dtype
        self.new = kv.shape[0] // self.sequences
        self.count = prefix + self.new
        self.rank = self.w_uk.shape[1]
        self.rope = self.width - self.rank
        self.plain, self.value = self.w_uk.shape[0] // heads, self.w_uv.shape[1] // heads
        self.depth = self.rope + self.plain
        self.parts = blocks(self.rank)
        each = self.parts * max(self.plain, self.value) * (4 if self.dtype == nl.float32 else 2)
        self.group = max(1, min(heads, GROUP_BYTES // each))


def latents_of(case, sequence):
    """Write the new rows of a sequence, and transpose those of the positions that are expanded.

    Gives latents [latent in part, part, position] and rotated keys [R, 1, position].
    """
    shape = (min(case.rank, PARTITIONS), case.parts, case.count)
    latents = nl.ndarray(shape, dtype=case.dtype, buffer=nl.sbuf)
    turned = nl.ndarray((case.rope, 1, case.count), dtype=case.dtype, buffer=nl.sbuf)
    for first, last in ranges(0, case.new):
        start, end = sequence * case.new + first, sequence * case.new + last
        cos, sin = case.tables
        weight, eps = case.norm
        rows = new_rows(case.kv[start:end, :], weight, eps, case.places[start:end, :], cos, sin)
        write_rows(case.cache, rows, new_places(case, sequence, start, end))
        if case.prefix == 0:
            transpose_rows(case, latents, turned, first, rows)
    if case.prefix > 0:
        for first, last in ranges(0, case.count):
            transpose_rows(case, latents, turned, first, cached_rows(case, sequence, first, last))
    return latents, turned


def transpose_rows(case, latents, turned, first, rows):
    """Rows [position, W] to their places, from position `first` on."""
    transpose_into(latents, 0, first, rows[:, 0 : case.rank])
    transpose_into(turned, 0, first, rows[:, case.rank : case.width])


def new_places(case, sequence, start, end):
    """Where the cache takes new tokens start … end of a sequence, in its rows: [tokens, 1] int32."""
    if case.slots is not None:
        return load(case.slots[start:end, :], nl.int32)
    at = load(case.places[start:end, :], nl.int32)
    result = nl.ndarray(at.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=at, op0=nl.add, operand0=float(sequence * case.capacity))
    return result


def cached_rows(case, sequence, first, last):
    """Rows first … last of a sequence's positions, from the cache; zeros behind its end."""
    rows = nl.ndarray((last - first, case.width), dtype=case.dtype, buffer=nl.sbuf)
    if last > case.capacity:
        nisa.memset(dst=rows, value=0.0)
    last = min(last, case.capacity)
    if first >= last:
        return rows
    if case.block_tables is None:
        nisa.dma_copy(dst=rows[0 : last - first, :], src=case.cache[sequence, first:last, :])
        return rows
    block = case.block
    used = blocks(last - first, block)
    pages = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    table = case.block_tables[sequence : sequence + 1, :]
    source = table.ap(pattern=[[1, used], [0, block], [1, 1]], offset=first // block)
    nisa.dma_copy(dst=pages[0 : used * block, :], src=source)
    inside = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=inside, pattern=[[0, 1]], channel_multiplier=1)
    nisa.tensor_scalar(dst=inside, data=inside, op0=nl.bitwise_and, operand0=block - 1)
    numbers = nl.ndarray((last - first, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=numbers,
        data=pages[0 : last - first, :],
        op0=nl.multiply,
        operand0=float(block),
        op1=nl.add,
        operand1=inside[0 : last - first, :],
    )
    flat = case.cache.reshape((case.cache.shape[0] * block, case.width))
    source = flat.ap(pattern=[[case.width, last - first], [1, case.width]], vector_offset=numbers)
    nisa.dma_copy(dst=rows[0 : last - first, :], src=source)
    return rows


def load_projections(case, first, last):
    """Both projections of some heads with latents on the partitions: [latent in part, part, column]."""
    shape = (min(case.rank, PARTITIONS), case.parts, (last - first) * case.plain)
    keys = nl.ndarray(shape, dtype=case.dtype, buffer=nl.sbuf)
    for head in range(first, last):
        rows = load(case.w_uk[head * case.plain : (head + 1) * case.plain, :], case.w_uk.dtype)
        transpose_into(keys, 0, (head - first) * case.plain, cast(rows, case.dtype))
    return keys, load_columns(case.w_uv, first * case.value, last * case.value, case)


def expand_heads(case, keys, values, latents, turned, weights):
    """Store keys [head, D, position] and values [head, position, V] of a group of heads of one sequence."""
    heads = keys.shape[0]
    rotated = turned[:, 0, :].expand_dim(1).broadcast(1, heads)
    nisa.dma_copy(dst=keys[:, 0 : case.rope, :].permute((1, 0, 2)), src=rotated)
    for head in range(heads):
        columns = (head * case.plain, (head + 1) * case.plain)
        for begin, stop in ranges(0, case.count, STORED_POSITIONS):
            plain = nl.ndarray((case.plain, stop - begin), dtype=case.dtype, buffer=nl.sbuf)
            for first, last in ranges(begin, stop, BANK):
                target = plain[:, first - begin : last - begin]
                product(case, target, (weights[0], columns), (latents, (first, last)))
            nisa.dma_copy(dst=keys[head, case.rope : case.depth, begin:stop], src=plain)
    width = heads * case.value
    for first, last in ranges(0, case.count):
        rows = nl.ndarray((last - first, width), dtype=case.dtype, buffer=nl.sbuf)
        for start, end in ranges(0, width, BANK):
            product(case, rows[:, start:end], (latents, (first, last)), (weights[1], (start, end)))
        source = rows.reshape((last - first, heads, case.value))
        nisa.dma_copy(dst=values[:, first:last, :].permute((1, 0, 2)), src=source)


def product(case, target, stationary, moving):
    """The product over latents of two tiles [latent in part, part, column], each in a range of its columns."""
    left, (first, last) = stationary
    right, (start, end) = moving
    bank = nl.ndarray(target.shape, dtype=nl.float32, buffer=nl.psum)
    for begin, stop, height in heights(case.rank):
        for part in range(begin, stop):
            nisa.nc_matmul(
                dst=bank,
                stationary=left[0:height, part, first:last],
                moving=right[0:height, part, start:end],
                accumulate=part > 0,
            )
    if first % (2 * PARTITIONS) == 0:
        nisa.tensor_copy(dst=target, src=bank)
    else:
        nisa.activation(dst=target, op=nl.copy, data=bank)
