"""What prompts of the selective scan are made of: chunks, units and their single steps, and states in HBM."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC
from nki_kernels.projection.normalised_rows import transpose_rows
from nki_kernels.projection.products import add_products
from nki_kernels.projection.row_groups import blocks_tile
from nki_kernels.recurrent.selective_feed import block_diagonals
from nki_kernels.tiles import MASKED, PARTITIONS, blocks, load, ranges
from nki_kernels.weights import WeightMatrix, load_blocks


@dataclass
class Slots(nl.NKIObject):
    """States in HBM, and for each sequence [1, B] the slots that are read and written, and the count of its tokens."""

    state: nl.NkiTensor
    read: nl.NkiTensor
    written: nl.NkiTensor
    counts: nl.NkiTensor


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


class Chunk(nl.NKIObject):
    """What all units of a chunk share."""

    def __init__(self, rows, operands):
        self.rows = rows
        self.operands = operands
        self.carried = None
        self.parts = ranges(0, rows[1] - rows[0])


class Unit(nl.NKIObject):
    """A tile of channels of a chunk on its way: u across, [c, token], its gates, and what follows from them."""

    def __init__(self, chunk, tile, channels, across, gates):
        self.chunk = chunk
        self.tile = tile
        self.channels = channels
        self.across = across
        self.gates = gates
        self.steps = None
        self.columns = None
        self.fed = None
        self.sums = None


def row_of_ones(dtype):
    """A row [1, 128] of ones."""
    ones = nl.ndarray((1, PARTITIONS), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    return ones


def activated(gates, rows):
    """silu of gates [token in part, part, c] in float32."""
    result = nl.ndarray(gates.shape, dtype=nl.float32, buffer=nl.sbuf)
    for part in used_parts(rows[1] - rows[0]):
        nisa.activation(dst=result[part], op=nl.silu, data=gates[part])
    return result


def decay_rates(a_log, own):
    """-exp(a_log) of own channels, [c in tile, tile, state] in float32."""
    begin, end = own
    tile = load_blocks(WeightMatrix(a_log[begin:end, :]), nl.float32, STATIC)
    rates = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    for part in used_parts(end - begin):
        nisa.activation(dst=rates[part], op=nl.exp, data=tile[part])
        nisa.tensor_scalar(dst=rates[part], data=rates[part], op0=nl.multiply, operand0=-1.0)
    return rates


def used_parts(channels):
    """Which elements of a tile [c in tile, tile, …] the channels fill: those of whole tiles, and of the last one."""
    full = channels // PARTITIONS
    parts = [] if full == 0 else [(slice(0, PARTITIONS), slice(0, full))]
    if channels > full * PARTITIONS:
        parts.append((slice(0, channels - full * PARTITIONS), slice(full, full + 1)))
    return parts


def states_of(state, slot, own, part):
    """A view of HBM [c in tile, tile, state]: a part of the states in one slot, whose number is in a tile [1, 1]."""
    _, _, states = state.shape
    rows, tiles = part
    first = own[0] + tiles.start * PARTITIONS
    pattern = [[states, rows.stop], [PARTITIONS * states, tiles.stop - tiles.start], [1, states]]
    return state.ap(pattern=pattern, offset=first * states, scalar_offset=slot, indirect_dim=0)


def load_states(state, slot, own):
    """The states of own channels, [c in tile, tile, state]; zeros for a slot beyond all."""
    channels = own[1] - own[0]
    shape = (min(PARTITIONS, channels), blocks(channels), state.shape[2])
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=result, value=0.0)
    for part in used_parts(channels):
        source = states_of(state, slot, own, part)
        nisa.dma_copy(dst=result[part], src=source, oob_mode=nisa.oob_mode.skip)
    return result


def store_states(state, slot, held, own):
    """The states of own channels to a slot."""
    for part in used_parts(own[1] - own[0]):
        nisa.dma_copy(dst=states_of(state, slot, own, part), src=held[part])


def load_rows(projected, rows, states):
    """Rows of a chunk: time steps and output weights in tiles of 128 rows, and input weights as diagonals."""
    start, end = rows
    rank = projected.shape[1] - 2 * states
    low, out = [], []
    for begin, stop in ranges(start, end):
        low.append(load(projected[begin:stop, 0:rank], projected.dtype))
        out.append(load(projected[begin:stop, rank + states : rank + 2 * states], projected.dtype))
    return low, out, block_diagonals(projected, rows, (rank, rank + states), projected.dtype)


def spread(rows, first, count, weights):
    """Return the operands of a chunk, whose first token is the sequence's token `first`, from its loaded rows."""
    low, output_rows, into = rows
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
        chosen = weights.selector[:, state : state + 1].broadcast(1, PARTITIONS)
        nisa.nc_matmul(dst=bank, stationary=chosen, moving=mixed[:, 0, :], accumulate=False)
        nisa.activation(dst=out[:, state, :], op=nl.copy, data=bank)
    mask = mask_row(tokens, first, count, weights.w_dt.dtype)
    return ChunkOperands(steps, into, out, mask)


def mask_row(tokens, first, count, dtype):
    """A row [1, token]: MASKED from the sequence's token number `count`, a tile [1, 1], on."""
    numbers = nl.ndarray((1, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, tokens]], offset=first)
    result = nl.ndarray((1, tokens), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=numbers, op0=nl.greater_equal, operand0=count, op1=nl.multiply, operand1=MASKED
    )
    return result


def projected_steps(weights, operands, tile, height):
    """Return projected time steps, beyond all for padding: [c, token] @ PSUM."""
    steps, mask, w_dt = operands.steps, operands.mask, weights.w_dt
    tokens, left = mask.shape[1], tile * PARTITIONS
    bank = nl.ndarray((height, tokens), dtype=nl.float32, buffer=nl.psum)
    add_products([[bank]], w_dt, [(left, left + height)], steps, [(0, tokens)], 0, weights.rank)
    nisa.nc_matmul(dst=bank, stationary=weights.ones[:, 0:height], moving=mask, accumulate=True)
    return bank


def time_steps(bank, bias):
    """softplus of projected time steps and a bias [c, 1], 0 for padding: [c, token] in float32."""
    result = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.softplus, data=bank, bias=bias)
    return result


def decayed(steps, rate):
    """exp(rate * steps) of a tile [c, token], for a rate [c, 1]."""
    result = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=steps, scale=rate)
    return result


def add_rows(sums, tile, factor, parts, accumulate):
    """Add tile^T @ factor to rows of sums [token in part, part, c], for a tile [c, token]."""
    for number in range(len(parts)):
        first, last = parts[number]
        nisa.nc_matmul(
            dst=sums[0 : last - first, number, :],
            stationary=tile[:, first:last],
            moving=factor,
            accumulate=accumulate,
        )
