"""The attention block of a decode step, from hidden states in SBUF to hidden states in SBUF: norm to output projection.

`attention_block_decode` and `decoder_layer_decode` call `compute_attention_block` where the hidden states fit into
SBUF, see `decode.hidden` for their layout.

DMA queues: Sync triggers the loads of weights and caches, which wait for nothing; what waits for a result is
triggered by Scalar and GpSimd.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import round_to_cache
from nki_kernels.decode.column_scales import ProjectionScales
from nki_kernels.decode.group_loads import GroupLoads
from nki_kernels.decode.launch import SeenKeys, TokenRows
from nki_kernels.decode.output import OutputWeights, add_output
from nki_kernels.decode.pipeline import CLEARED_IN, clear_pieces, run
from nki_kernels.decode.projected import project, start_packed_product
from nki_kernels.decode.rotation import Rotation, copy_heads, normalise_heads, rotate_heads
from nki_kernels.decode.tokens import load_first_positions
from nki_kernels.nibbles import has_paired_runs
from nki_kernels.norms.norm import Norm
from nki_kernels.norms.runs import compute_reciprocal_roots, weight_runs
from nki_kernels.tiles import PARTITIONS, ranges
from nki_kernels.weights import WeightMatrix

EARLY_BYTES = 32768
"""Bytes per partition of caches that are loaded before w_qkv, so that nothing waits for them later."""


@dataclass
class BlockWeights(nl.NKIObject):
    """Weights around attention in HBM: the norm before it, w_qkv [H, q_size + 2 * kv_size] and w_o [q_size, H]."""

    norm: Norm
    w_qkv: WeightMatrix
    w_o: WeightMatrix
    q_size: int
    kv_size: int

    def is_paired(self):
        """Return whether hidden states lie in paired runs, because w_qkv has 4 bits."""
        return self.w_qkv.nibbles is not None

    def can_meet_runs(self, sizes):
        """Return whether weights of 4 bits can meet hidden states in runs and heads in tiles of 128 elements."""
        if self.w_qkv.nibbles is not None and not has_paired_runs(self.w_qkv.nibbles.depth):
            return False
        depth = sizes.joined * sizes.depth
        return (
            self.w_o.nibbles is None or depth == PARTITIONS or (depth < PARTITIONS and depth == self.q_size)
        )


def compute_attention_block(tile, weights, launch, replica_group, following=None):
    """Return `tile` plus the output projection of attention over the normed `tile`, as a new SBUF tile of its shape.

    Also writes attention's outputs to `launch.o` and stores the new keys and values in the caches.

    Caches of up to EARLY_BYTES per partition are loaded before w_qkv, and the first group's unseen values are zeroed
    then. Larger caches are loaded after w_qkv.

    Args:
        tile: hidden states in SBUF, [partition, row, element] as `decode.hidden` lays them out.
        weights: `BlockWeights`.
        launch: a `DecodeLaunch` of one core, whose `o` is a tile of `create_output_tile`.
        replica_group: ranks over which the output projection is summed, or None for one rank.
        following: `FeedForwardOperands` of the block that follows, or None. Its scales are loaded behind the first
            products, which need not wait for them.
    """
    sizes, step = launch.sizes, launch.step
    # Positions are few bytes, but the first masks wait for them, so they are loaded ahead of caches and weights.
    first_positions = load_first_positions(step.positions, sizes.sequences, sizes.kv_heads)
    hidden_rows = weight_runs(tile, weights.norm, weights.is_paired())
    # Scalar triggers the loads of scales before it waits for the squares of hidden states.
    scales = None if weights.w_qkv.scales is None else ProjectionScales(weights.w_qkv.scales, sizes)
    roots = compute_reciprocal_roots(tile, weights.w_qkv.count_rows(), weights.norm)
    output_weights = OutputWeights(weights.w_o, sizes, weights.is_paired())
    started = start_packed_product(hidden_rows, weights.w_qkv, sizes)
    if weights.w_o.nibbles is not None and weights.is_paired():
        # The Vector engine unpacks w_o while products with w_qkv run.
        output_weights.load_first_heads()
        output_weights.unpack()
    rotation = None if step.cos is None else Rotation(step, sizes)
    spans = ranges(0, sizes.tokens, PARTITIONS // sizes.kv_heads)
    heights = []
    for first, end in spans:
        heights.append((end - first) * sizes.kv_heads)
    early = sizes.cache_bytes <= EARLY_BYTES
    loads = GroupLoads(launch) if early else None
    seen_keys = SeenKeys(launch, first_positions)
    key_addresses, value_addresses = launch.cache.compute_new_addresses(launch, step.positions, heights)
    if early:
        clear_pieces(launch, loads, seen_keys, 0, (0, CLEARED_IN))
    projected = project(hidden_rows, weights.w_qkv, sizes, roots, scales, started)
    if following is not None:
        following.load_scales()
    if not early:
        loads = GroupLoads(launch)
    queries, keys = place_heads(projected.heads, rotation, step, sizes)
    if step.scales is not None:
        apply_scales(queries, keys, projected.values, step.scales, sizes)
    value_rows = []
    for first, end in spans:
        value_rows.append(projected.values[first:end, :])
    key_rows = transpose_key_rows(keys, spans, sizes)
    rows = TokenRows(queries, keys, projected.values, key_rows, value_rows, key_addresses, value_addresses)
    loads.take_tokens(rows, seen_keys, output_weights)
    run(launch, loads, seen_keys, 1 if early else 0)
    return add_output(tile, launch.o, output_weights, replica_group, following)


def create_output_tile(sizes):
    """Return an uninitialised SBUF tile for the outputs of attention: [D in tile, tile, token, head] in `sizes.dtype`.

    Element d of a head is on partition d % 128 of tile d // 128. Heads of 32 or 64 elements share the partitions:
    `sizes.joined` neighbouring heads follow one another along axis 0, and the last axis has Hq / `sizes.joined`
    entries.
    """
    height = min(sizes.joined * sizes.depth, PARTITIONS)
    shape = (height, sizes.depth_tiles, sizes.tokens, sizes.heads // sizes.joined)
    return nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)


def place_heads(heads, rotation, step, sizes):
    """Return queries and keys as two new SBUF tiles [D in tile, tile, token, head], normalised and rotated if asked.

    Args:
        heads: [D in tile, tile, head, token] in SBUF, the query heads before the key heads.
        rotation: the `Rotation` that turns all heads, or None to copy them.
        step: a `DecodeStep`; its q_norm and k_norm normalise the heads unless q_norm is None.
    """
    results = []
    for count in (sizes.heads, sizes.kv_heads):
        shape = (heads.shape[0], sizes.depth_tiles, sizes.tokens, count)
        results.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
    if step.q_norm is not None:
        normed = nl.ndarray(heads.shape, dtype=sizes.dtype, buffer=nl.sbuf)
        for norm, first, end in (
            (step.q_norm, 0, sizes.heads),
            (step.k_norm, sizes.heads, sizes.heads + sizes.kv_heads),
        ):
            normalise_heads(normed[:, :, first:end, :], heads[:, :, first:end, :], norm)
        heads = normed
    if rotation is None:
        copy_heads(results, heads, sizes.depth)
    else:
        rotate_heads(results, heads, rotation)
    return results[0], results[1]


def apply_scales(queries, keys, values, scales, sizes):
    """Change queries, keys and values in SBUF in place for a cache with scales.

    Queries are multiplied by the scale of the keys that they meet. Keys and values are replaced by the numbers that
    the cache stores: divided by their head's scale, clipped and rounded.

    Args:
        queries: [D in tile, tile, token, query head].
        keys: [D in tile, tile, token, kv head].
        values: [token, Hk * D].
        scales: `CacheScales`.
    """
    tokens, kv_heads = sizes.tokens, sizes.kv_heads
    for d in range(sizes.depth_tiles):
        height = min(PARTITIONS, sizes.depth - d * PARTITIONS)
        grouped = queries[0:height, d, :, :].reshape_dim(2, (kv_heads, sizes.share))
        factors = scales.keys[0:height, :].expand_dim(1).expand_dim(3)
        factors = factors.broadcast(1, tokens).broadcast(3, sizes.share)
        nisa.tensor_tensor(dst=grouped, data1=grouped, data2=factors, op=nl.multiply)
        inverses = scales.inverse_keys[0:height, :].expand_dim(1).broadcast(1, tokens)
        round_to_cache(keys[0:height, d, :, :], inverses, scales.dtype)
    inverses = scales.inverse_values[0:tokens, :].expand_dim(2).broadcast(2, sizes.depth)
    round_to_cache(values.reshape((tokens, kv_heads, sizes.depth)), inverses, scales.dtype)


def transpose_key_rows(keys, spans, sizes):
    """Return keys as rows [token * Hk + head, D] in SBUF: a list with one tile for each range of tokens.

    Args:
        keys: [D in tile, tile, token, head] in SBUF.
        spans: ranges (first token, end) of at most 128 rows each.
    """
    result = []
    for first, end in spans:
        rows = (end - first) * sizes.kv_heads
        tile = nl.ndarray((rows, sizes.depth), dtype=keys.dtype, buffer=nl.sbuf)
        for d in range(sizes.depth_tiles):
            start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
            columns = keys[0 : stop - start, d, first:end, :]
            bank = nl.ndarray((rows, stop - start), dtype=keys.dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=bank, data=columns.reshape((stop - start, rows)))
            nisa.activation(dst=tile[:, start:stop], op=nl.copy, data=bank)
        result.append(tile)
    return result
