"""selective_scan: the recurrence of Mamba, whose steps depend on the input, with its skip and its gate.

    dt[t, c]   = softplus(sum over r of projected[t, r] * w_dt[r, c] + dt_bias[c])
    h[t, c, n] = exp(-exp(a_log[c, n]) * dt[t, c]) * h[t - 1, c, n] + dt[t, c] * u[t, c] * projected[t, R + n]
    y[t, c]    = (sum over n of h[t, c, n] * projected[t, R + N + n] + d[c] * u[t, c]) * silu(gate[t, c])

Dimensions:
    T   tokens of B sequences, n = T / B of each; C channels; N elements of a channel's state; R rank of the time steps;
    S   slots of states.

Arguments:
    u            [T, C] @ HBM, float32 or bfloat16
    projected    [T, R + 2 N] @ HBM, u's dtype: time steps, input and output weights of each token, side by side
    w_dt         [R, C] @ HBM, float32 or bfloat16; read in u's dtype if that is its own, else both in float32
    dt_bias, d   [1, C] @ HBM, float32 or bfloat16; d is read in u's dtype
    a_log        [C, N] @ HBM, float32 or bfloat16
    gate         [T, W] @ HBM, u's dtype: its columns from `gate_first` on are the C gates
    state        [S, C, N] @ HBM, float32; updated in place
    state_slots  [B, 1] @ HBM, int32: the slot of each sequence, all different
    starts       [B, 1] @ HBM, int32: the position of its first token here; where it is 0 the state counts as zeros
    counts       [B, 1] @ HBM, int32: its tokens, up to n; the others are padding, which changes no state
    gate_first   compile-time int
    returns y    [T, C] @ HBM, u's dtype; and the state

Layout
    Prompts: channels on the partitions, tokens along the free dim, as the scan instruction takes them. For every n the
    Scalar engine makes decays, the Tensor engine multiplies by input weights, as diagonals, into PSUM, the Vector
    engine scans, GpSimd multiplies by output weights, which are spread over the partitions, and the Tensor engine adds
    up over n and turns the sums to rows.
    One token of each sequence: a set is as many sequences as share the partitions, and sets follow one another. States
    keep the layout that they have in HBM.

Tiling
    Prompts: for each sequence chunks of up to 512 tokens (float32: 256; less for more than 16 states), for each of them
    tiles of 128 channels. The next two tiles are prepared in stages among the scans of the present two, so that the
    Vector engine only scans.
    One token: up to 5120 elements of the states on a partition are stored together, and moved on by the token in parts
    of 2560. Three such parts are loaded while three are moved on.
    Two cores of a logical core take half of the channels each.

Limits:
    N up to 64. R up to 1024. T and S * C up to 2^23.

Cost
    HBM: u, gate and y once, projected once a core, states read and written once; weights once, in a step a_log once
    for each sequence of a set. Bound: for prompts the scan, 2 cycles of the Vector engine for 128 elements of the
    state; one token: six passes over the states, which the Vector engine and GpSimd share. Predicted on trn2 for 1024
    channels, N = 16 and 2048 tokens in bfloat16: 655 us, of which the scans take 546, and 579 with what passes between
    them; for one token of 16 sequences with 5120 channels: 70 us, of which the bytes take 36 and the Vector engine 50.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.mlp import activation_reference
from nki_kernels.precision import widened
from nki_kernels.recurrent.selective_prompt import scan_prompts
from nki_kernels.recurrent.selective_step import scan_step
from nki_kernels.recurrent.slots import ScanArguments, SequenceTable, check_table
from nki_kernels.tiles import PARTITIONS, expect_dims

cores = (1, 2)

MOST_STATES = 64
MOST_RANK = 1024


@nki.jit
def selective_scan(
    u,
    projected,
    w_dt,
    dt_bias,
    a_log,
    d,
    gate,
    state: nt.mutable_tensor,
    state_slots,
    starts,
    counts,
    gate_first=0,
):
    """Return (y, state) @ HBM: y [T, C] in u's dtype, and `state`, updated in place in the slots of the sequences.

    state[state_slots[b]] becomes h after the last token of sequence b. Before its first token it counts as
    zeros if starts[b] is 0. With one token of each sequence a step is computed, else a prompt. Raises
    AssertionError if shapes or dtypes do not fit together, N is above 64, or R above 1024.
    """
    expect_dims(2, u, "u [T, C]")
    table = SequenceTable(state_slots, starts, counts)
    arguments = ScanArguments(u, projected, w_dt, dt_bias, a_log, d, gate, gate_first, state, table)
    sequences = check_arguments(arguments)
    y = nl.ndarray(u.shape, dtype=u.dtype, buffer=nl.shared_hbm)
    channels = find_core_range(u.shape[1], PARTITIONS, nl.program_id(0))
    if u.shape[0] == sequences:
        scan_step(y, arguments, channels)
    else:
        scan_prompts(y, arguments, channels)
    return y, state


def check_arguments(arguments):
    """Return the number of sequences B; raise AssertionError if shapes or dtypes do not fit together.

    Refused are also R above MOST_RANK and N above MOST_STATES. arguments: record of the kernel's tensors.
    """
    u, w_dt, a_log, state = arguments.u, arguments.w_dt, arguments.a_log, arguments.state
    tokens, channels = u.shape
    expect_dims(2, w_dt, "w_dt [R, C]")
    expect_dims(2, a_log, "a_log [C, N]")
    rank, states = w_dt.shape[0], a_log.shape[1]
    assert rank <= MOST_RANK, f"selective_scan takes a rank of at most {MOST_RANK}, not {rank}"
    assert states <= MOST_STATES, f"selective_scan takes at most {MOST_STATES} states, not {states}"
    for name, tensor, shape in (
        ("projected", arguments.projected, (tokens, rank + 2 * states)),
        ("w_dt", w_dt, (rank, channels)),
        ("dt_bias", arguments.dt_bias, (1, channels)),
        ("a_log", a_log, (channels, states)),
        ("d", arguments.d, (1, channels)),
    ):
        assert tensor.shape == shape, f"{name} is {shape}, not {tensor.shape}"
    gate, first = arguments.gate, arguments.gate_first
    assert gate.shape[0] == tokens and first >= 0 and first + channels <= gate.shape[1], (
        f"gate is [{tokens}, {first + channels} or more], not {gate.shape}"
    )
    for name, tensor in (("projected", arguments.projected), ("gate", gate)):
        assert tensor.dtype == u.dtype, f"{name} is {tensor.dtype}, u is {u.dtype}"
    expect_dims(3, state, "state [S, C, N]")
    assert state.shape[1:] == (channels, states), f"state is [S, {channels}, {states}], not {state.shape}"
    assert state.dtype == nl.float32, f"state is float32, not {state.dtype}"
    return check_table(tokens, state, arguments.table)


def selective_scan_reference(
    u: np.ndarray,
    projected: np.ndarray,
    w_dt: np.ndarray,
    dt_bias: np.ndarray,
    a_log: np.ndarray,
    d: np.ndarray,
    gate: np.ndarray,
    state: np.ndarray,
    state_slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    gate_first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (y, state): y [T, C] in u's dtype, computed in float32 token by token, and `state` itself.

    The slots of the sequences in `state` are updated in place. A sequence with starts 0 begins with zeros,
    and tokens from its `counts` on change no state.
    """
    rank, (channels, states) = len(w_dt), a_log.shape
    low, into, out = np.split(widened(projected), (rank, rank + states), axis=1)
    inputs, rates = widened(u), -np.exp(widened(a_log))
    steps = np.logaddexp(0, low @ widened(w_dt) + widened(dt_bias))
    scanned = np.empty(u.shape, inputs.dtype)
    tokens = len(u) // len(state_slots)
    for number, (slot, start, count) in enumerate(np.hstack([state_slots, starts, counts])):
        current = state[slot] if start else np.zeros_like(state[slot])
        for token in range(number * tokens, (number + 1) * tokens):
            dt = steps[token][:, None] * float(token - number * tokens < count)
            current = np.exp(dt * rates) * current + dt * inputs[token][:, None] * into[token]
            scanned[token] = current @ out[token]
        state[slot] = current
    skipped = scanned + inputs * widened(d)
    gates = activation_reference(widened(gate[:, gate_first : gate_first + channels]), "silu")
    return (skipped * gates).astype(u.dtype), state
