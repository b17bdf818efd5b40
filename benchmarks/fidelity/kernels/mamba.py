"""The selective scan of Mamba for one batch element.

h_t = exp(delta_t a) h_(t-1) + delta_t u_t b_t, y_t = sum of c_t h_t. The sum is over the states. delta and u are
[channels, tokens], a [channels, states], b and c [states, tokens], and the result y is [channels, tokens]; all are in
HBM.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, broadcast, constant, load, ones_row, sbuf


def states_outermost(delta, u, a, b, c):
    """Return the scan with the loop over states outermost.

    Delta and u are loaded and multiplied again for each state.
    """
    channels, tokens = delta.shape
    states = a.shape[1]
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    zero, ones = constant((PARTITIONS, 1), 0.0), ones_row(nl.float32)
    sums = [constant((PARTITIONS, tokens), 0.0) for _ in range(0, channels, PARTITIONS)]
    for state in range(states):
        for row in range(0, channels, PARTITIONS):
            rows = slice(row, row + PARTITIONS)
            steps, inputs = load(delta[rows, :]), load(u[rows, :])
            rate = load(a[rows, state : state + 1])
            grown = sbuf(steps.shape, nl.float32)
            nisa.tensor_tensor(dst=grown, data1=steps, data2=inputs, op=nl.multiply)
            carried = 0.0
            for first in range(0, tokens, BANK):
                span = slice(first, min(tokens, first + BANK))
                pair = load(b[state : state + 1, span]), load(c[state : state + 1, span])
                total = sums[row // PARTITIONS][:, span]
                spread = [broadcast(row, ones) for row in pair]
                carried = _state(total, steps[:, span], grown[:, span], rate, spread, zero, carried)
    for row in range(0, channels, PARTITIONS):
        nisa.dma_copy(dst=out[row : row + PARTITIONS, :], src=sums[row // PARTITIONS])
    return out


def channels_outermost(delta, u, a, b, c, chunk=None):
    """Return the scan with the loop over channels outermost; delta and u are loaded once.

    chunk: tokens that are loaded at a time, None for all. A chunk longer than 512 tokens is one instruction long, and
    its rows of b and c are broadcast into SBUF. A shorter one has b and c broadcast into PSUM.
    """
    channels, tokens = delta.shape
    states = a.shape[1]
    chunk = tokens if chunk is None else chunk
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    zero, ones = constant((PARTITIONS, 1), 0.0), ones_row(nl.float32)
    for row in range(0, channels, PARTITIONS):
        rows = slice(row, row + PARTITIONS)
        rates = load(a[rows, :])
        carried = [0.0] * states
        for start in range(0, tokens, chunk):
            end = min(tokens, start + chunk)
            total = constant((PARTITIONS, end - start), 0.0)
            steps, inputs = load(delta[rows, start:end]), load(u[rows, start:end])
            grown = sbuf(steps.shape, nl.float32)
            nisa.tensor_tensor(dst=grown, data1=steps, data2=inputs, op=nl.multiply)
            for state in range(states):
                rate = rates[:, state : state + 1]
                if end - start > BANK:
                    pair = [_spread(row[state : state + 1, start:end], ones) for row in (b, c)]
                    _state(total, steps, grown, rate, pair, zero, carried[state])
                    continue
                for first in range(start, end, BANK):
                    span = slice(first, min(end, first + BANK))
                    local = slice(first - start, min(end, first + BANK) - start)
                    pair = load(b[state : state + 1, span]), load(c[state : state + 1, span])
                    spread = [broadcast(row, ones) for row in pair]
                    carried[state] = _state(
                        total[:, local], steps[:, local], grown[:, local], rate, spread, zero, carried[state]
                    )
            nisa.dma_copy(dst=out[rows, start:end], src=total)
    return out


def _spread(row, ones):
    """Broadcast a row [1, n] of HBM to every partition of a new float32 SBUF tile, 512 columns at a time."""
    columns = row.shape[1]
    narrow = load(row)
    wide = sbuf((PARTITIONS, columns), nl.float32)
    for first in range(0, columns, BANK):
        last = min(columns, first + BANK)
        nisa.activation(dst=wide[:, first:last], op=nl.copy, data=broadcast(narrow[:, first:last], ones))
    return wide


def _state(total, delta, grown, rate, pair, zero, initial):
    """Add one state's contribution to `total` and return the last column of the state, [128, 1].

    delta, grown: step sizes and step sizes times u, [128, tokens]. rate: the state's column of a. pair: rows of b and
    c on every partition. zero: bias [128, 1]. initial: state before the first token, a number or [128, 1].
    """
    shape = delta.shape
    decay, fed, state, read = [sbuf(shape, nl.float32) for _ in range(4)]
    nisa.activation(dst=decay, op=nl.exp, data=delta, scale=rate, bias=zero)
    nisa.tensor_tensor(dst=fed, data1=grown, data2=pair[0], op=nl.multiply)
    nisa.tensor_tensor_scan(dst=state, data0=decay, data1=fed, initial=initial, op0=nl.multiply, op1=nl.add)
    nisa.tensor_tensor(dst=read, data1=state, data2=pair[1], op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=read, op=nl.add)
    return state[:, shape[1] - 1 : shape[1]]
