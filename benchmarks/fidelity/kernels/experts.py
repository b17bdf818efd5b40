"""A mixture of experts for one token: weights of its chosen experts are fetched by index in tiles."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, load, psum, sbuf

_SWDGE = nisa.dge_mode.swdge


def experts(x, indices, weights, gate_up, down, gate_width, down_width, wide_down=False, token_first=False):
    """Return the weighted sum [1, H] of the chosen experts' outputs for one token x [1, H].

    A DMA of weights has an address that is known at run time only, so software writes its descriptors.

    Args:
        x: Token, [1, H].
        indices: Expert ids of the token, [1, K].
        weights: Routing weights, [1, K].
        gate_up: [E, H, 2 I].
        down: [E, I, H].
        gate_width: Columns of a DMA of `gate_up`, which has 128 rows.
        down_width: Columns of a DMA of `down`, which has up to 128 rows.
        wide_down: Output columns of a down projection's matmul: 512 if True, else 128.
        token_first: The token is the stationary operand of the gate and up projections, whose row is then transposed;
            else the weight tiles are stationary.
    """
    depth, double = gate_up.shape[1:]
    inner, chosen = double // 2, indices.shape[1]
    block = BANK if wide_down else PARTITIONS
    chosen_ids = sbuf((PARTITIONS, chosen), indices.dtype)
    nisa.memset(dst=chosen_ids, value=0)
    nisa.dma_copy(dst=chosen_ids[0:1, :], src=indices)
    tokens = [_column(x, first) for first in range(0, depth, PARTITIONS)]
    totals = []
    for _ in range(depth // block):
        totals.append(sbuf((1, block), nl.float32))
        nisa.memset(dst=totals[-1], value=0.0)
    for k in range(chosen):
        weight = load(weights[:, k : k + 1])
        expert = chosen_ids.ap(pattern=[[chosen, 1], [1, 1]], offset=k)
        rows = range(0, depth, PARTITIONS)
        tiles = [_fetched(gate_up, expert, first, PARTITIONS, double, gate_width) for first in rows]
        gate, up = (_by_rows if token_first else _by_columns)(tokens, tiles, inner)
        columns = []
        for i in range(len(gate)):
            curve, other = (sbuf(gate[i].shape, nl.float32) for _ in range(2))
            nisa.activation(dst=curve, op=nl.silu, data=gate[i])
            nisa.tensor_copy(dst=other, src=up[i])
            columns.append(sbuf(gate[i].shape, x.dtype))
            nisa.tensor_tensor(dst=columns[-1], data1=curve, data2=other, op=nl.multiply)
        down_tiles = [
            _fetched(down, expert, first, min(PARTITIONS, inner - first), depth, down_width)
            for first in range(0, inner, PARTITIONS)
        ]
        for n in range(depth // block):
            bank = psum((1, block))
            for i in range(len(down_tiles)):
                moving = down_tiles[i][0 : columns[i].shape[0], n * block : (n + 1) * block]
                nisa.nc_matmul(dst=bank, stationary=columns[i], moving=moving, accumulate=i > 0)
            share = sbuf((1, block), nl.float32)
            nisa.tensor_copy(dst=share, src=bank)
            nisa.tensor_scalar(dst=share, data=share, op0=nl.multiply, operand0=weight)
            nisa.tensor_tensor(dst=totals[n], data1=totals[n], data2=share, op=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for n in range(depth // block):
        row = sbuf((1, block), x.dtype)
        nisa.tensor_copy(dst=row, src=totals[n])
        nisa.dma_copy(dst=out[:, n * block : (n + 1) * block], src=row)
    return out


def _fetched(table, expert, first, rows, columns, width):
    """Return rows `first` to `first` + `rows` of one expert's matrix in `table` as an SBUF tile [128, columns].

    The DMAs have at most `width` columns each. `expert` is the access pattern of the expert's index in SBUF.
    """
    tile = sbuf((PARTITIONS, columns), table.dtype)
    for low in range(0, columns, width):
        high = min(columns, low + width)
        source = table.ap(
            pattern=[[columns, rows], [1, high - low]],
            offset=first * columns + low,
            scalar_offset=expert,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=tile[0:rows, low:high], src=source, dge_mode=_SWDGE)
    return tile


def _column(x, first):
    """Load elements `first` to `first` + 128 of a row [1, H] of HBM as an SBUF tile [128, 1].

    Software writes descriptors.
    """
    tile = sbuf((PARTITIONS, 1), x.dtype)
    nisa.dma_copy(dst=tile, src=x.ap(pattern=[[1, PARTITIONS], [1, 1]], offset=first), dge_mode=_SWDGE)
    return tile


def _by_columns(tokens, tiles, inner):
    """Return the gate and the up projection of a token as two lists of PSUM tiles [up to 128, 1], by block of outputs.

    tokens: blocks of the token, [128, 1]. tiles: weights [128, 2 * inner], one for each block of the token; they are
    the stationary operands.
    """
    banks = [psum((min(PARTITIONS, inner - i), 1)) for _ in range(2) for i in range(0, inner, PARTITIONS)]
    starts = [half + i for half in (0, inner) for i in range(0, inner, PARTITIONS)]
    for k in range(len(tiles)):
        for bank, start in zip(banks, starts):
            stationary = tiles[k][:, start : start + bank.shape[0]]
            nisa.nc_matmul(dst=bank, stationary=stationary, moving=tokens[k], accumulate=k > 0)
    return banks[: len(banks) // 2], banks[len(banks) // 2 :]


def _by_rows(tokens, tiles, inner):
    """Return the gate and the up projection as `_by_columns` does, with the token's blocks as stationary operands.

    The resulting row of products is transposed in blocks of 128.
    """
    double = 2 * inner
    row = sbuf((1, double), nl.float32)
    for first in range(0, double, BANK):
        last = min(double, first + BANK)
        bank = psum((1, last - first))
        for k in range(len(tiles)):
            nisa.nc_matmul(dst=bank, stationary=tokens[k], moving=tiles[k][:, first:last], accumulate=k > 0)
        nisa.activation(dst=row[:, first:last], op=nl.copy, data=bank)
    columns = []
    for half in (0, inner):
        for i in range(0, inner, PARTITIONS):
            turned = psum((min(PARTITIONS, inner - i), 1))
            nisa.nc_transpose(dst=turned, data=row[:, half + i : half + i + turned.shape[0]])
            columns.append(turned)
    return columns[: len(columns) // 2], columns[len(columns) // 2 :]
