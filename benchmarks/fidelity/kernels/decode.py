"""Layers of a model for one token: products of a vector with matrices read once, and attention with a cache."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, constant, evacuate, load, psum, sbuf


def attention_block(x, w_qkv, w_o, keys, values, heads, width, mode="none"):
    """QKV projection, attention of one token with its cache, output projection and residual.

    x [H / 128 on the free axis, 128 partitions] as [128, H / 128]; w_qkv [H, (heads + 2 kv) d]; w_o [heads d, H]; keys
    [kv, d, S], values [kv, S, d]. Weights come in tiles of `width` columns, one DMA each.
    """
    groups, _, positions = keys.shape
    columns = load(x)
    epsilon = constant((PARTITIONS, 1), 1.0e-6)
    columns = _normalised(columns, epsilon)
    qkv = project(columns, w_qkv, width, mode)
    out = sbuf((PARTITIONS, heads), x.dtype)
    for group in range(groups):
        cached_keys = load(keys[group])
        cached_values = [
            load(values[group, first : first + PARTITIONS, :]) for first in range(0, positions, PARTITIONS)
        ]
        share = heads // groups
        query = _normalised(qkv[:, group * share : (group + 1) * share], epsilon)
        _attend(out[:, group * share : (group + 1) * share], query, cached_keys, cached_values)
    result = project(out, w_o, width, mode)
    nisa.tensor_tensor(dst=result, data1=result, data2=load(x), op=nl.add)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=total, src=result)
    return total


def project(columns, w, width, mode):
    """A vector [128, K / 128] times w [K, N]: as [128, N / 128].

    Narrow tiles are stationary and give their part of the result as a column. Wide ones move past the vector, and the
    row that comes out is turned by transposes.
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
    """RMSNorm of one token, its product with w [H, V], and the largest logits."""
    columns = _normalised(load(x), constant((PARTITIONS, 1), 1.0e-6))
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
        at = n0 // width * 8
        nisa.max8(dst=best[:, at : at + 8], src=row)
        nisa.dma_copy(dst=out[:, n0:last], src=row)
    return out


def experts(x, rows, gate_up, down, chosen, gate_width, down_width):
    """The chosen experts of a mixture for one token: gate_up [E, H, 2 I], down [E, I, H], fetched by index.

    x [128, H / 128]; rows [128, 1] holds the row numbers that indirect loads address.
    """
    count, depth, double = gate_up.shape
    inner = double // 2
    columns = load(x)
    places = load(rows)
    gate_up = gate_up.reshape((count * depth, double))
    down = down.reshape((count * inner, depth))
    total = sbuf((PARTITIONS, depth // PARTITIONS), nl.float32)
    nisa.memset(dst=total, value=0.0)
    for _ in range(chosen):
        tiles = [_gathered(gate_up, places, double, gate_width) for _ in range(depth // PARTITIONS)]
        act = sbuf((PARTITIONS, (inner + PARTITIONS - 1) // PARTITIONS), columns.dtype)
        for i in range(0, inner, PARTITIONS):
            high = min(PARTITIONS, inner - i)
            gate, up = psum((high, 1)), psum((high, 1))
            for half, bank in ((0, gate), (inner, up)):
                for k in range(len(tiles)):
                    nisa.nc_matmul(
                        dst=bank,
                        stationary=_used(tiles[k], half + i, high, columns.dtype),
                        moving=columns[:, k : k + 1],
                        accumulate=k > 0,
                    )
            curve = sbuf((high, 1), nl.float32)
            nisa.activation(dst=curve, op=nl.silu, data=gate)
            place = act[0:high, i // PARTITIONS : i // PARTITIONS + 1]
            nisa.tensor_tensor(dst=place, data1=curve, data2=up, op=nl.multiply)
        parts = [_gathered(down, places, depth, down_width) for _ in range(act.shape[1])]
        product = psum((PARTITIONS, depth // PARTITIONS))
        for n in range(depth // PARTITIONS):
            for i in range(len(parts)):
                high = min(PARTITIONS, inner - i * PARTITIONS)
                stationary = _used(parts[i], n * PARTITIONS, PARTITIONS, columns.dtype)
                nisa.nc_matmul(
                    dst=product[:, n : n + 1],
                    stationary=stationary[0:high, :],
                    moving=act[0:high, i : i + 1],
                    accumulate=i > 0,
                )
        nisa.tensor_tensor(dst=total, data1=total, data2=product, op=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    result = sbuf(x.shape, x.dtype)
    nisa.tensor_copy(dst=result, src=total)
    nisa.dma_copy(dst=out, src=result)
    return out


def paired_experts(x, rows, blocks, loads, matmuls, tokens):
    """`loads` blocks [128, n] fetched by index, one DMA each, and `matmuls` small products of each with the tokens.

    The products of a block accumulate in PSUM and are scaled after that; x [128, tokens].
    """
    moving = load(x)
    places = load(rows)
    total = sbuf((PARTITIONS, tokens), nl.float32)
    nisa.memset(dst=total, value=0.0)
    scale = constant((PARTITIONS, 1), 1.0)
    for _ in range(loads):
        tile = _gathered(blocks, places, blocks.shape[1], blocks.shape[1])
        bank = psum((PARTITIONS, tokens))
        for i in range(matmuls):
            stationary = tile[:, i * PARTITIONS : (i + 1) * PARTITIONS]
            nisa.nc_matmul(dst=bank, stationary=stationary, moving=moving, accumulate=i > 0)
        nisa.scalar_tensor_tensor(
            dst=total, data=bank, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=total
        )
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=total)
    return out


def _loaded(source, mode):
    tile = sbuf(source.shape, source.dtype)
    nisa.dma_copy(dst=tile, src=source, dge_mode=getattr(nisa.dge_mode, mode))
    return tile


def _gathered(table, places, columns, width):
    """128 rows of `columns` elements of an expert table, by row numbers, in DMAs of `width` columns."""
    tile = sbuf((PARTITIONS, columns), table.dtype)
    for first in range(0, columns, width):
        last = min(columns, first + width)
        source = table.ap(
            pattern=[[columns, PARTITIONS], [1, last - first]],
            offset=first,
            vector_offset=places,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=tile[:, first:last], src=source)
    return tile


def _used(tile, first, size, dtype):
    """Columns of a loaded tile in the dtype that is multiplied: fp8 weights are widened before each matmul."""
    part = tile[:, first : first + size]
    if tile.dtype == dtype:
        return part
    wide = sbuf(part.shape, dtype)
    nisa.tensor_copy(dst=wide, src=part)
    return wide


def _normalised(columns, epsilon):
    """RMSNorm of a vector that lies across the partitions: squares, their sum by a matmul with ones, rsqrt, scale."""
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
    """Softmax of the scores of a few heads [d, heads] with the cached keys [d, S], times the values."""
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
