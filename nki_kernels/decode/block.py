"""A decode step of attention from hidden states in SBUF to hidden states in SBUF, for kernels that do more.

DMA queues: Sync triggers the loads of weights and caches, which wait for nothing; what waits for a result is triggered
by Scalar and GpSimd.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import round_to_cache
from nki_kernels.decode.hidden import reciprocal_roots, weighted_blocks
from nki_kernels.decode.loads import bring_first, take_tokens
from nki_kernels.decode.output import add_output
from nki_kernels.decode.pipeline import run
from nki_kernels.decode.projected import project
from nki_kernels.decode.rotation import Rotation, copied_heads, normed_heads, rotated_heads
from nki_kernels.decode.stages import clear_early
from nki_kernels.decode.tokens import load_first_positions
from nki_kernels.decode.work import place_tokens, prepare
from nki_kernels.tiles import PARTITIONS, ranges

EARLY_BYTES = 32768
"""Bytes per partition of caches that are loaded before w_qkv, so that nothing waits for them later."""


@dataclass
class BlockWeights(nl.NKIObject):
    """The weights around attention: of the norm [1, H], w_qkv [H, q_size + 2 * kv_size] and w_o [q_size, H]."""

    norm: object
    w_qkv: object
    w_o: object
    q_size: int
    kv_size: int


def attention_block(tile, weights, work, replica_group):
    """Norm, queries, keys and values, attention, output projection and residual of hidden states, see `hidden`."""
    sizes, step = work.sizes, work.step
    first_positions = load_first_positions(step.positions, sizes.sequences, sizes.kv_heads)
    rows = weighted_blocks(tile, weights.norm)
    scales = reciprocal_roots(tile, weights.w_qkv.shape[0], step.eps)
    rotation = None if step.cos is None else Rotation(step.angle_rows, (step.cos, step.sin), sizes)
    spans = row_spans(sizes)
    heights = []
    for first, end in spans:
        heights.append((end - first) * sizes.kv_heads)
    early = sizes.cache_bytes <= EARLY_BYTES
    if early:
        bring_first(work)
    prepare(work, first_positions)
    place_tokens(work, heights)
    if early:
        clear_early(work)
    projected = project(rows, weights.w_qkv, sizes, scales)
    if not early:
        bring_first(work)
    work.w_o = weights.w_o
    queries, keys = placed_heads(projected.heads, rotation, step, sizes)
    if step.scales is not None:
        take_scales(queries, keys, projected.values, step.scales, sizes)
    value_rows = []
    for first, end in spans:
        value_rows.append(projected.values[first:end, :])
    work.v = projected.values
    take_tokens(work, queries, keys, rows_of_keys(keys, spans, sizes), value_rows)
    run(work)
    return add_output(tile, work.o, work.output, replica_group)


def output_tile(sizes):
    """A tile for what attention gives the output projection: [D in part, part, token, head], see `finish_in_place`."""
    height = min(sizes.joined * sizes.depth, PARTITIONS)
    shape = (height, sizes.parts, sizes.tokens, sizes.heads // sizes.joined)
    return nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)


def row_spans(sizes):
    """Ranges of tokens whose rows (token, kv head) fill at most the partitions."""
    return ranges(0, sizes.tokens, PARTITIONS // sizes.kv_heads)


def placed_heads(heads, rotation, step, sizes):
    """Queries and keys [D in part, part, token, head], normed and rotated, of heads [D in part, part, head, token]."""
    results = []
    for count in (sizes.heads, sizes.kv_heads):
        shape = (heads.shape[0], sizes.parts, sizes.tokens, count)
        results.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
    if step.q_norm is not None:
        normed = nl.ndarray(heads.shape, dtype=sizes.dtype, buffer=nl.sbuf)
        for weight, first, end in (
            (step.q_norm, 0, sizes.heads),
            (step.k_norm, sizes.heads, sizes.heads + sizes.kv_heads),
        ):
            normed_heads(normed[:, :, first:end, :], heads[:, :, first:end, :], weight, step.eps)
        heads = normed
    if rotation is None:
        copied_heads(results, heads, sizes.depth)
    else:
        rotated_heads(results, heads, rotation)
    return results[0], results[1]


def take_scales(queries, keys, values, scales, sizes):
    """Multiply queries by the scales of their keys, and round keys and values to the cache.

    queries, keys: [D in part, part, token, head]. values: [token, Hk * D].
    """
    tokens, kv_heads = sizes.tokens, sizes.kv_heads
    for part in range(sizes.parts):
        height = min(PARTITIONS, sizes.depth - part * PARTITIONS)
        by_head = queries[0:height, part, :, :].reshape_dim(2, (kv_heads, sizes.share))
        factors = scales.keys[0:height, :].expand_dim(1).expand_dim(3)
        factors = factors.broadcast(1, tokens).broadcast(3, sizes.share)
        nisa.tensor_tensor(dst=by_head, data1=by_head, data2=factors, op=nl.multiply)
        inverses = scales.inverse_keys[0:height, :].expand_dim(1).broadcast(1, tokens)
        round_to_cache(keys[0:height, part, :, :], inverses, scales.dtype)
    inverses = scales.inverse_values[0:tokens, :].expand_dim(2).broadcast(2, sizes.depth)
    round_to_cache(values.reshape((tokens, kv_heads, sizes.depth)), inverses, scales.dtype)


def rows_of_keys(keys, spans, sizes):
    """Keys [D in part, part, token, head] as rows (token, head) [rows, D], a tile for each range of tokens."""
    result = []
    for first, end in spans:
        rows = (end - first) * sizes.kv_heads
        tile = nl.ndarray((rows, sizes.depth), dtype=keys.dtype, buffer=nl.sbuf)
        for part in range(sizes.parts):
            start, stop = part * PARTITIONS, min(sizes.depth, (part + 1) * PARTITIONS)
            columns = keys[0 : stop - start, part, first:end, :]
            bank = nl.ndarray((rows, stop - start), dtype=keys.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=bank, data=columns.reshape((stop - start, rows)))
            nisa.activation(dst=tile[:, start:stop], op=nl.copy, data=bank)
        result.append(tile)
    return result
