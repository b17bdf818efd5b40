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
    for chunks of 128 tokens, of each sequence and each four heads, four such units together:
        what needs no state (`delta/chunks.py`): scores of keys with keys and queries, decays, and the inverse of the
        triangle: blocks of 16 element by element (`delta/blocks.py`), which are then joined (`delta/inverse.py`).
        The state through the chunk (`delta/walk.py`), three products after one another.
        Steps of several of these stages are issued in turn (`delta/stages.py`, `delta/order.py`).

Limits
    dk and dv up to 128; B up to 128. One physical core: of two the first does the work.

Cost
    HBM: qkv, gates, y and the states once; triangles and inverses of blocks, 64 KiB for a head's chunk in all, twice.
    A product of a chunk's 128 x 128 tile takes the Tensor engine 53 ns in bfloat16; a head's chunk needs 7 of them for
    its results and about as much for the inverse, halves side by side. Predicted on trn2 for T = 2048, 2 key heads and
    4 value heads of 128: 202 us in program order and 144 scheduled, of which the busiest engine, Scalar, works 110.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.delta.blocks import scratch_buffers
from nki_kernels.delta.decay import decays
from nki_kernels.delta.inverse import right_operands
from nki_kernels.delta.masks import constants
from nki_kernels.delta.order import issue_all
from nki_kernels.delta.signature import Arguments, check_arguments, delta_rule_reference, select_gates
from nki_kernels.delta.stages import bring_wave, chains_of
from nki_kernels.delta.states import state_numbers
from nki_kernels.recurrent.ssd_between import Differences
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
    gates = select_gates(gates, first, states)
    arguments = Arguments(
        qkv, gates, a_log, dt_bias, norm_weight, states, state_slots, starts, counts, key_heads, eps
    )
    check_arguments(arguments)
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
        "weight": cast(load_repeated(norm_weight, PARTITIONS), nl.float32),
        "eps": eps,
        "states": states,
        "slots": state_numbers(state_slots, starts, states.shape[0]),
    }
    waves = waves_of(units_of(case, counts.shape[0], heads), qkv.dtype)
    most = 0
    for wave in waves:
        most = max(most, wave["heads"])
    case["scratch_buffers"] = scratch_buffers(most, qkv.dtype)
    case["right_operands"] = right_operands(HEADS, qkv.dtype)
    bring_wave(case, waves[0])
    case["decays"] = decays(gates, heads * width, a_log, dt_bias, counts, fixed)
    case["differences"] = Differences() if "rows" in case["decays"] else None
    issue_all(case, chains_of(waves))
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


def waves_of(units, dtype):
    """Units that go through the stages together."""
    size = AT_ONCE if dtype == nl.bfloat16 else 1
    waves = []
    for first, end in ranges(0, len(units), size):
        heads = 0
        wave = {"number": len(waves), "units": units[first:end]}
        for number in range(first, end):
            unit = units[number]
            unit["number"] = number
            unit["at"] = (heads, heads + unit["heads"][1] - unit["heads"][0])
            heads = unit["at"][1]
        wave["heads"] = heads
        waves.append(wave)
    return waves


AT_ONCE = 4
"""Units of a wave in bfloat16."""


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
    """Return outputs and states, token by token; states are updated in place."""
    return delta_rule_reference(
        Arguments(
            qkv,
            gates[:, first:],
            a_log,
            dt_bias,
            norm_weight,
            states,
            state_slots,
            starts,
            counts,
            key_heads,
            eps,
        )
    )
