"""Chunks and units of prompts of the selective scan with their tiles, and their states in HBM.

`recurrent/selective_prompt.py` issues the methods here in a pipeline. A chunk is the tokens of a sequence
that one scan instruction takes. A unit is a chunk and a tile of up to 128 channels. In a shape, c is a
channel of the tile, r one of the R elements of which time steps are projected, and state one of the N
elements of a channel's state. "part" counts tiles of 128 tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC
from nki_kernels.projection.products import add_products
from nki_kernels.projection.row_groups import allocate_transposed
from nki_kernels.recurrent.selective_feed import load_diagonals, scale_inputs, transpose_inputs
from nki_kernels.tiles import MASKED, PARTITIONS, blocks, filled, load, ranges, transpose_rows
from nki_kernels.weights import WeightMatrix, load_blocks


@dataclass
class ScanWeights(nl.NKIObject):
    """Weights of the local channels, and constants, in SBUF.

    rank: R. w_dt: [r in block, block, channel], projects time steps. dt_bias, d: [c in tile, tile, 1]
    float32. rates: -exp(a_log), [c in tile, tile, state] float32. ones: [1, 128]. identity: [c, c] for a tile
    of channels. selector: the identity [state, state].
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
    """What all units of a chunk take from the chunk's rows of `projected`, in SBUF.

    steps: [r in block, block, token], before their projection. into: input weights as diagonals, from
    `load_diagonals`. out: output weights, [128, state, token], the same on all partitions. mask: [1, token],
    0 for tokens and MASKED for padding.
    """

    steps: nl.NkiTensor
    into: list
    out: nl.NkiTensor
    mask: nl.NkiTensor


@dataclass
class Chunk(nl.NKIObject):
    """What all units of a chunk share.

    rows: (start, end) of its tokens in u. carried: the states that it begins with, and later those that it
    ends with, [c in tile, tile, state] float32 in SBUF; None until they are loaded.
    """

    rows: tuple
    operands: ChunkOperands
    carried: nl.NkiTensor | None = None

    def carry(self, states):
        """Set `carried`, the states that the chunk begins with, to a tile [c in tile, tile, state] in SBUF.

        The scans of the chunk overwrite it with the states after the chunk.
        """
        self.carried = states


@dataclass
class Unit(nl.NKIObject):
    """A tile of channels (first, end) of a chunk; tiles are None until the method that computes them.

    tile: the index of the channels' tile. across: u, [c, token] in SBUF. gates: [token in part, part, c],
    after `activate_gates` their silu in float32. steps: [c, token] float32, the projected time steps in PSUM,
    after `soften_steps` the time steps in SBUF. columns: time steps times u, in pieces, see `scale_inputs`.
    inputs: the same as rows, [piece and token in block, block, c]. sums: rows of y before the gate, [token in
    part, part, c] float32 in PSUM.
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

    def count_tokens(self):
        """Return the number of tokens of the unit's chunk."""
        return self.chunk.rows[1] - self.chunk.rows[0]

    def project_steps(self, weights):
        """Set `steps` to the time steps projected by w_dt, without bias: a new PSUM tile [channel, token] float32.

        Padding has MASKED added, far below 0.
        """
        operands, height, left = self.chunk.operands, self.across.shape[0], self.tile * PARTITIONS
        tokens, columns = self.count_tokens(), (left, left + height)
        self.steps = nl.ndarray((height, tokens), dtype=nl.float32, buffer=nl.psum)
        add_products([[self.steps]], weights.w_dt, [columns], operands.steps, [(0, tokens)], 0, weights.rank)
        ones = weights.ones[:, 0:height]
        # The mask brings padding so far below 0 that its softplus is 0.
        nisa.nc_matmul(dst=self.steps, stationary=ones, moving=operands.mask, accumulate=True)

    def soften_steps(self, weights):
        """Replace `steps` by the time steps, softplus(steps + dt_bias); 0 for padding.

        They are a new SBUF tile [channel, token] float32.
        """
        projected, bias = self.steps, weights.dt_bias[0 : self.across.shape[0], self.tile, :]
        self.steps = nl.ndarray(projected.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=self.steps, op=nl.softplus, data=projected, bias=bias)

    def activate_gates(self):
        """Replace `gates` by silu of them, a new float32 SBUF tile."""
        rows = self.gates
        self.gates = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        for used in list_used_slices(self.count_tokens()):
            nisa.activation(dst=self.gates[used], op=nl.silu, data=rows[used])

    def scale_inputs(self, dtype):
        """Set `columns` to time steps times u, each cut into pieces, see `choose_cut`.

        It is a new SBUF tile [channel, pieces * token].

        Args:
            dtype: of the input weights.
        """
        self.columns = scale_inputs(self.steps, self.across, dtype)

    def transpose_inputs(self, dtype):
        """Set `inputs` to `columns` (time steps times u, in pieces) transposed.

        It is a new SBUF tile [piece and token in block, block, channel]. Pieces are the numbers that each product is
        the sum of, see `choose_cut`; in a block, all tokens of a piece lie on partitions one after another.

        Args:
            dtype: of the input weights, and of the tile; it decides how many pieces there are.
        """
        self.inputs = transpose_inputs(self.columns, dtype)

    def begin_sums(self, factor):
        """Set `sums`, rows of y before the gate, to u^T @ factor.

        It is a new PSUM tile [token in part, part, channel] float32, where a part is 128 tokens.

        Args:
            factor: [channel, channel], with the skip d on its diagonal.
        """
        self.sums = nl.ndarray(self.gates.shape, dtype=nl.float32, buffer=nl.psum)
        self.add_rows(self.across, factor, False)

    def add_rows(self, tile, factor, accumulate):
        """Write tile^T @ factor to `sums`, for a tile [c, token] and a factor [c, c].

        If `accumulate`, the product is added to what `sums` have, else it replaces that.
        """
        bounds = ranges(0, self.count_tokens())
        for i in range(len(bounds)):  # i: part of the tokens
            first, last = bounds[i]
            nisa.nc_matmul(
                dst=self.sums[0 : last - first, i, :],
                stationary=tile[:, first:last],
                moving=factor,
                accumulate=accumulate,
            )


def build_ones(dtype):
    """Return a new SBUF tile [1, 128] of a dtype, filled with ones."""
    ones = filled((1, PARTITIONS), 1.0, dtype)
    return ones


def load_decay_rates(a_log, channels):
    """Load a_log of channels (first, end), and return -exp(a_log): a new float32 SBUF tile [c in tile, tile, state]."""
    begin, end = channels
    tile = load_blocks(WeightMatrix(a_log[begin:end, :]), nl.float32, STATIC)
    rates = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    for used in list_used_slices(end - begin):
        nisa.activation(dst=rates[used], op=nl.exp, data=tile[used])
        nisa.tensor_scalar(dst=rates[used], data=rates[used], op0=nl.multiply, operand0=-1.0)
    return rates


def list_used_slices(size):
    """Return the indices of the filled blocks of a tile [row in block, block, …]: full ones, then a shorter last one.

    The tile has `size` rows in blocks of 128. Each index is a tuple (slice of the rows in a block, slice of
    the blocks). Either is left out of the list if it has no rows.
    """
    full = size // PARTITIONS
    slices = [] if full == 0 else [(slice(0, PARTITIONS), slice(0, full))]
    if size > full * PARTITIONS:
        slices.append((slice(0, size - full * PARTITIONS), slice(full, full + 1)))
    return slices


def view_states(state, slot, channels, used):
    """Return a view of the states of some channels in a slot: [c in tile, tile, state] in HBM.

    Args:
        slot: the number of the slot, a tile [1, 1] int32 in SBUF, read at run time.
        channels: (first, end); tiles of 128 count from `first`.
        used: (slice of the channels in a tile, slice of the tiles), see `list_used_slices`.
    """
    _, _, states = state.shape
    rows, tiles = used
    first = channels[0] + tiles.start * PARTITIONS
    pattern = [[states, rows.stop], [PARTITIONS * states, tiles.stop - tiles.start], [1, states]]
    return state.ap(pattern=pattern, offset=first * states, scalar_offset=slot, indirect_dim=0)


def load_states(state, slot, channels):
    """Load the states of channels (first, end) from a slot to a new float32 SBUF tile [c in tile, tile, state].

    Returns zeros if the slot's number is beyond all slots. `slot` is a tile [1, 1] int32.
    """
    count = channels[1] - channels[0]
    shape = (min(PARTITIONS, count), blocks(count), state.shape[2])
    result = filled(shape, 0.0)
    for used in list_used_slices(count):
        source = view_states(state, slot, channels, used)
        nisa.dma_copy(dst=result[used], src=source, oob_mode=nisa.oob_mode.skip)
    return result


def store_states(state, slot, tile, channels):
    """Store `tile` [c in tile, tile, state], the states of channels (first, end), to a slot of `state` in HBM.

    Args:
        slot: the number of the slot, a tile [1, 1] int32 in SBUF, read at run time.
    """
    for used in list_used_slices(channels[1] - channels[0]):
        nisa.dma_copy(dst=view_states(state, slot, channels, used), src=tile[used])


def load_rows(projected, rows, states):
    """Load a chunk's rows (start, end) of `projected` to SBUF: return (time steps, output weights, input weights).

    Time steps [row, R] and output weights [row, state] are lists of tiles of up to 128 rows. The input
    weights are diagonals, from `load_diagonals`. `states` is the number N.
    """
    start, end = rows
    rank = projected.shape[1] - 2 * states
    low, out = [], []
    for begin, stop in ranges(start, end):
        low.append(load(projected[begin:stop, 0:rank], projected.dtype))
        out.append(load(projected[begin:stop, rank + states : rank + 2 * states], projected.dtype))
    return low, out, load_diagonals(projected, rows, (rank, rank + states), projected.dtype)


def prepare_operands(low, output_rows, into, first, count, weights):
    """Return the ChunkOperands of a chunk in new SBUF tiles: time steps, weights, and the padding's mask.

    Args:
        low: rows of time steps before their projection, from `load_rows`, as are output_rows (output weights)
            and into (input weights).
        first: the index of the chunk's first token among the new tokens of its sequence.
        count: the number of real tokens of the sequence, a float32 tile [1, 1].
    """
    rank, states, dtype = low[0].shape[1], output_rows[0].shape[1], low[0].dtype
    tokens = (len(low) - 1) * PARTITIONS + low[len(low) - 1].shape[0]
    steps = allocate_transposed(rank, tokens, weights.w_dt.dtype)
    mixed = allocate_transposed(states, tokens, dtype)
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
    mask = build_mask(tokens, first, count, weights.w_dt.dtype)
    return ChunkOperands(steps, into, out, mask)


def build_mask(tokens, first, count, dtype):
    """Return an SBUF tile [1, tokens] of a dtype: 0 for real tokens, and MASKED for padding.

    Token i is padding if first + i >= count.

    Args:
        first: the index of the first token in its sequence.
        count: the number of real tokens, a float32 tile [1, 1].
    """
    numbers = nl.ndarray((1, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, tokens]], offset=first)
    result = nl.ndarray((1, tokens), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=numbers, op0=nl.greater_equal, operand0=count, op1=nl.multiply, operand1=MASKED
    )
    return result


def compute_decays(steps, rate):
    """Return exp(rate * steps), a new float32 SBUF tile [c, token], for a rate [c, 1]."""
    result = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=steps, scale=rate)
    return result
