"""gated_delta_step: one token of each sequence by the gated delta rule, and the gated norm behind it (Qwen3-Next).

For every sequence and head, with q and k divided by their lengths and q by sqrt(dk) as well:

    u = beta (v - exp(g) S^T k);   y from o = exp(g) S^T q + (q . k) u;   S = exp(g) S + k u^T

with g, beta and y as in `gated_delta`, whose arguments these are, with one token of each sequence: T = B. A count of 0
says that the token is padding.

Layout
    Each of four sequences has a quadrant of the partitions, where two heads with the same key have 16 lanes each and a
    lane the state's rows of 8 neighbouring elements of a key (`delta/lanes.py`). So one indirect DMA moves 8 heads of
    four sequences in pieces of 4 KiB, and a matmul over a quadrant reads one sequence: what is not a number in another
    one does not reach it. The states are stationary; S^T q and S^T k are columns with dv on the partitions, as are the
    numbers of all pairs of sequence and head, a column of ones times them on a diagonal.

Tiling
    for up to 512 pairs of sequence and head, for as many units of four sequences and 8 heads as SBUF holds: load all
        units; for each: both products; what its keys write, w = u / |k|, transposed to all lanes of their heads; k w^T
        by the Scalar engine, added to the decayed states by Vector; store
    The products of a unit are taken while the one before is added.

Limits
    dk and dv up to 128; B up to 128; slots of up to 2^24 / 3 pieces, 43,690 of 8 heads of 128. Pieces are short where
    dk has no divisor near 16; a dk of 127 with a dv of 128 does not fit. One physical core: of two the first does
    the work.

Cost
    HBM: the states of the sequences once in and once out; the rest is small. Bound: a store to slots known at run time
    waits for all DMAs before it and all after wait for it, so that loads, the writing of descriptors and stores follow
    one another: 2.9, 2.4 and 2.9 us for 1 MiB, and 1.1 us around a store. Predicted on trn2 in bfloat16 for 2 key heads
    and 4 value heads of 128: 45 us for 16 sequences, of which moving the states takes 24; 157 us for 64, 94 of them.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.delta.checks import check_arguments, gates_from
from nki_kernels.delta.lanes import (
    QUADRANT,
    ROUNDS,
    SEQUENCES,
    Lanes,
    decays_on_lanes,
    keys_on_lanes,
    piece_numbers,
    places_of,
    units_of,
)
from nki_kernels.delta.output import exponentials, weigh
from nki_kernels.delta.token_rows import (
    Factors,
    on_all_partitions,
    scaled_values,
    store_outputs,
)
from nki_kernels.gated_delta import gated_delta_reference
from nki_kernels.tiles import PARTITIONS, blocks, identity, load, load_repeated, ranges

PAIRS = 512
"""Pairs of sequence and head that are taken together: their numbers stand on every partition."""

STATE_BYTES = 128 * 1024
"""Bytes of a partition that states take at most. So many are loaded before the first of them is stored."""

ROW_BYTES = 144 * 1024
"""Bytes of a partition that states and the rows of tokens share; the rest holds what belongs to units."""


@nki.jit
def gated_delta_step(
    qkv,
    gates,
    a_log,
    dt_bias,
    norm_weight,
    states: nt.mutable_tensor,
    state_slots,
    starts,
    counts,
    key_heads,
    eps,
    first=0,
):
    """One token of each sequence, its heads normalised and gated."""
    gates = gates_from(gates, first, states)
    check_arguments(qkv, gates, a_log, dt_bias, norm_weight, states, (state_slots, starts, counts), key_heads)
    heads, width = states.shape[1], states.shape[3]
    sequences = counts.shape[0]
    assert qkv.shape[0] == sequences, f"{qkv.shape[0]} tokens, but {sequences} sequences of one token"
    y = nl.ndarray((sequences, heads * width), dtype=qkv.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y, states
    lanes = Lanes(states, (0, sequences), key_heads)
    place, masks = places_of(lanes)
    zeros = nl.ndarray((PARTITIONS, lanes.rows * width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0, engine=nisa.engine.gpsimd)
    case = {"states": states, "place": place, "masks": masks, "zeros": zeros, "eps": eps}
    tokens = (qkv, gates, a_log, dt_bias, norm_weight)
    for start, end in ranges(0, sequences, sequences_at_once(heads)):
        case["lanes"] = Lanes(states, (start, end), key_heads)
        step(case, y, tokens, (state_slots, starts, counts))
    return y, states


def sequences_at_once(heads):
    """Sequences that are taken together: whole units, if there are several."""
    most = max(1, PAIRS // heads)
    return most if most < SEQUENCES else most // SEQUENCES * SEQUENCES


def step(case, y, tokens, places):
    """The tokens of the sequences of `lanes`."""
    lanes = case["lanes"]
    qkv, gates, a_log, dt_bias, norm_weight = tokens
    state_slots, starts, counts = places
    own, columns = slice(lanes.start, lanes.start + lanes.sequences), lanes.heads * lanes.width
    phases = phases_of(lanes, row_bytes(lanes, qkv.dtype))
    clear(case, phases[0][0])
    chosen = identity(lanes.sequences, nl.uint8)
    case["read"], case["written"] = piece_numbers(lanes, state_slots, starts, case["place"])
    case["keys"] = keys_on_lanes(lanes, qkv)
    factors = Factors(
        qkv[own, :], gates[own, :], a_log, dt_bias, counts[own, :], lanes.key_heads, lanes.depth
    )
    z = load(gates[own, 0:columns], gates.dtype)
    weight = load_repeated(norm_weight, lanes.sequences)
    weights = exponentials(z, lanes.width)
    load_states(case, phases[0])
    for unit in phases[0][0:2]:
        key_columns(case, unit)
    multiply(case, phases[0][0])
    numbers = on_all_partitions(factors.finish(), chosen)
    case["numbers"] = numbers[0 : lanes.width, :, :, :]
    values = factors.rows[:, qkv.shape[1] - columns : qkv.shape[1]]
    case["values"] = scaled_values(values, case["numbers"][:, 1, :, :])
    case["o"] = nl.ndarray(case["values"].shape, dtype=nl.float32, buffer=nl.sbuf)
    combine(case, phases[0][0])
    case["decays"] = decays_on_lanes(lanes, numbers[:, 0, :, :], case["masks"])
    for number in range(len(phases)):
        units = phases[number]
        if number > 0:
            load_states(case, units)
            for unit in units[0:2]:
                key_columns(case, unit)
            multiply(case, units[0])
            combine(case, units[0])
        for unit in units[1:2]:
            multiply(case, unit)
        for at in range(len(units)):
            for unit in units[at + 2 : at + 3]:
                key_columns(case, unit)
            advance(case, units[at], outer_products(case, units[at]))
            if number == 0 and at == 0:
                weigh(weights, z, weight)
            for unit in units[at + 1 : at + 2]:
                combine(case, unit)
            for unit in units[at + 2 : at + 3]:
                multiply(case, unit)
    store_outputs(case["o"], weights, y[own, :], case["eps"])


def row_bytes(lanes, dtype):
    """Bytes of a partition that the rows of tokens take: q, k and v, z and its weights, and squares of q and k."""
    keys, values = lanes.key_heads * lanes.depth, lanes.heads * lanes.width
    own = 4 if dtype == nl.float32 else 2
    return own * (2 * keys + 2 * values) + 4 * (values + 3 * keys)


def phases_of(lanes, taken):
    """Units whose states are loaded before the first of them is stored, beside so many bytes of a partition."""
    rounds = min(ROUNDS, blocks(lanes.heads, lanes.share))
    room = min(STATE_BYTES, ROW_BYTES - taken)
    most = max(1, room // (4 * rounds * lanes.rows * lanes.width))
    units = units_of(lanes)
    found = []
    for first, end in ranges(0, len(units), most):
        found.append(units[first:end])
    return found


def clear(case, unit):
    """Zeros for the states of a unit, which stay where a sequence begins."""
    lanes = case["lanes"]
    rounds = (unit["heads"][1] - unit["heads"][0]) // lanes.share
    shape = (unit["lanes"], rounds, lanes.rows * lanes.width)
    unit["state"] = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    for number in range(rounds):
        nisa.tensor_copy(dst=unit["state"][:, number, :], src=case["zeros"][0 : unit["lanes"], :])


def load_states(case, units):
    """The states of units, each [lane, round, element]."""
    lanes = case["lanes"]
    for unit in units:
        if unit["state"] is None:
            clear(case, unit)
        for number in range(unit["state"].shape[1]):
            source = lanes.in_hbm(case["states"], case["read"], unit, number, 1)
            target = unit["state"][:, number : number + 1, :]
            nisa.dma_copy(dst=target, src=source, oob_mode=nisa.oob_mode.skip)


def key_columns(case, unit):
    """What multiplies states: [lane, key head, row, head of the quadrant, query and key] float32.

    A lane has zeros for the other head of its quadrant. The keys of the unit are kept in float32, too.
    """
    lanes = case["lanes"]
    count, low, high = unit["lanes"], unit["keys"][0], unit["keys"][1]
    own = case["keys"][0:count, unit["column"], :, :]
    columns = nl.ndarray((count, high - low, lanes.rows, lanes.share, 2), dtype=nl.float32, buffer=nl.sbuf)
    for kind in range(2):
        data = own[:, kind * lanes.key_heads + low : kind * lanes.key_heads + high, :]
        for head in range(lanes.share):
            scale = 1.0 if lanes.share == 1 else case["masks"][head][0:count, :]
            nisa.activation(dst=columns[:, :, :, head, kind], op=nl.copy, data=data, scale=scale)
    unit["columns"] = columns
    unit["written_by"] = nl.ndarray((count, high - low, lanes.rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=unit["written_by"], op=nl.copy, data=own[:, lanes.key_heads + low : lanes.key_heads + high, :]
    )


def multiply(case, unit):
    """S^T q and S^T k of all states of a unit, [width, sequence, head, 2] in PSUM."""
    lanes = case["lanes"]
    first, last = unit["heads"]
    width = lanes.width
    bank = nl.ndarray((width, unit["members"], last - first, 2), dtype=nl.float32, buffer=nl.psum)
    for number in range((last - first) // lanes.share):
        head = number * lanes.share
        own = lanes.own_key(first + head) - unit["keys"][0]
        for place in range(unit["members"]):
            quadrant = slice(place * QUADRANT, (place + 1) * QUADRANT)
            for row in range(lanes.rows):
                nisa.nc_matmul(
                    dst=bank[:, place, head : head + lanes.share, :],
                    stationary=unit["state"][quadrant, number, row * width : (row + 1) * width],
                    moving=unit["columns"][quadrant, own, row, :, :],
                    accumulate=row > 0,
                )
    unit["products"] = bank


def combine(case, unit):
    """What each key writes, u over its key's length: on the lanes of its head, [lane, round, width] in PSUM.

    And the outputs of the unit, [width, sequence, head].
    """
    lanes = case["lanes"]
    (first, last), own_sequences = unit["heads"], unit["sequences"]
    products, numbers = unit["products"], case["numbers"][:, :, own_sequences, first:last]
    shape = (lanes.width, unit["members"], last - first)
    written = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=written, data1=products[:, :, :, 1], data2=numbers[:, 2, :, :], op=nl.multiply)
    values = case["values"][:, own_sequences, first:last]
    nisa.tensor_tensor(dst=written, data1=values, data2=written, op=nl.subtract)
    bank = nl.ndarray(
        (unit["lanes"], (last - first) // lanes.share, lanes.width), dtype=nl.float32, buffer=nl.psum
    )
    for number in range(bank.shape[1]):
        own = written[:, :, number * lanes.share : (number + 1) * lanes.share]
        nisa.nc_transpose(dst=bank[:, number, :], data=own.expand_dim(3).broadcast(3, lanes.lanes))
    unit["written"] = bank
    own = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=own, data1=written, data2=numbers[:, 4, :, :], op=nl.multiply)
    o = case["o"][:, own_sequences, first:last]
    nisa.tensor_tensor(dst=o, data1=products[:, :, :, 0], data2=numbers[:, 3, :, :], op=nl.multiply)
    nisa.tensor_tensor(dst=o, data1=o, data2=own, op=nl.add)


def outer_products(case, unit):
    """The products of a unit's keys and what they write, [lane, row, width] of each round."""
    lanes = case["lanes"]
    found = []
    for number in range(unit["written"].shape[1]):
        outer = nl.ndarray((unit["lanes"], lanes.rows, lanes.width), dtype=nl.float32, buffer=nl.sbuf)
        own = lanes.own_key(unit["heads"][0] + number * lanes.share) - unit["keys"][0]
        for row in range(lanes.rows):
            nisa.activation(
                dst=outer[:, row, :],
                op=nl.copy,
                data=unit["written"][:, number, :],
                scale=unit["written_by"][:, own, row : row + 1],
            )
        found.append(outer)
    return found


def advance(case, unit, outer):
    """The new states of a unit: decayed, plus the outer products; stored."""
    lanes = case["lanes"]
    count, first = unit["lanes"], unit["heads"][0] // lanes.share
    for number in range(len(outer)):
        state = unit["state"][:, number, :]
        nisa.scalar_tensor_tensor(
            dst=state,
            data=state,
            op0=nl.multiply,
            operand0=case["decays"][0:count, unit["column"], first + number : first + number + 1],
            op1=nl.add,
            operand1=outer[number].reshape((count, lanes.rows * lanes.width)),
        )
    target = lanes.in_hbm(case["states"], case["written"], unit, 0, len(outer))
    skips = nisa.oob_mode.skip if lanes.parts < lanes.lanes else nisa.oob_mode.error
    nisa.dma_copy(dst=target, src=unit["state"], oob_mode=skips)


def gated_delta_step_reference(
    qkv: np.ndarray,
    gates: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    norm_weight: np.ndarray,
    states: np.ndarray,
    state_slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    key_heads: int,
    eps: float,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence for one token of each sequence; states are updated in place."""
    return gated_delta_reference(
        qkv, gates, a_log, dt_bias, norm_weight, states, state_slots, starts, counts, key_heads, eps, first
    )
