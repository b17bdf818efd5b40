"""ssd: the recurrence of Mamba-2 (state space duality), whose decay is one number for a head, with skip and gate.

    dt[t, h]      = clamp(softplus(steps[t, h] + dt_bias[h])), a[t, h] = -exp(a_log[h]) * dt[t, h]
    s[t, n, h, p] = exp(a[t, h]) * s[t - 1, n, h, p] + dt[t, h] * into[t, g, n] * x[t, h, p]
    y[t, h, p]    = (sum over n of s[t, n, h, p] * out[t, g, n] + d[h] * x[t, h, p]) * silu(gate[t, h, p])

Head h belongs to group g = h // (H / G). Within a chunk of tokens this is attention without a softmax: out into^T are
the scores of a token with those before it, and exp of the sum of a between the two tokens is the mask.

Dimensions:
    T   tokens of B sequences, n = T / B of each; H heads of P elements, in G groups; N elements of the state for each
        element of a head; S slots of states.

Arguments:
    u            [T, H P + 2 G N] @ HBM, float32 or bfloat16: x, into and out side by side
    steps        [T, W] @ HBM, u's dtype: its columns from `steps_first` on are the H time steps
    dt_bias, a_log, d  [1, H] @ HBM, float32 or bfloat16
    gate         [T, W'] @ HBM, u's dtype: its columns from `gate_first` on are the H P gates
    state        [S, N, H P] @ HBM, float32; updated in place
    state_slots  [B, 1] @ HBM, int32: the slot of each sequence, all different
    starts       [B, 1] @ HBM, int32: the position of its first token here; where it is 0 the state counts as zeros
    counts       [B, 1] @ HBM, int32: its tokens, up to n; the others are padding, which changes no state
    groups, steps_first, gate_first  compile-time ints
    dt_least, dt_most  compile-time bounds of a time step; none above where dt_most is None
    returns y    [T, H P] @ HBM, u's dtype; and the state

Layout
    Prompts: the tokens of a chunk on the partitions, but n on those of the state. Of scores the keys lie on the
    partitions, so that they are the stationary operand of their product with x, as in prefill attention.
    One token of each sequence: n on the partitions. What a sequence needs lies on one partition, for a product that
    makes the outer product; the state is the stationary operand of the product that reads it.

Tiling
    Prompts: for each sequence chunks of 128 tokens, for each of them packs of up to 8 heads of one group and 512
    columns, which pass stages: decays, up to five packs ahead; what they read of states, and masked scores, a pack
    ahead; sums, rows of y and new states.
    What the packs of a chunk share is computed among the packs of earlier chunks. Heads pass prompts in panels of up
    to 128 heads and 5120 columns (float32: 2560), as many as fit into SBUF.
    One token: panels of up to 5120 columns of the states of 32 sequences, three of which are loaded while three are
    moved on by the token and stored.
    Two cores of a logical core take half of the heads each.

Limits:
    N up to 128, P up to 512, H up to 512, H P / 2 G N so that a row of u fits in 64 KiB.

Cost
    HBM: u, gate and y once, into and out once a panel, states read and written once; in bfloat16 also sums of decays,
    12 bytes for each token and head, once out and once in. Products with states are float32. Predicted on trn2 for 80
    heads of 64, N = 128 and 2048 tokens in bfloat16: 469 us in program order and 467 scheduled, of which the bytes
    take 194. Half of that floor would be 388 us. The Vector engine is busy for 374 us (two passes over y, one over the
    states, half of those over the scores), Scalar (decays, gates, half of the roundings of states) and Tensor (141 for
    the four passes of the float32 product that keeps states as exact as float32) for 357 and 346, GpSimd for 345; the
    first chunks take some 50 us longer than others, while constants are made and states come.
    One token of 16 sequences: 283 us (281 scheduled), of which the bytes take 236. Stores to slots known at run time
    follow one another, 2 us apart.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.mlp import activation_reference
from nki_kernels.precision import widened
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.recurrent.slots import SequenceTable, check_table
from nki_kernels.recurrent.ssd_prompt import ssd_prompts
from nki_kernels.recurrent.ssd_sizes import Inputs, plan_sizes
from nki_kernels.recurrent.ssd_step import ssd_step
from nki_kernels.tiles import BANK, PARTITIONS, expect_dims, ranges

cores = (1, 2)

MOST_ROW_BYTES = 65536

PANEL_BYTES = 10240
"""Most bytes of a row of x whose heads pass prompts together."""


@nki.jit
def ssd(
    u,
    steps,
    dt_bias,
    a_log,
    d,
    gate,
    state: nt.mutable_tensor,
    state_slots,
    starts,
    counts,
    groups=1,
    steps_first=0,
    gate_first=0,
    dt_least=0.0,
    dt_most=None,
):
    """Return (y, state) @ HBM: y [T, H P] in u's dtype, and `state`, updated in place in the slots of the sequences.

    state[state_slots[b]] becomes s after the last token of sequence b. Before its first token it counts as
    zeros if starts[b] is 0. With one token of each sequence a step is computed, else a prompt. Raises
    AssertionError if shapes or dtypes do not fit together, or a row of u takes more than 64 KiB. Also if N is
    above 128, or H or P above 512.
    """
    expect_dims(2, u, "u [T, H P + 2 G N]")
    expect_dims(3, state, "state [S, N, H P]")
    inputs = Inputs(u, steps, dt_bias, a_log, d, gate, state, SequenceTable(state_slots, starts, counts))
    sequences = check_arguments(inputs, groups)
    heads = dt_bias.shape[1]
    first_head, end_head = find_core_range(heads, 1, nl.program_id(0))
    for name, array, last in (
        ("steps", steps, steps_first + heads),
        ("gate", gate, gate_first + state.shape[2]),
    ):
        assert array.shape[1] >= last, f"{name} has {array.shape[1]} columns, not {last} or more"
    y = nl.ndarray((u.shape[0], state.shape[2]), dtype=u.dtype, buffer=nl.shared_hbm)
    limits = (dt_least, dt_most)
    if u.shape[0] == sequences:
        ssd_step(
            y, inputs, plan_sizes(inputs, groups, (first_head, end_head), steps_first, gate_first, limits)
        )
        return y, state
    most = PANEL_BYTES // item_bytes(u.dtype) // (state.shape[2] // heads)
    for panel in ranges(first_head, end_head, max(1, min(PARTITIONS, most))):
        ssd_prompts(y, inputs, plan_sizes(inputs, groups, panel, steps_first, gate_first, limits))
    return y, state


def check_arguments(inputs, groups):
    """Return the number of sequences B; raise AssertionError if shapes or dtypes do not fit together.

    Refused are also sizes beyond the kernel's limits. inputs: record of the kernel's tensors. groups: G.
    """
    u, state = inputs.u, inputs.state
    tokens, width = u.shape
    _, states, inner = state.shape
    heads = inputs.dt_bias.shape[1]
    assert state.dtype == nl.float32, f"state is float32, not {state.dtype}"
    assert states <= PARTITIONS, f"ssd takes states of at most {PARTITIONS}, not {states}"
    assert inner % heads == 0 and heads % groups == 0, (
        f"{inner} elements of {heads} heads in {groups} groups; heads have to divide elements, and groups heads"
    )
    assert max(heads, inner // heads) <= BANK, (
        f"ssd takes at most {BANK} heads of at most {BANK} elements, not {heads} of {inner // heads}"
    )
    columns = inner + 2 * groups * states
    assert width == columns, f"u is [{tokens}, {columns}], not {u.shape}"
    row_bytes = width * (4 if u.dtype == nl.float32 else 2)
    assert row_bytes <= MOST_ROW_BYTES, f"rows of u take {row_bytes} bytes, more than {MOST_ROW_BYTES}"
    for name, vector in (("dt_bias", inputs.dt_bias), ("a_log", inputs.a_log), ("d", inputs.d)):
        assert vector.shape == (1, heads), f"{name} is [1, {heads}], not {vector.shape}"
    for name, rows in (("steps", inputs.steps), ("gate", inputs.gate)):
        expect_dims(2, rows, f"{name} [T, W]")
        assert rows.shape[0] == tokens, f"{name} has {rows.shape[0]} rows, not {tokens}"
        assert rows.dtype == u.dtype, f"{name} is {rows.dtype}, u is {u.dtype}"
    return check_table(tokens, state, inputs.table)


def ssd_reference(
    u: np.ndarray,
    steps: np.ndarray,
    dt_bias: np.ndarray,
    a_log: np.ndarray,
    d: np.ndarray,
    gate: np.ndarray,
    state: np.ndarray,
    state_slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    groups: int = 1,
    steps_first: int = 0,
    gate_first: int = 0,
    dt_least: float = 0.0,
    dt_most: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (y, state): y [T, H P] in u's dtype, computed in float32 token by token, and `state` itself.

    The slots of the sequences in `state` are updated in place. A sequence with starts 0 begins with zeros,
    and tokens from its `counts` on change no state.
    """
    (_, states, inner), heads = state.shape, dt_bias.shape[1]
    x, into, out = np.split(widened(u), (inner, inner + groups * states), axis=1)
    x = x.reshape(len(u), heads, -1)
    into, out = (
        np.repeat(rows.reshape(len(u), groups, states), heads // groups, axis=1) for rows in (into, out)
    )
    times = np.logaddexp(0, widened(steps[:, steps_first : steps_first + heads]) + widened(dt_bias))
    times = np.clip(times, dt_least, dt_most)
    rates = -np.exp(widened(a_log))[0]
    scanned = np.empty_like(x)
    tokens = len(u) // len(state_slots)
    for number, (slot, start, count) in enumerate(np.hstack([state_slots, starts, counts])):
        current = state[slot].reshape(states, heads, -1)
        current = current if start else np.zeros_like(current)
        for token in range(number * tokens, (number + 1) * tokens):
            dt = times[token] * float(token - number * tokens < count)
            fed = np.einsum("hn,hp->nhp", into[token], dt[:, None] * x[token])
            current = np.exp(dt * rates)[:, None] * current + fed
            scanned[token] = np.einsum("nhp,hn->hp", current, out[token])
        state[slot] = current.reshape(states, inner)
    y = (scanned + x * widened(d).reshape(-1, 1)).reshape(len(u), inner)
    gates = activation_reference(widened(gate[:, gate_first : gate_first + inner]), "silu")
    return (y * gates).astype(u.dtype), state
