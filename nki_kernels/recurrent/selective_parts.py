"""Chunks and units of prompts of the selective scan with their tiles, and their states in HBM."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC
from nki_kernels.projection.products import add_products
from nki_kernels.projection.row_groups import blocks_tile
from nki_kernels.recurrent.selective_feed import block_diagonals, scale_inputs, transpose_inputs
from nki_kernels.tiles import MASKED, PARTITIONS, blocks, filled, load, ranges, transpose_rows
from nki_kernels.weights import WeightMatrix, load_blocks


@dataclass
class ScanWeights(nl.NKIObject):
    """Weights of the local channels, and constants, in SBUF.

    rank: of time steps. w_dt: [r in block, block, channel]. dt_bias, d: [c in tile, tile, 1]. rates: -exp(a_log),
    [c in tile, tile, state] float32. ones: [1, 128]. identity: of a tile of channels. selector: of states.
    """

    rank: int
    w_dt: nl.NkiTensor
    dt_bias: nl.NkiTensor
    d: nl.NkiTensor
    rates: nl.NkiTensor
    ones: nl.NkiTensor
    identity: nl.NkiTensor
    selector: nl.NkiTensor


@dataclass
class ChunkOperands(nl.NKIObject):
    """What all units of a chunk take from its rows.

    steps: [r in block, block, token]. into: input weights as diagonals. out: output weights on all partitions, [128,
    state, token]. mask: a row that is 0 for tokens and MASKED for padding.
    """

    steps: nl.NkiTensor
    into: list
    out: nl.NkiTensor
    mask: nl.NkiTensor


@dataclass
class Chunk(nl.NKIObject):
    """What all units of a chunk share.

    rows: (start, end) of its tokens. carried: the states that it begins with, and later those that it ends with, [c in
    tile, tile, state] float32; None until they are loaded.
    """

    rows: tuple
    operands: ChunkOperands
    carried: nl.NkiTensor | None = None

    def carry(self, states):
        """Begin with some states, which the scans replace."""
        self.carried = states


@dataclass
class Unit(nl.NKIObject):
    """A tile of channels (first, end) of a chunk; tiles are None until the method that computes them.

    across: u, [c, token]. gates: rows, [token in part, part, c], later their silu in float32. steps: time steps
    [c, token], first without bias in PSUM. columns, inputs: time steps times u, cut as in `scale_inputs`, and as rows.
    sums: rows of y before the gate, in the shape of the gates in PSUM.
    """

    chunk: Chunk
    tile: int
    channels: tuple
    across: nl.NkiTensor
    gates: nl.NkiTensor
    steps: nl.NkiTensor | None = None
    columns: nl.NkiTensor | None = None
    inputs: nl.NkiTensor | None = None
    sums: nl.NkiTensor | None = None

    def tokens(self):
        """Return the number of its tokens."""
        return self.chunk.rows[1] - self.chunk.rows[0]

    def project_steps(self, weights):
        """Begin `steps` with projected ones, beyond all for padding."""
        operands, height, left = self.chunk.operands, self.across.shape[0], self.tile * PARTITIONS
        tokens, columns = self.tokens(), (left, left + height)
        self.steps = nl.ndarray((height, tokens), dtype=nl.float32, buffer=nl.psum)
        add_products([[self.steps]], weights.w_dt, [columns], operands.steps, [(0, tokens)], 0, weights.rank)
        ones = weights.ones[:, 0:height]
        # The mask brings padding so far below 0 that its softplus is 0.
        nisa.nc_matmul(dst=self.steps, stationary=ones, moving=operands.mask, accumulate=True)

    def soften_steps(self, weights):
        """Replace `steps` by softplus of them and their bias, float32: 0 for padding."""
        projected, bias = self.steps, weights.dt_bias[0 : self.across.shape[0], self.tile, :]
        self.steps = nl.ndarray(projected.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=self.steps, op=nl.softplus, data=projected, bias=bias)

    def open_gates(self):
        """Replace `gates` by their silu."""
        rows = self.gates
        self.gates = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        for used in used_slices(self.tokens()):
            nisa.activation(dst=self.gates[used], op=nl.silu, data=rows[used])

    def scale_inputs(self, dtype):
        """Compute `columns`."""
        self.columns = scale_inputs(self.steps, self.across, dtype)

    def transpose_inputs(self, dtype):
        """Compute `inputs`."""
        self.inputs = transpose_inputs(self.columns, dtype)

    def begin_sums(self, factor):
        """Begin `sums` with u times a factor [c, c]."""
        self.sums = nl.ndarray(self.gates.shape, dtype=nl.float32, buffer=nl.psum)
        self.add_rows(self.across, factor, False)

    def add_rows(self, tile, factor, accumulate):
        """Add tile^T @ factor to `sums`, for a tile [c, token]."""
        bounds = ranges(0, self.tokens())
        for i in range(len(bounds)):  # i: part of the tokens
            first, last = bounds[i]
            nisa.nc_matmul(
                dst=self.sums[0 : last - first, i, :],
                stationary=tile[:, first:last],
                moving=factor,
                accumulate=accumulate,
            )


def row_of_ones(dtype):
    """Return a row [1, 128] of ones."""
    ones = filled((1, PARTITIONS), 1.0, dtype)
    return ones


def decay_rates(a_log, channels):
    """Return -exp(a_log) of channels (first, end), [c in tile, tile, state] in float32."""
    begin, end = channels
    tile = load_blocks(WeightMatrix(a_log[begin:end, :]), nl.float32, STATIC)
    rates = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    for used in used_slices(end - begin):
        nisa.activation(dst=rates[used], op=nl.exp, data=tile[used])
        nisa.tensor_scalar(dst=rates[used], data=rates[used], op0=nl.multiply, operand0=-1.0)
    return rates


def used_slices(size):
    """Return the slices of a tile [row in block, block, …] that `size` rows fill: of full blocks, and of the last."""
    full = size // PARTITIONS
    slices = [] if full == 0 else [(slice(0, PARTITIONS), slice(0, full))]
    if size > full * PARTITIONS:
        slices.append((slice(0, size - full * PARTITIONS), slice(full, full + 1)))
    return slices


def view_states(state, slot, channels, used):
    """Return a view of HBM [c in tile, tile, state]: slices of the states in the slot of a number [1, 1]."""
    _, _, states = state.shape
    rows, tiles = used
    first = channels[0] + tiles.start * PARTITIONS
    pattern = [[states, rows.stop], [PARTITIONS * states, tiles.stop - tiles.start], [1, states]]
    return state.ap(pattern=pattern, offset=first * states, scalar_offset=slot, indirect_dim=0)


def load_states(state, slot, channels):
    """Load the states of channels (first, end), [c in tile, tile, state]; zeros for a slot beyond all."""
    count = channels[1] - channels[0]
    shape = (min(PARTITIONS, count), blocks(count), state.shape[2])
    result = filled(shape, 0.0)
    for used in used_slices(count):
        source = view_states(state, slot, channels, used)
        nisa.dma_copy(dst=result[used], src=source, oob_mode=nisa.oob_mode.skip)
    return result


def store_states(state, slot, tile, channels):
    """Store the states of channels (first, end) to a slot."""
    for used in used_slices(channels[1] - channels[0]):
        nisa.dma_copy(dst=view_states(state, slot, channels, used), src=tile[used])


def load_rows(projected, rows, states):
    """Load rows of a chunk: time steps and output weights in tiles of 128 rows, and input weights as diagonals."""
    start, end = rows
    rank = projected.shape[1] - 2 * states
    low, out = [], []
    for begin, stop in ranges(start, end):
        low.append(load(projected[begin:stop, 0:rank], projected.dtype))
        out.append(load(projected[begin:stop, rank + states : rank + 2 * states], projected.dtype))
    return low, out, block_diagonals(projected, rows, (rank, rank + states), projected.dtype)


def prepare_operands(low, output_rows, into, first, count, weights):
    """Return the operands of a chunk, whose first token is the sequence's token `first`, from its loaded rows."""
    rank, states, dtype = low[0].shape[1], output_rows[0].shape[1], low[0].dtype
    tokens = (len(low) - 1) * PARTITIONS + low[len(low) - 1].shape[0]
    steps = blocks_tile(rank, tokens, weights.w_dt.dtype)
    mixed = blocks_tile(states, tokens, dtype)
    for i in range(len(low)):  # i: tile of rows
        transpose_rows(steps, i * PARTITIONS, low[i], 0)
        transpose_rows(mixed, i * PARTITIONS, output_rows[i], 0)
    out = nl.ndarray((PARTITIONS, states, tokens), dtype=dtype, buffer=nl.sbuf)
    for state in range(states):
        bank = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.psum)
        # A repeated column of the selector puts one state's weights on all partitions.
        chosen = weights.selector[:, state : state + 1].broadcast(1, PARTITIONS)
        nisa.nc_matmul(dst=bank, stationary=chosen, moving=mixed[:, 0, :], accumulate=False)
        nisa.activation(dst=out[:, state, :], op=nl.copy, data=bank)
    mask = mask_row(tokens, first, count, weights.w_dt.dtype)
    return ChunkOperands(steps, into, out, mask)


def mask_row(tokens, first, count, dtype):
    """Return a row [1, token]: MASKED from the sequence's token number `count`, a tile [1, 1], on."""
    numbers = nl.ndarray((1, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, tokens]], offset=first)
    result = nl.ndarray((1, tokens), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=numbers, op0=nl.greater_equal, operand0=count, op1=nl.multiply, operand1=MASKED
    )
    return result


def compute_decays(steps, rate):
    """Return exp(rate * steps) of a tile [c, token], for a rate [c, 1]."""
    result = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=steps, scale=rate)
    return result
