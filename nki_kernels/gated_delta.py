"""gated_delta: the gated delta rule over prompts, in chunks, and the gated norm behind it (Qwen3-Next).

For every head, token after token, with q and k divided by their lengths and q by sqrt(dk) as well:

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q
    g = -exp(a_log) softplus(a + dt_bias),  beta = sigmoid(b),  y = o / rms(o) * norm_weight * silu(z)

Dimensions:
    T   tokens of B sequences, one after another, T / B of each; Hk key heads of dk elements, Hv value heads of dv;
    value head h has the queries and keys of key head h // (Hv / Hk). `slots` states are held.

Arguments:
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
    A unit is a chunk of 128 tokens of a sequence and up to four heads; a wave is four units that follow one another,
    one in float32. For each wave:
        what needs no state (`delta/chunk_scores.py`): scores of keys with keys and queries, decays, and the inverse of
        the triangle: blocks of 16 element by element (`delta/block_inverse.py`), which are then joined
        (`delta/chunk_inverse.py`).
        The state through the chunk (`delta/chunk_outputs.py`), three products after one another.
    A chain is a list of steps of one of these stages in one wave. There is no loop over steps: `delta/order.py` issues
    of all chains the step that can start first, so that stages of several waves interleave. `plan_chains` says which
    chains wait for which, `delta/wave_steps.py` has the steps.

Limits:
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

from nki_kernels.delta.block_inverse import allocate_scratch_buffers
from nki_kernels.delta.chunk_inverse import allocate_right_operands
from nki_kernels.delta.decay import compute_chunk_decays
from nki_kernels.delta.masks import build_chunk_constants
from nki_kernels.delta.order import Chain, Step, issue_all
from nki_kernels.delta.signature import Arguments, check_arguments, delta_rule_reference, select_gates
from nki_kernels.delta.state_slots import load_slot_numbers
from nki_kernels.delta.wave_plan import HEADS, Prompt, plan_units
from nki_kernels.delta.wave_steps import (
    IDLE,
    Wave,
    list_invert_steps,
    list_join_steps,
    list_output_steps,
    list_scale_steps,
    list_score_steps,
    list_state_steps,
    plan_wave,
)
from nki_kernels.recurrent.ssd_between import Differences
from nki_kernels.tiles import PARTITIONS, cast, load_repeated

cores = (1,)

AHEAD = 3
"""Waves on their way at a time."""

SUMS_AHEAD = 2
"""Waves whose decays are on their way at a time: `Differences` has tiles for eight units, two waves."""


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
    """Apply the gated delta rule to the tokens of each sequence, in chunks of 128, and the gated norm.

    Returns y [T, Hv * dv] in qkv's dtype in shared HBM, and `states`, of which the slots in `state_slots`
    are updated. The module docstring describes the arguments and limits; AssertionError if the arguments
    violate them.
    """
    gates = select_gates(gates, first, states)
    arguments = Arguments(
        qkv, gates, a_log, dt_bias, norm_weight, states, state_slots, starts, counts, key_heads, eps
    )
    check_arguments(arguments)
    y = nl.ndarray((qkv.shape[0], states.shape[1] * states.shape[3]), dtype=qkv.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y, states
    constants = build_chunk_constants(qkv.dtype)
    weight = cast(load_repeated(norm_weight, PARTITIONS), nl.float32)
    slots = load_slot_numbers(state_slots, starts, states.shape[0])
    waves, most_heads = [], 0
    for units in plan_units(arguments):
        waves.append(plan_wave(len(waves), units))
        most_heads = max(most_heads, waves[len(waves) - 1].blocks.heads)
    scratch, operands = (
        allocate_scratch_buffers(most_heads, qkv.dtype),
        allocate_right_operands(HEADS, qkv.dtype),
    )
    for unit in waves[0].units:
        unit.load(arguments, slots)
    decays = compute_chunk_decays(arguments, constants)
    differences = Differences() if decays.rows is not None else None
    prompt = Prompt(arguments, y, constants, weight, slots, scratch, operands, decays, differences)
    issue_all(prompt, plan_chains(waves))
    return y, states


def plan_chains(waves):
    """Return the list of all `Chain`s of steps of all waves, which `issue_all` interleaves.

    A wave is up to four units, each a chunk of 128 tokens of up to four heads; a chain is one stage of a
    wave. Nothing is issued here. The load chain of the first wave is empty, as the caller loads its operands.
    Each chain names the chains whose end it waits for:

    chain of wave w     steps                                          waits for
    load                DMAs of operands and states                    load w - 1, outputs w - AHEAD
    sums                DMAs of sums of decays                         scores w - SUMS_AHEAD
    scores              keys, decays, transposes, -A and P             load, sums, scores w - 1
    inverse             blocks of 16, by way of HBM                    scores, inverse w - 1
    scale               scaled keys, factors of outputs                scores, scale w - 1
    join                joins blocks to the inverse                    inverse, scale, join w - 1
    state               the state through the chunks                   join, state w - 1
    outputs             the last outputs                               state
    """
    chains, scores, outputs = [], [], []
    load, inverse, scale, join, state = [], [], [], [], []
    for w in range(len(waves)):  # w: wave
        wave = waves[w]
        load_steps = [Step(Wave.load, wave, IDLE, 2500)] if w > 0 else []
        load = [Chain(load_steps, load + take_before_last(outputs, AHEAD))]
        sums = [Chain([Step(Wave.load_sums, wave, IDLE, 2500)], take_before_last(scores, SUMS_AHEAD))]
        scores.append(Chain(list_score_steps(wave), load + sums + take_before_last(scores, 1)))
        scored = take_before_last(scores, 1)
        inverse = [Chain(list_invert_steps(wave), scored + inverse)]
        scale = [Chain(list_scale_steps(wave), scored + scale)]
        join = [Chain(list_join_steps(wave), inverse + scale + join)]
        state = [Chain(list_state_steps(wave), join + state)]
        outputs.append(Chain(list_output_steps(wave), state))
        chains.extend(load + sums + scored + inverse + scale + join + state + take_before_last(outputs, 1))
    return chains


def take_before_last(chains, count):
    """Return a list with only chains[len(chains) - count], or an empty list if there are fewer than `count` chains."""
    if len(chains) < count:
        return []
    return [chains[len(chains) - count]]


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
    """Compute y and the states with NumPy, token by token; `states` is updated in place."""
    return delta_rule_reference(
        qkv, gates, a_log, dt_bias, norm_weight, states, state_slots, starts, counts, key_heads, eps, first
    )
