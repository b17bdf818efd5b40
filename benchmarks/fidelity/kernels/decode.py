"""Layers of a model for one token: an attention block with a cache, and a vocabulary head.

A vector of H elements is an SBUF tile [128, H / 128]: element i is on partition i % 128, in column i // 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import (
    BANK,
    PARTITIONS,
    constant,
    evacuate,
    load,
    psum,
    sbuf,
)
from benchmarks.fidelity.kernels.flash_decode import attend_by_heads, attend_in_tiles, reduced_by_trip


@dataclass(frozen=True)
class Form:
    """The choices in which versions of the attention block differ.

    width: columns of a weight tile. mode: dge_mode of the DMAs of weights and angles. spread: the DMA that loads
    cosines and sines repeats them for each head, element by element; else the instruction that uses them broadcasts
    them. repeats: how many more times keys and values are projected, as if query heads projected them for themselves.
    softmax: "rows" keeps whole rows of scores, "tiles" makes two passes over tiles of 128 positions, "again" does so
    and computes the scores again in the second, "heads" goes head by head. trips: sums over partitions go through
    HBM, as maxima do.
    """

    width: int = 2048
    mode: str = "none"
    spread: bool = False
    repeats: int = 0
    softmax: str = "rows"
    trips: bool = False


def attention_block(x, w_qkv, w_o, keys, values, angles, heads, form):
    """Return the output [128, N / 128] of an attention block for one token in HBM, with the residual added.

    Args:
        x: Hidden state of the token, [128, H / 128] in HBM; the residual is its first N / 128 columns.
        w_qkv: [H, (heads + 2 kv heads) d].
        w_o: [heads d, N]; N is H, or the columns of one core.
        keys: Cache [kv heads, d, S]; the new key is written to position 0.
        values: Cache [kv heads, S, d]; it is only read.
        angles: Cosines and sines of the token's position, [2, d, 1].
        heads: Number of query heads.
        form: Version of the block. Weights come in tiles of `form.width` columns, one DMA each.
    """
    width, mode = form.width, form.mode
    groups, _, positions = keys.shape
    columns = load(x)
    epsilon = constant((PARTITIONS, 1), 1.0e-6)
    columns = normalised(columns, epsilon)
    turning = _loaded(
        w_o[0:PARTITIONS, 0:PARTITIONS], mode
    )  # in the place of the permutation that swaps halves of a head
    waves = [_angles(angles[i], heads + groups, mode, form.spread) for i in range(2)]
    qkv = project(columns, w_qkv, width, mode)
    for _ in range(form.repeats):
        again = project(columns, w_qkv[:, heads * PARTITIONS :], width, mode)
        nisa.tensor_copy(dst=qkv[:, heads : heads + 2 * groups], src=again)
    _rotated(qkv[:, 0 : heads + groups], waves, turning)
    for group in range(groups):
        nisa.dma_copy(dst=keys[group, :, 0:1], src=qkv[:, heads + group : heads + group + 1])
    out = sbuf((PARTITIONS, heads), x.dtype)
    for group in range(groups):
        cached_keys = load(keys[group])
        cached_values = [
            load(values[group, first : first + PARTITIONS, :]) for first in range(0, positions, PARTITIONS)
        ]
        share = heads // groups
        query = normalised(qkv[:, group * share : (group + 1) * share], epsilon)
        if form.trips:
            query = _by_trips(query)
        output_view = out[:, group * share : (group + 1) * share]
        if form.softmax == "rows":
            _attend(output_view, query, cached_keys, cached_values)
        elif form.softmax == "heads":
            attend_by_heads(output_view, query, cached_keys, cached_values, form.trips)
        else:
            attend_in_tiles(output_view, query, cached_keys, cached_values, form.softmax == "again")
    result = project(out, w_o, width, mode)
    nisa.tensor_tensor(dst=result, data1=result, data2=load(x[:, 0 : result.shape[1]]), op=nl.add)
    total = nl.ndarray(result.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=total, src=result)
    return total


def _by_trips(query):
    """Return `query` after scaling each head twice more in place, by a sum over the partitions through HBM.

    The two times are those of the query and of the key that belongs to it.
    """
    for head in range(query.shape[1]):
        one = query[:, head : head + 1]
        for _ in range(2):
            scale = reduced_by_trip(evacuate(one, nl.float32), nl.add)
            nisa.tensor_scalar(dst=one, data=one, op0=nl.multiply, operand0=scale)
    return query


def _angles(angles, heads, mode, spread):
    """Load the cosines or sines [d, 1] into SBUF: repeated for each head as [128, heads] if `spread`, else [d, 1]."""
    if not spread:
        return _loaded(angles, mode)
    wide = sbuf((PARTITIONS, heads), angles.dtype)
    repeated = angles.ap(pattern=[[1, PARTITIONS], [0, heads]])
    nisa.dma_copy(dst=wide, src=repeated, dge_mode=getattr(nisa.dge_mode, mode))
    return wide


def _rotated(columns, waves, turning):
    """Apply the rotary embedding to the heads in `columns` [d, heads], in place.

    waves: SBUF tiles with the cosines and the sines, [d, 1] or [d, heads]. turning: stationary operand [128, 128] of
    the matmul that swaps the halves of each head.
    """
    bank = psum(columns.shape)
    nisa.nc_matmul(dst=bank, stationary=turning, moving=columns)
    rotated = sbuf(columns.shape, nl.float32)
    if waves[0].shape[1] == 1:
        nisa.tensor_scalar(dst=rotated, data=bank, op0=nl.multiply, operand0=_single(waves[1]))
        nisa.tensor_scalar(dst=columns, data=columns, op0=nl.multiply, operand0=_single(waves[0]))
    else:
        nisa.tensor_tensor(dst=rotated, data1=bank, data2=waves[1], op=nl.multiply)
        nisa.tensor_tensor(dst=columns, data1=columns, data2=waves[0], op=nl.multiply)
    nisa.tensor_tensor(dst=columns, data1=columns, data2=rotated, op=nl.add)


def _single(column):
    """Copy a column to a new float32 SBUF tile, because scalar operands are float32."""
    wide = sbuf(column.shape, nl.float32)
    nisa.tensor_copy(dst=wide, src=column)
    return wide


def project(columns, w, width, mode):
    """Return a vector times w [K, N] as an SBUF tile [128, N / 128]; the vector `columns` is [128, K / 128] in SBUF.

    w is loaded in tiles of `width` columns, one DMA each. Blocks of 128 columns of a tile are the stationary operand.
    """
    depth, size = w.shape
    out = sbuf((PARTITIONS, size // PARTITIONS), columns.dtype)
    if width <= PARTITIONS:
        for n in range(size // PARTITIONS):
            bank = psum((PARTITIONS, 1))
            for k in range(depth // PARTITIONS):
                tile = _loaded(
                    w[k * PARTITIONS : (k + 1) * PARTITIONS, n * PARTITIONS : (n + 1) * PARTITIONS], mode
                )
                nisa.nc_matmul(dst=bank, stationary=tile, moving=columns[:, k : k + 1], accumulate=k > 0)
            nisa.activation(dst=out[:, n : n + 1], op=nl.copy, data=bank)
        return out
    for n0 in range(0, size, width):
        last = min(size, n0 + width)
        tiles = [_loaded(w[k : k + PARTITIONS, n0:last], mode) for k in range(0, depth, PARTITIONS)]
        for n in range(n0, last, PARTITIONS):
            bank = psum((PARTITIONS, 1))
            for k in range(len(tiles)):
                stationary = tiles[k][:, n - n0 : n - n0 + PARTITIONS]
                nisa.nc_matmul(
                    dst=bank, stationary=stationary, moving=columns[:, k : k + 1], accumulate=k > 0
                )
            nisa.activation(dst=out[:, n // PARTITIONS : n // PARTITIONS + 1], op=nl.copy, data=bank)
    return out


def head(x, w, width=2048):
    """Return the logits [1, V] of one token: RMSNorm of x [128, H / 128], and its product with w [H, V].

    The largest eight logits of each `width` columns are found too; they stay in SBUF.
    """
    columns = normalised(load(x), constant((PARTITIONS, 1), 1.0e-6))
    depth, size = w.shape
    out = nl.ndarray((1, size), dtype=nl.float32, buffer=nl.shared_hbm)
    best = sbuf((1, 8 * ((size + width - 1) // width)), nl.float32)
    for n0 in range(0, size, width):
        last = min(size, n0 + width)
        tiles = [load(w[k : k + PARTITIONS, n0:last]) for k in range(0, depth, PARTITIONS)]
        row = sbuf((1, last - n0), nl.float32)
        for n in range(0, last - n0, BANK):
            end = min(last - n0, n + BANK)
            bank = psum((1, end - n))
            for k in range(len(tiles)):
                moving = tiles[k][:, n:end]
                nisa.nc_matmul(dst=bank, stationary=columns[:, k : k + 1], moving=moving, accumulate=k > 0)
            nisa.activation(dst=row[:, n:end], op=nl.copy, data=bank)
        slot = n0 // width * 8
        nisa.max8(dst=best[:, slot : slot + 8], src=row)
        nisa.dma_copy(dst=out[:, n0:last], src=row)
    return out


def _loaded(source, mode):
    """Load a tensor of HBM into a new SBUF tile and return the tile; `mode` names the dge_mode."""
    tile = sbuf(source.shape, source.dtype)
    nisa.dma_copy(dst=tile, src=source, dge_mode=getattr(nisa.dge_mode, mode))
    return tile


def normalised(columns, epsilon):
    """Return the RMSNorm of a vector, [128, H / 128] in SBUF, without gains and as a new tile.

    The sum of squares over the partitions is a matmul with ones. epsilon: SBUF tile [128, 1], added to the mean
    square.
    """
    squares = sbuf(columns.shape, nl.float32)
    total = sbuf((PARTITIONS, 1), nl.float32)
    nisa.activation_reduce(dst=squares, op=nl.square, data=columns, reduce_op=nl.add, reduce_res=total)
    ones = constant((PARTITIONS, PARTITIONS), 1.0)
    bank = psum((PARTITIONS, 1))
    nisa.nc_matmul(dst=bank, stationary=ones, moving=total)
    scale = sbuf((PARTITIONS, 1), nl.float32)
    nisa.activation(
        dst=scale, op=nl.rsqrt, data=bank, scale=1.0 / (PARTITIONS * columns.shape[1]), bias=epsilon
    )
    result = sbuf(columns.shape, columns.dtype)
    nisa.tensor_scalar(dst=result, data=columns, op0=nl.multiply, operand0=scale)
    return result


def _attend(out, query, keys, values):
    """Set `out` [d, heads] to softmax(query^T keys) times the values, for a few heads together.

    query is [d, heads] and keys [d, S], both in SBUF; values are SBUF tiles of 128 positions, [128, d].
    """
    heads = query.shape[1]
    positions = keys.shape[1]
    scores = sbuf((heads, positions), nl.float32)
    for first in range(0, positions, BANK):
        last = min(positions, first + BANK)
        bank = psum((heads, last - first))
        nisa.nc_matmul(dst=bank, stationary=query, moving=keys[:, first:last])
        nisa.activation(dst=scores[:, first:last], op=nl.copy, data=bank)
    bias = sbuf((heads, 1), nl.float32)
    nisa.tensor_reduce(dst=bias, op=nl.maximum, data=scores, axis=1, negate=True)
    weights = sbuf((heads, positions), query.dtype)
    total = sbuf((heads, 1), nl.float32)
    nisa.activation_reduce(dst=weights, op=nl.exp, data=scores, bias=bias, reduce_op=nl.add, reduce_res=total)
    inverse = sbuf((heads, 1), nl.float32)
    nisa.reciprocal(dst=inverse, data=total)
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=inverse)
    product = psum((PARTITIONS, heads))
    for i in range(len(values)):
        bank = psum((PARTITIONS, heads), weights.dtype)
        nisa.nc_transpose(dst=bank, data=weights[:, i * PARTITIONS : (i + 1) * PARTITIONS])
        moving = evacuate(bank, weights.dtype)
        nisa.nc_matmul(dst=product, stationary=values[i], moving=moving, accumulate=i > 0)
    nisa.activation(dst=out, op=nl.copy, data=product)
