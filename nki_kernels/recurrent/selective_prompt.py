"""Prompts of the selective scan: chunks of tokens of each sequence, tiles of 128 channels.

A *chunk* is a sequence's tokens that one scan instruction takes: its weights are spread over the partitions once for
all tiles of channels. The states that a chunk leaves are those the next one begins with.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.block_loads import load_cast
from nki_kernels.projection.normalised_rows import transpose_rows
from nki_kernels.projection.products import add_products, read_out, transpose_part
from nki_kernels.projection.row_groups import blocks_tile
from nki_kernels.recurrent.diagonal import columns_of, diagonals, identity
from nki_kernels.recurrent.slots import load_row, product_dtype, row, slots_or_none
from nki_kernels.tiles import BANK, MASKED, PARTITIONS, blocks, load, ranges

LEAD = 6
"""Decays that are computed ahead of the scans, while the Scalar engine prepares a tile."""


def scan_prompts(y, given, state, places, sequences, own):
    """All tokens of all sequences, for the channels `own`."""
    u, projected, w_dt, dt_bias, a_log, d, _, _ = given
    begin, end = own
    each = u.shape[0] // sequences
    states = a_log.shape[1]
    weights = {
        "rank": w_dt.shape[0],
        "w_dt": load_cast(w_dt[:, begin:end], product_dtype(u, w_dt), nisa.engine.sync),
        "dt_bias": columns_of((dt_bias,), own, nl.float32),
        "d": diagonals(columns_of((d,), own, u.dtype), u.dtype),
        "rates": decay_rates(a_log, own),
        "identity": identity(min(PARTITIONS, end - begin), u.dtype),
    }
    read = slots_or_none(row(places[0], 1), row(places[1], 1), state.shape[0])
    written = load_row(places[0])
    counts = row(places[2], 1)
    size = BANK if u.dtype != nl.float32 else BANK // 2
    for sequence in range(sequences):
        carried = load_states(state, read[0:1, sequence : sequence + 1], own)
        for first, last in ranges(0, each, size):
            rows = (sequence * each + first, sequence * each + last)
            shared = spread(projected, rows, states, first, counts[0:1, sequence : sequence + 1], weights)
            of_chunk = Chunk(y, given, weights, shared, carried, rows, own)
            of_chunk.scan()
        store_states(state, written[0:1, sequence : sequence + 1], carried, own)


class Chunk(nl.NKIObject):
    """A chunk of a sequence on its way through all tiles of channels."""

    def __init__(self, y, given, weights, shared, carried, rows, own):
        self.y = y
        self.u = given[0]
        self.gate = given[6]
        self.gate_first = given[7]
        self.weights = weights
        self.shared = shared
        self.carried = carried
        self.rows = rows
        self.first = own[0]
        self.tiles = ranges(own[0], own[1])
        self.parts = ranges(0, rows[1] - rows[0])
        self.states = weights["rates"].shape[2]

    def scan(self):
        """All tiles: the next one is prepared, and the one before finished, among the scans of each."""
        ready = prepared(self, self.tiles[0])
        waiting = None
        for number in range(len(self.tiles)):
            following = None if number + 1 == len(self.tiles) else self.tiles[number + 1]
            ready, waiting = scan_tile(self, ready, waiting, self.tiles[number], following)
        finish(self, waiting)


def decay_rates(a_log, own):
    """-exp(a_log) of own channels, [c in tile, tile, state] in float32."""
    begin, end = own
    tile = load_cast(a_log[begin:end, :], nl.float32, nisa.engine.sync)
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


def spread(projected, rows, states, first, count, weights):
    """What all tiles of channels share of a chunk, whose first token is the sequence's token `first`.

    Time steps [r in block, block, token]; input and output weights on all partitions [128, state, token]; and a row
    that is 0 for each token and MASKED for padding.
    """
    start, end = rows
    tokens, dtype = end - start, projected.dtype
    rank = projected.shape[1] - 2 * states
    steps = blocks_tile(rank, tokens, weights["w_dt"].dtype)
    mixed = blocks_tile(2 * states, tokens, dtype)
    for begin, stop in ranges(start, end):
        low = load(projected[begin:stop, 0:rank], dtype)
        transpose_rows(steps[:, :, begin - start : stop - start], 0, low, 2)
        both = load(projected[begin:stop, rank : rank + 2 * states], dtype)
        transpose_rows(mixed[:, :, begin - start : stop - start], 0, both, 2)
    selector = identity(2 * states, dtype)
    sides = []
    for side in range(2):
        sides.append(nl.ndarray((PARTITIONS, states, tokens), dtype=dtype, buffer=nl.sbuf))
        for state in range(states):
            place = side * states + state
            bank = nl.ndarray((PARTITIONS, tokens), dtype=nl.float32, buffer=nl.psum)
            chosen = selector[:, place : place + 1].broadcast(1, PARTITIONS)
            nisa.nc_matmul(dst=bank, stationary=chosen, moving=mixed[:, 0, :], accumulate=False)
            read_out(sides[side][:, state, :], bank, state % 2 == 1)
    mask = mask_row(tokens, first, count, weights["w_dt"].dtype)
    return {"steps": steps, "into": sides[0], "out": sides[1], "mask": mask}


def mask_row(tokens, first, count, dtype):
    """A row [1, token]: MASKED from the sequence's token number `count`, a tile [1, 1], on."""
    numbers = nl.ndarray((1, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, tokens]], offset=first)
    result = nl.ndarray((1, tokens), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=numbers, op0=nl.greater_equal, operand0=count, op1=nl.multiply, operand1=MASKED
    )
    return result


def prepared(chunk, channels):
    """A tile of channels before its scans: u, time steps and their product [c, token], and gates [token, c]."""
    start, end = chunk.rows
    left, right = channels
    tokens, height, u = end - start, right - left, chunk.u
    across = blocks_tile(height, tokens, u.dtype)
    gates = []
    for begin, stop in ranges(start, end):
        source, target = u[begin:stop, left:right], across[:, :, begin - start : stop - start]
        if u.dtype == nl.float32:
            transpose_rows(target, 0, load(source, u.dtype), 2)
        else:
            transpose_part(target, source, 0)
        columns = slice(chunk.gate_first + left, chunk.gate_first + right)
        gates.append(load(chunk.gate[begin:stop, columns], u.dtype))
    steps = time_steps(chunk.weights, chunk.shared, (left - chunk.first) // PARTITIONS, height)
    grown = multiplied(steps, across[:, 0, :], nl.float32)
    active = []
    for rows in gates:
        active.append(nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf))
        nisa.activation(dst=active[len(active) - 1], op=nl.silu, data=rows)
    return across, steps, grown, active


def time_steps(weights, shared, tile, height):
    """softplus of projected time steps, 0 for padding: [c, token] in float32."""
    steps, mask, w_dt = shared["steps"], shared["mask"], weights["w_dt"]
    tokens, left = mask.shape[1], tile * PARTITIONS
    bank = nl.ndarray((height, tokens), dtype=nl.float32, buffer=nl.psum)
    ones = nl.ndarray((1, height), dtype=mask.dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    add_products([[bank]], w_dt, [(left, left + height)], steps, [(0, tokens)], 0, weights["rank"])
    nisa.nc_matmul(dst=bank, stationary=ones, moving=mask, accumulate=True)
    result = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    bias = weights["dt_bias"][0:height, tile, :]
    nisa.activation(dst=result, op=nl.softplus, data=bank, bias=bias)
    return result


def scan_tile(chunk, ready, waiting, channels, following):
    """The scans of a tile of channels, one for each element of their states, and the sums over the elements.

    Decays are LEAD scans ahead, products one behind, so that no engine waits for another one's last instruction. The
    result is the following tile, prepared, and what of this one is to be finished.
    """
    across, steps, grown, gates = ready
    height, tile = channels[1] - channels[0], (channels[0] - chunk.first) // PARTITIONS
    shape = (min(PARTITIONS, steps.shape[1]), len(chunk.parts), height)
    sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    skip = chunk.weights["d"][0:height, tile, 0, 0:height]
    add_rows(sums, across[:, 0, :], skip, chunk.parts, False)
    rates, held = chunk.weights["rates"][0:height, tile, :], chunk.carried[0:height, tile, :]
    decays, inputs, last, after = [], [], None, None
    for state in range(chunk.states):
        while len(decays) < min(chunk.states, state + LEAD):
            decays.append(decayed(steps, rates[:, len(decays) : len(decays) + 1]))
        while len(inputs) < min(chunk.states, state + 2):
            inputs.append(multiplied(grown, chunk.shared["into"][0:height, len(inputs), :], nl.float32))
        scanned = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor_scan(
            dst=scanned,
            data0=decays[state],
            data1=inputs[state],
            initial=held[:, state : state + 1],
            op0=nl.multiply,
            op1=nl.add,
        )
        decays[state], inputs[state] = None, None
        if state > 0:
            weigh(chunk, sums, last, held, state - 1)
        last = scanned
        if state == 0:
            finish(chunk, waiting)
        if state == chunk.states // 2 and following is not None:
            after = prepared(chunk, following)
    weigh(chunk, sums, last, held, chunk.states - 1)
    return after, (sums, gates, channels)


def weigh(chunk, sums, scanned, held, state):
    """Add one element of the states [c, token], weighed, to the sums, and keep the last token's in `held`."""
    height, tokens = scanned.shape
    dtype = chunk.u.dtype
    product = multiplied(scanned, chunk.shared["out"][0:height, state, :], dtype)
    add_rows(sums, product, chunk.weights["identity"][0:height, 0:height], chunk.parts, True)
    nisa.activation(dst=held[:, state : state + 1], op=nl.copy, data=scanned[:, tokens - 1 : tokens])


def finish(chunk, waiting):
    """Gate the sums of a tile, and store them as rows of y."""
    if waiting is None:
        return
    sums, gates, channels = waiting
    left, right = channels
    for number in range(len(chunk.parts)):
        first, last = chunk.parts[number]
        result = nl.ndarray((last - first, right - left), dtype=chunk.y.dtype, buffer=nl.sbuf)
        own = sums[0 : last - first, number, :]
        nisa.tensor_tensor(dst=result, data1=own, data2=gates[number], op=nl.multiply)
        start = chunk.rows[0] + first
        nisa.dma_copy(dst=chunk.y[start : start + last - first, left:right], src=result)


def decayed(steps, rate):
    """exp(rate * steps) of a tile [c, token], for a rate [c, 1]."""
    result = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=steps, scale=rate)
    return result


def multiplied(first, second, dtype):
    """A product of two tiles on GpSimd; the Vector engine has the scans."""
    result = nl.ndarray(first.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=first, data2=second, op=nl.multiply, engine=nisa.engine.gpsimd)
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
