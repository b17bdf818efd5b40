"""gated_delta_step: one token of each sequence by the gated delta rule, and the gated norm behind it (Qwen3-Next).

For every sequence and head, with q and k divided by their lengths and q by sqrt(dk) as well:

    u = beta (v - exp(g) S^T k);   y from o = exp(g) S^T q + (q . k) u;   S = exp(g) S + k u^T

with g, beta and y as in `gated_delta`, whose arguments these are, with one token of each sequence: T = B. A count of 0
says that the token is padding.

Layout
    The state has dk on the partitions, and is the stationary operand: S^T k and S^T q are columns with dv on the
    partitions, those of all heads and sequences of a group side by side. So what is computed of them takes all lanes.

Tiling
    for groups of up to 16 pairs of sequence and head: both products of every state, u and o of all; then k u^T as a
    product over one partition, added to the decayed state while it leaves PSUM.
    The states of the next group arrive meanwhile, those of the one before leave.

Limits
    dk and dv up to 128; B up to 128. One physical core: of two the first does the work.

Cost
    HBM: the states of the sequences once in and once out; the rest is small. Bound: stores to slots known at run
    time follow one another, 2.7 us each. Predicted on trn2 in bfloat16 for 2 key heads and 4 value heads of 128: 91 us
    for 16 sequences (67 scheduled), of which moving the states takes 24; 293 us for 64 (268 scheduled), 94 of them.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.delta.checks import check_arguments, gates_from
from nki_kernels.delta.chunks import inverse_lengths
from nki_kernels.delta.decay import keep_real, strengths
from nki_kernels.delta.output import gate_factors, gated_norm, inverse_roots
from nki_kernels.delta.states import load_state, state_numbers, store_state
from nki_kernels.gated_delta import gated_delta_reference
from nki_kernels.tiles import BANK, PARTITIONS, cast, load, load_repeated, ranges

PAIRS = 16
"""Pairs of sequence and head of a group."""

AHEAD = 4
"""Groups whose states are loaded before those of the first of them are used."""


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
    heads, depth, width = states.shape[1], states.shape[2], states.shape[3]
    sequences = counts.shape[0]
    assert qkv.shape[0] == sequences, f"{qkv.shape[0]} tokens, but {sequences} sequences of one token"
    y = nl.ndarray((sequences, heads * width), dtype=qkv.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y, states
    case = {
        "qkv": qkv,
        "key_heads": key_heads,
        "depth": depth,
        "width": width,
        "sequences": sequences,
        "heads": heads,
        "group": heads // key_heads,
        "states": states,
        "slots": state_numbers(state_slots, starts, states.shape[0]),
        "o": nl.ndarray((width, heads, sequences), dtype=nl.float32, buffer=nl.sbuf),
    }
    groups = groups_of(sequences, heads)
    held = []
    for group in groups[0:AHEAD]:
        held.append(load_states(case, group))
    read_tokens(case, qkv, key_heads)
    read_strengths(case, gates, a_log, dt_bias, counts)
    written = None
    for number in range(len(groups)):
        if number + AHEAD < len(groups):
            held.append(load_states(case, groups[number + AHEAD]))
        after = read_states(case, groups[number], held[number])
        if written is not None:
            advance(case, groups[number - 1], held[number - 1], written)
        written = after
    advance(case, groups[-1], held[-1], written)
    store_outputs(case, y, gates, norm_weight, eps)
    return y, states


def groups_of(sequences, heads):
    """Ranges of sequences and of heads: up to `PAIRS` pairs, four heads of a sequence in a PSUM bank."""
    found = []
    for first in range(0, heads, BANK // PARTITIONS):
        some = (first, min(heads, first + BANK // PARTITIONS))
        for start, end in ranges(0, sequences, PAIRS // (BANK // PARTITIONS)):
            found.append(((start, end), some))
    return found


def load_states(case, group):
    """The states of a group's sequences, each [depth, heads, width]."""
    held = []
    for sequence in range(group[0][0], group[0][1]):
        state = {"sequence": sequence, "heads": group[1]}
        state["wide"] = load_state(case, state)
        held.append(state)
    return held


def read_tokens(case, qkv, key_heads):
    """Keys, queries and values of all sequences, float32, with their elements on the partitions.

    "pairs" is [depth, sequence, key head, 2]: key and query side by side. "alike" are their products, and "lengths" the
    inverse lengths of keys, [sequence, key head].
    """
    depth, width, sequences = case["depth"], case["width"], case["sequences"]
    rows = load(qkv, nl.float32)
    key = key_heads * depth
    keys, case["lengths"] = unit_rows(rows[:, key : 2 * key], depth, 1.0)
    pairs = nl.ndarray((depth, sequences, key_heads, 2), dtype=nl.float32, buffer=nl.sbuf)
    queries, _ = unit_rows(rows[:, 0:key], depth, depth**-0.5)
    for own in range(key_heads):
        turn(pairs[:, :, own, 0], keys[:, own, :])
        turn(pairs[:, :, own, 1], queries[:, own, :])
    case["pairs"] = pairs
    values = nl.ndarray((width, case["heads"], sequences), dtype=nl.float32, buffer=nl.sbuf)
    for head in range(case["heads"]):
        first = 2 * key + head * width
        turn(values[:, head, :], rows[:, first : first + width])
    case["values"] = values
    both = nl.ndarray(queries.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=both, data1=queries, data2=keys, op=nl.multiply)
    case["alike"] = nl.ndarray((sequences, key_heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=case["alike"], op=nl.add, data=both, axis=2)


def unit_rows(rows, depth, scale):
    """Heads of rows [B, heads * depth] divided by their lengths, times a factor, and these quotients [B, heads]."""
    sequences, heads = rows.shape[0], rows.shape[1] // depth
    shape = (sequences, heads, depth)
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    squares = nl.ndarray((sequences, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.square, data=rows.reshape(shape))
    nisa.tensor_reduce(dst=squares, op=nl.add, data=result, axis=2)
    inverse_lengths(squares, scale)
    across = squares.reshape((sequences, heads, 1)).broadcast(2, depth)
    nisa.tensor_tensor(dst=result, data1=rows.reshape(shape), data2=across, op=nl.multiply)
    return result, squares


def turn(dst, rows):
    """Rows [B, n] as columns [n, B]."""
    bank = nl.ndarray((rows.shape[1], rows.shape[0]), dtype=rows.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=rows)
    nisa.tensor_copy(dst=dst, src=bank)


def read_strengths(case, gates, a_log, dt_bias, counts):
    """exp(g), beta, q . k and inverse lengths of k of all pairs on every partition: [128, head, sequence] float32."""
    sequences, heads = case["sequences"], case["heads"]
    first = heads * case["width"]
    raw = nl.ndarray((sequences, 1, 2 * heads), dtype=gates.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw.reshape((sequences, 2 * heads)), src=gates[:, first : first + 2 * heads])
    g, beta = strengths(raw, a_log, dt_bias)
    zero = nl.ndarray((sequences, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=zero, value=0)
    keep_real([g, beta], zero, load(counts, nl.int32))
    nisa.activation(dst=g, op=nl.exp, data=g)
    case["grown"] = on_all_partitions(g.reshape((sequences, heads)))
    case["beta"] = on_all_partitions(beta.reshape((sequences, heads)))
    for name in ("alike", "lengths"):
        case[name] = on_all_partitions(of_heads(case, case[name]))


def of_heads(case, of_keys):
    """What value heads have of their key heads, [B, heads]."""
    sequences, keys = of_keys.shape
    group = case["group"]
    result = nl.ndarray((sequences, keys * group), dtype=nl.float32, buffer=nl.sbuf)
    across = of_keys.reshape((sequences, keys, 1)).broadcast(2, group)
    nisa.tensor_copy(dst=result.reshape((sequences, keys, group)), src=across)
    return result


def on_all_partitions(rows):
    """Rows [B, heads] on each of 128 partitions: [128, head, sequence]."""
    sequences, heads = rows.shape
    spread = nl.ndarray((sequences, heads, sequences), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=spread,
        pattern=[[0, heads], [-1, sequences]],
        channel_multiplier=1,
        on_true_tile=rows.reshape((sequences, heads, 1)).broadcast(2, sequences),
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    ones = nl.ndarray((sequences, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    result = nl.ndarray((PARTITIONS, heads, sequences), dtype=nl.float32, buffer=nl.sbuf)
    flat, target = (
        spread.reshape((sequences, heads * sequences)),
        result.reshape((PARTITIONS, heads * sequences)),
    )
    for start, end in ranges(0, flat.shape[1], BANK):
        bank = nl.ndarray((PARTITIONS, end - start), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=ones, moving=flat[:, start:end], accumulate=False)
        nisa.tensor_copy(dst=target[:, start:end], src=bank)
    return result


def advance(case, group, held, written):
    """The new states of a group, from the rows of k and u of `read_states`."""
    (start, end), (first, last) = group
    keys, writes = written
    for place in range(end - start):
        wide = held[place]["wide"]
        outer = nl.ndarray(wide.shape, dtype=nl.float32, buffer=nl.psum)
        for head in range(last - first):
            nisa.nc_matmul(
                dst=outer[:, head, :],
                stationary=keys[:, place, (first + head) // case["group"], :],
                moving=writes[:, head * (end - start) + place, :],
                accumulate=False,
            )
            nisa.scalar_tensor_tensor(
                dst=wide[:, head, :],
                data=wide[:, head, :],
                op0=nl.multiply,
                operand0=case["grown"][0 : case["depth"], first + head, start + place : start + place + 1],
                op1=nl.add,
                operand1=outer[:, head, :],
            )
        store_state(case, held[place])


def read_states(case, group, held):
    """Rows of k and of u / |k| of a group, as `advance` multiplies them; its outputs are kept."""
    (start, end), (first, last) = group
    width = case["width"]
    bank = nl.ndarray((width, last - first, end - start, 2), dtype=nl.float32, buffer=nl.psum)
    for place in range(end - start):
        for head in range(last - first):
            nisa.nc_matmul(
                dst=bank[:, head, place, :],
                stationary=held[place]["wide"][:, head, :],
                moving=case["pairs"][:, start + place, (first + head) // case["group"], :],
                accumulate=False,
            )
    shape = (width, last - first, end - start)
    grown = case["grown"][0:width, first:last, start:end]
    beta = case["beta"][0:width, first:last, start:end]
    alike = case["alike"][0:width, first:last, start:end]
    written = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=written, data1=bank[:, :, :, 0], data2=grown, op=nl.multiply)
    values = case["values"][:, first:last, start:end]
    nisa.tensor_tensor(dst=written, data1=values, data2=written, op=nl.subtract)
    nisa.tensor_tensor(dst=written, data1=written, data2=beta, op=nl.multiply)
    own = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=own, data1=written, data2=alike, op=nl.multiply)
    o = case["o"][:, first:last, start:end]
    nisa.tensor_tensor(dst=o, data1=bank[:, :, :, 1], data2=grown, op=nl.multiply)
    nisa.tensor_tensor(dst=o, data1=o, data2=own, op=nl.add)
    lengths = case["lengths"][0:width, first:last, start:end]
    nisa.tensor_tensor(dst=written, data1=written, data2=lengths, op=nl.multiply)
    return key_rows(case, group), write_rows(case, written)


def terms_of(dtype):
    """Numbers of a dtype whose sum is a float32 number."""
    return 1 if dtype == nl.float32 else 3


def key_rows(case, group):
    """The keys of a group's sequences, not normalised, once for each term of u: [term, sequence, key head, depth]."""
    start, end = group[0]
    qkv, depth = case["qkv"], case["depth"]
    columns = case["key_heads"] * depth
    shape = (terms_of(qkv.dtype), end - start, case["key_heads"], depth)
    rows = nl.ndarray(shape, dtype=qkv.dtype, buffer=nl.sbuf)
    source = qkv.ap(
        pattern=[[0, shape[0]], [qkv.shape[1], end - start], [1, columns]],
        offset=start * qkv.shape[1] + columns,
    )
    nisa.dma_copy(dst=rows, src=source, engine=nisa.engine.gpsimd)
    return rows


def write_rows(case, written):
    """Columns [width, head, sequence] float32 as rows in the dtype of keys: [term, head and sequence, width]."""
    width, dtype = case["width"], case["qkv"].dtype
    pairs, count = written.shape[1] * written.shape[2], terms_of(dtype)
    rest = nl.ndarray((pairs, width), dtype=nl.float32, buffer=nl.sbuf)
    turn(rest, written.reshape((width, pairs)))
    result = nl.ndarray((count, pairs, width), dtype=dtype, buffer=nl.sbuf)
    for number in range(count):
        term = cast(rest, dtype)
        nisa.dma_copy(dst=result[number : number + 1, :, :], src=term, engine=nisa.engine.gpsimd)
        if number + 1 < count:
            after = nl.ndarray(rest.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=after, data1=rest, data2=term, op=nl.subtract)
            rest = after
    return result


def store_outputs(case, y, gates, norm_weight, eps):
    """Normalise and gate the outputs of all sequences, and store them."""
    sequences, heads, width = case["sequences"], case["heads"], case["width"]
    o = nl.ndarray((sequences, heads, width), dtype=nl.float32, buffer=nl.sbuf)
    for head in range(heads):
        turn(o[:, head, :], case["o"][:, head, :])
    weight = cast(load_repeated(norm_weight, sequences), nl.float32)
    factors = gate_factors(load(gates[:, 0 : heads * width], gates.dtype), weight)
    result = gated_norm(o, inverse_roots(o, eps), factors, y.dtype)
    nisa.dma_copy(dst=y, src=result.reshape(y.shape))


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
