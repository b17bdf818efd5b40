"""gated_delta: the gated delta rule over prompts, in chunks, and the gated norm behind it (Qwen3-Next).

For every head, token after token, with q and k divided by their lengths and q by sqrt(dk) as well:

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q
    g = -exp(a_log) softplus(a + dt_bias),  beta = sigmoid(b),  y = o / rms(o) * norm_weight * silu(z)

Dimensions
    T   tokens of B sequences, one after another, T / B of each; Hk key heads of dk elements, Hv value heads of dv;
    value head h has the queries and keys of key head h // (Hv / Hk). `slots` states are held.

Arguments
    qkv          [T, 2 Hk dk + Hv dv] @ HBM, float32 or bfloat16: q, k and v side by side
    gates        [T, W] @ HBM, qkv's dtype: z, b and a side by side, Hv dv + 2 Hv columns from `first` on
    a_log        [1, Hv] @ HBM, float32 or bfloat16; dt_bias alike
    norm_weight  [1, dv] @ HBM, float32 or bfloat16
    states       [slots, Hv, dk, dv] @ HBM, float32; those that state_slots names are written
    state_slots  [B, 1] @ HBM, int32: the state of each sequence
    starts       [B, 1] @ HBM, int32: position of a sequence's first new token; with 0 its state is read as zeros
    counts       [B, 1] @ HBM, int32: new tokens of a sequence; what lies behind them is padding and changes no state
    key_heads    compile-time int, Hk
    eps          compile-time float, of the norm
    first        compile-time int, the column of gates at which z begins
    returns      y [T, Hv dv] @ HBM, qkv's dtype, and the states

Layout
    Tokens of a chunk on the partitions, and heads of up to four side by side: their squares fill a PSUM bank. The state
    has dk on the partitions.

Tiling
    for chunks of 128 tokens, of each sequence and each four heads:
        what needs no state (`delta/chunks.py`): scores of keys with keys and queries, decays, and the inverse of the
        triangle by joining blocks (`delta/inverse.py`). Several chunks go through the levels of the inverse in turn.
        The state through the chunk, three products after one another, while the next chunks are prepared.

Limits
    dk and dv up to 128; B up to 128. One physical core: of two the first does the work.

Cost
    HBM: qkv, gates, y and the states once. A product of a chunk's 128 x 128 tile takes the Tensor engine 53 ns in
    bfloat16; a head's chunk needs 7 of them for its results and 12 for the inverse, halves side by side. The
    Vector, Tensor and Scalar engines have about as much to do. Predicted on trn2 for T = 2048, 2 key heads and 4 value
    heads of 128: 252 us in program order and 176 scheduled, of which the busiest engine, Vector, works 135.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.delta.checks import check_arguments, gates_from
from nki_kernels.delta.chunks import (
    advance,
    attend,
    attend_state,
    decay,
    keep,
    load,
    normalise,
    read_keys,
    score,
    spread,
    turn,
    weigh,
    write,
)
from nki_kernels.delta.decay import decays
from nki_kernels.delta.inverse import begin, join, join_halves, link, link_halves
from nki_kernels.delta.masks import LEVELS, constants
from nki_kernels.delta.output import gated_norm, inverse_roots
from nki_kernels.delta.states import load_state, state_numbers, store_state
from nki_kernels.precision import widened
from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, load_repeated, ranges

HEADS = BANK // PARTITIONS
"""Heads whose [128, 128] tiles share a PSUM bank."""


@nki.jit
def gated_delta(
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
    """The gated delta rule in chunks, its heads normalised and gated."""
    gates = gates_from(gates, first, states)
    check_arguments(qkv, gates, a_log, dt_bias, norm_weight, states, (state_slots, starts, counts), key_heads)
    heads, depth, width = states.shape[1], states.shape[2], states.shape[3]
    y = nl.ndarray((qkv.shape[0], heads * width), dtype=qkv.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y, states
    fixed = constants(qkv.dtype)
    case = {
        "qkv": qkv,
        "gates": gates,
        "y": y,
        "depth": depth,
        "width": width,
        "key_width": key_heads * depth,
        "group": heads // key_heads,
        "constants": fixed,
        "decays": decays(gates, heads * width, a_log, dt_bias, counts, fixed),
        "weight": cast(load_repeated(norm_weight, PARTITIONS), nl.float32),
        "eps": eps,
        "states": states,
        "slots": state_numbers(state_slots, starts, states.shape[0]),
    }
    issue_units(case, units_of(case, counts.shape[0], heads))
    return y, states


def units_of(case, sequences, heads):
    """Chunks of each sequence and each few heads, all first chunks before the second ones."""
    tokens = case["qkv"].shape[0] // sequences
    count = blocks(tokens)
    group = case["group"]
    held = {}
    units = []
    for start, end in ranges(0, tokens):
        chunk = start // PARTITIONS
        for sequence in range(sequences):
            for first, last in head_ranges(heads, group):
                name = f"{sequence} {first}"
                if chunk == 0:
                    held[name] = {"sequence": sequence, "heads": (first, last), "wide": None, "narrow": None}
                unit = {
                    "rows": (sequence * tokens + start, sequence * tokens + end),
                    "column": sequence * count + chunk,
                    "heads": (first, last),
                    "keys": (first // group, (last - 1) // group + 1),
                    "group": min(group, last - first),
                    "state": held[name],
                    "last": chunk + 1 == count,
                }
                units.append(unit)
    return units


def head_ranges(heads, group):
    """Ranges of up to four heads: those of whole key heads, or some of one."""
    if group <= HEADS:
        return ranges(0, heads, HEADS // group * group)
    found = []
    for first in range(0, heads, group):
        found.extend(ranges(first, first + group, HEADS))
    return found


def issue_units(case, units):
    """All units, a few at a time: while their triangles are inverted, states go through those before."""
    at_once = AT_ONCE if case["qkv"].dtype == nl.bfloat16 else 1
    waves = ranges(0, len(units), at_once)
    waiting = []
    load_wave(case, units, waves[0])
    for number in range(len(waves)):
        first, end = waves[number]
        wave = units[first:end]
        if number + 1 < len(waves):
            load_wave(case, units, waves[number + 1])
        share = -(-len(waiting) // BEATS)
        for phase in PREPARED:
            for unit in wave:
                phase(case, unit)
            waiting = issue(case, waiting, share)
        for phase, level in levels():
            for unit in wave:
                phase(unit, case["constants"], level)
            waiting = issue(case, waiting, share)
        for unit in wave:
            read_keys(case, unit)
        waiting = steps_of(wave)
    issue(case, waiting, len(waiting))


def levels():
    """The phases of the inverse of a triangle."""
    found = [(begin, 0)]
    for level in range(len(LEVELS)):
        found.append((link, level))
        found.append((join, level))
    found.append((link_halves, 0))
    found.append((join_halves, 0))
    return found


AT_ONCE = 4
"""Units that go through the levels of the inverse in turn, in bfloat16."""

PREPARED = (spread, normalise, decay, turn, score, weigh)
"""What comes before the inverse of a triangle."""

BEATS = len(PREPARED) + 1 + 2 * len(LEVELS) + 2
"""Phases of a wave, behind each of which steps of the wave before are issued."""


def load_wave(case, units, wave):
    """Load the operands of a wave; a sequence's first chunk loads its state, too."""
    for unit in units[wave[0] : wave[1]]:
        load(case, unit)
        state = unit["state"]
        if state["wide"] is None:
            keep(state, load_state(case, state), case["qkv"].dtype)


def steps_of(wave):
    """The steps that take states through a wave; the outputs of a unit come behind the next one's first steps."""
    steps = []
    before = None
    for unit in wave:
        steps.append((write, unit))
        if before is not None:
            steps.append((finish, before))
        steps.append((attend_state, unit))
        if before is not None:
            steps.append((store, before))
        steps.append((advance, unit))
        steps.append((attend, unit))
        before = unit
    steps.append((finish, before))
    steps.append((store, before))
    return steps


def issue(case, steps, count):
    """Issue so many steps; the rest."""
    for step, unit in steps[0:count]:
        step(case, unit)
    return steps[count:]


def finish(case, unit):
    """The root mean squares of a unit's outputs."""
    unit["roots"] = inverse_roots(unit["o"], case["eps"])


def store(case, unit):
    """Normalise and gate a unit's outputs and store them; behind the last chunk the state as well."""
    y = gated_norm(unit["o"], unit["roots"], unit["factors"], case["y"].dtype)
    start, stop = unit["rows"]
    first, end = unit["heads"]
    width = case["width"]
    target = case["y"][start:stop, first * width : end * width]
    nisa.dma_copy(dst=target, src=y.reshape((PARTITIONS, (end - first) * width))[0 : stop - start, :])
    if unit["last"]:
        store_state(case, unit["state"])


def gated_delta_reference(
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
    """Token by token; outputs of padding follow from the state before it. States are updated in place."""
    _, heads, depth, width = states.shape
    tokens = len(qkv) // len(counts)
    wide, side = widened(qkv), widened(gates)
    q, k, v = np.split(wide, [key_heads * depth, 2 * key_heads * depth], axis=1)
    z, b, a, _ = np.split(side[:, first:], [heads * width, heads * (width + 1), heads * (width + 2)], axis=1)
    q, k = (unit_reference(each.reshape(len(qkv), key_heads, depth)) for each in (q, k))
    q, k = (np.repeat(each, heads // key_heads, axis=1) for each in (q * depth**-0.5, k))
    v = v.reshape(len(qkv), heads, width)
    g = -np.exp(widened(a_log)) * np.logaddexp(a + widened(dt_bias), 0).astype(wide.dtype)
    beta = 1 / (1 + np.exp(-b))
    o = np.zeros_like(v)
    for sequence, slot in enumerate(state_slots[:, 0]):
        state = states[slot] * (starts[sequence, 0] != 0)
        for token in range(tokens):
            row = sequence * tokens + token
            if token < counts[sequence, 0]:
                state = state * np.exp(g[row])[:, None, None]
                seen = (k[row][:, None, :] @ state)[:, 0]
                write = beta[row][:, None] * (v[row] - seen)
                state = state + k[row][:, :, None] * write[:, None, :]
            o[row] = (q[row][:, None, :] @ state)[:, 0]
        states[slot] = state
    root = 1 / np.sqrt(np.mean(o * o, axis=2, keepdims=True) + wide.dtype.type(eps))
    y = (o * root * widened(norm_weight)).reshape(z.shape) * (z / (1 + np.exp(-z)))
    return y.astype(qkv.dtype), states


def unit_reference(rows: np.ndarray) -> np.ndarray:
    """Vectors divided by their lengths."""
    return rows / np.sqrt(np.sum(rows * rows, axis=-1, keepdims=True) + rows.dtype.type(1e-6))
