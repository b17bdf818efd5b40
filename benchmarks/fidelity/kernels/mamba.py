"""The selective scan of Mamba for one batch: delta and u [channels, tokens], a [channels, states], b and c
[states, tokens]; per state exp(delta a), delta u b, a scan along the tokens, times c, summed over the states."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, constant, load, load_repeated, sbuf


def states_outermost(delta, u, a, b, c):
    """The loop over states outside: delta and u are loaded again for every state."""
    channels, tokens = delta.shape
    states = a.shape[1]
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    zero = constant((PARTITIONS, 1), 0.0)
    sums = [constant((PARTITIONS, tokens), 0.0) for _ in range(0, channels, PARTITIONS)]
    for state in range(states):
        for row in range(0, channels, PARTITIONS):
            rows = slice(row, row + PARTITIONS)
            tiles = load(delta[rows, :]), load(u[rows, :])
            rate = load(a[rows, state : state + 1])
            scanned = _state(tiles, rate, b[state : state + 1, :], c[state : state + 1, :], zero, 0.0)[0]
            total = sums[row // PARTITIONS]
            nisa.tensor_tensor(dst=total, data1=total, data2=scanned, op=nl.add)
    for row in range(0, channels, PARTITIONS):
        nisa.dma_copy(dst=out[row : row + PARTITIONS, :], src=sums[row // PARTITIONS])
    return out


def channels_outermost(delta, u, a, b, c, part=None):
    """The loop over channels outside: delta and u are loaded once; `part` tokens at a time, or all of them."""
    channels, tokens = delta.shape
    states = a.shape[1]
    part = tokens if part is None else part
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    zero = constant((PARTITIONS, 1), 0.0)
    for row in range(0, channels, PARTITIONS):
        rows = slice(row, row + PARTITIONS)
        rates = load(a[rows, :])
        total = constant((PARTITIONS, tokens), 0.0)
        tiles = load(delta[rows, :]), load(u[rows, :])
        for state in range(states):
            rate = rates[:, state : state + 1]
            initial = 0.0
            for first in range(0, tokens, part):
                span = slice(first, min(tokens, first + part))
                pair = tiles[0][:, span], tiles[1][:, span]
                scanned, initial = _state(
                    pair, rate, b[state : state + 1, span], c[state : state + 1, span], zero, initial
                )
                nisa.tensor_tensor(dst=total[:, span], data1=total[:, span], data2=scanned, op=nl.add)
        nisa.dma_copy(dst=out[rows, :], src=total)
    return out


def _state(tiles, rate, b, c, zero, initial):
    delta, u = tiles
    shape = delta.shape
    decay, grown, state, read = [sbuf(shape, nl.float32) for _ in range(4)]
    nisa.activation(dst=decay, op=nl.exp, data=delta, scale=rate, bias=zero)
    nisa.tensor_tensor(dst=grown, data1=delta, data2=u, op=nl.multiply)
    nisa.tensor_tensor(dst=grown, data1=grown, data2=load_repeated(b, PARTITIONS), op=nl.multiply)
    nisa.tensor_tensor_scan(
        dst=state, data0=decay, data1=grown, initial=initial, op0=nl.multiply, op1=nl.add
    )
    nisa.tensor_tensor(dst=read, data1=state, data2=load_repeated(c, PARTITIONS), op=nl.multiply)
    return read, state[:, shape[1] - 1 : shape[1]]
