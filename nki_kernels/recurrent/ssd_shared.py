"""What all packs of heads share of a chunk of `ssd`, in phases."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.projection.normalised_rows import transpose_rows
from nki_kernels.recurrent.ssd_between import SumsInParts
from nki_kernels.recurrent.ssd_heads import exponential

REPEATED = 3
"""Packs of a group from which on its scores are repeated for each head, which the Vector engine reads faster."""


def load_aside(source):
    """A tile of rows from HBM, in another queue than what is needed at once."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    transfer(tile, source, SCALAR)
    return tile


def bring_in(chunk):
    """Rows of u and of the gate."""
    sizes = chunk.sizes
    start, end = chunk.rows
    chunk.into_out = load_aside(chunk.u[start:end, sizes.inner :])
    chunk.x = load_aside(chunk.u[start:end, sizes.left : sizes.left + sizes.width])
    chunk.raw = load_aside(chunk.gate[start:end, sizes.gate_first : sizes.gate_first + sizes.width])


def bring_states(chunk):
    """The states of a sequence, with its first chunk."""
    if chunk.first == 0:
        chunk.state.load()


def first_part(chunk):
    """Sums of decays with the heads on the partitions, and their first parts."""
    tokens = slice(0, chunk.tokens)
    chunk.before = chunk.constants.before[tokens, tokens]
    chunk.after = chunk.constants.after[tokens, tokens]
    chunk.one = chunk.constants.identity[tokens, tokens]
    if chunk.sizes.narrow:
        one = chunk.constants.wide_identity[tokens, tokens]
        chunk.sides = SumsInParts(chunk.least, chunk.minus, chunk.step_logs, chunk.before, one)
        chunk.least, chunk.minus, chunk.step_logs = None, None, None


def next_part(chunk):
    """The next parts of these sums; the last ones on their way to HBM."""
    if chunk.sizes.narrow:
        chunk.sides.next()


def reach(chunk):
    """Decays from the beginning of the chunk to each token."""
    chunk.reached = exponential(chunk.summed(chunk.before))


def pass_by(chunk):
    """Decays over the chunk."""
    chunk.passed = exponential(chunk.summed(chunk.constants.ones[0 : chunk.tokens, :]))


def leave_over(chunk):
    """Decays from each token to the end of the chunk, times its time step."""
    chunk.left_over = exponential(chunk.summed(chunk.after))
    nisa.tensor_tensor(dst=chunk.left_over, data1=chunk.left_over, data2=chunk.times, op=nl.multiply)


def turn_over(chunk):
    """into and out of every group with n on the partitions; into in float32."""
    tokens, groups, sizes = chunk.tokens, chunk.sizes.groups, chunk.sizes
    chunk.across = nl.ndarray((sizes.states, 2 * groups, tokens), dtype=sizes.dtype, buffer=nl.sbuf)
    transpose_rows(chunk.across, 0, chunk.into_out, 2)
    chunk.into = chunk.into_out
    if sizes.dtype != nl.float32:
        chunk.into = nl.ndarray((tokens, groups * sizes.states), dtype=nl.float32, buffer=nl.sbuf)
        rows = chunk.into_out[:, 0 : groups * sizes.states]
        nisa.tensor_copy(dst=chunk.into, src=rows, engine=nisa.engine.gpsimd)
    chunk.into_out = None


def score(chunk):
    """out into^T of every group, transposed, 0 where the key is behind the query: [key, group, head, query].

    A group of many packs has its scores once for each head of a pack.
    """
    tokens, groups, sizes = chunk.tokens, chunk.sizes.groups, chunk.sizes
    copies = sizes.most if sizes.narrow and sizes.heads >= REPEATED * groups * sizes.most else 1
    dtype = sizes.dtype if sizes.narrow else nl.float32
    chunk.scores = nl.ndarray((tokens, groups, copies, tokens), dtype=dtype, buffer=nl.sbuf)
    for group in range(groups):
        bank = nl.ndarray((tokens, tokens), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=bank,
            stationary=chunk.across[:, group, :],
            moving=chunk.across[:, groups + group, :],
            accumulate=False,
        )
        scores = chunk.scores[:, group, :, :]
        nisa.tensor_tensor(dst=scores[:, 0, :], data1=bank, data2=chunk.before, op=nl.multiply)
        if copies > 1:
            first = scores[:, 0:1, :].broadcast(1, copies - 1)
            nisa.tensor_copy(dst=scores[:, 1:copies, :], src=first, engine=nisa.engine.gpsimd)


def open_gates(chunk):
    """silu of the gates in float32."""
    chunk.gates = nl.ndarray(chunk.raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=chunk.gates, op=nl.silu, data=chunk.raw)
    chunk.raw = None


PHASES = (
    bring_in,
    bring_states,
    first_part,
    next_part,
    next_part,
    reach,
    pass_by,
    leave_over,
    open_gates,
    turn_over,
    score,
)
"""What all packs of a chunk share, a phase with each pack of the chunk before."""

SUMMED = 5
"""Phases until the sums of decays are on their way to HBM."""
