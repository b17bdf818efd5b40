"""decoder_layer_decode: a decode step of a whole decoder layer, attention and feed-forward block, in one launch.

    m = attention_block_decode(x);   y = mlp(m)

Dimensions:
    As in the two kernels: T new tokens of B sequences, hidden size H, Hq query heads and Hk key/value heads of size D
    on this rank, S positions that the caches hold, F this rank's part of the intermediate size; Q = Hq * D and
    KV = Hk * D.

Arguments:
    x                [T, H] @ HBM, float32 or bfloat16, the same on every rank
    norm_weight, w_qkv, eps, q_size, kv_size, k_cache, v_cache, positions, scale, w_o, num_kv_heads, cos, sin, q_norm,
    k_norm, replica_group, slots, block_tables, window, softcap, sinks, rope_positions, k_scale,
    v_scale          as in attention_block_decode
    mlp_norm_weight  [1, H] @ HBM, of the RMSNorm before the feed-forward block, whose eps is the same
    w_up, w_down, w_gate, activation, b_gate, b_up, b_down, w_gate_scales, w_up_scales, w_down_scales, w_gate_zeros,
    w_up_zeros, w_down_zeros   as in mlp
    w_qkv_scales, w_o_scales, w_qkv_zeros, w_o_zeros   as in attention_block_decode; nibble_dtype is that of all weights
    returns y        [T, H] @ HBM, x's dtype, the same on every rank, and the two caches

Layout and tiling:
    Hidden states lie in runs, see `decode.hidden`, from x to the gated product, which takes them as its moving operand
    after the second norm: nothing is transposed. The residual of the MLP reaches the rows of the last product through
    HBM, while the gated product is computed.
    Rows for weights with scales are multiplied by the norm's weight alone, and sums of the gated product by 1 / rms.
    The engine that triggers the loads of weights and caches waits for no result. So while attention, output projection
    and norm still run, the weights of the MLP arrive, as many as the bytes hold that attention has left. The weight of
    the second norm and the biases are loaded before attention.
    Hidden states that do not fit in SBUF (see `keeps_hidden`) take the two kernels one after another, through HBM. So
    do those that meet weights of 4 bits in some of w_qkv, w_up and w_down alone, or scales of groups.

Limits:
    Those of the two kernels; one physical core.

Cost
    HBM: all weights and both caches once, x and m twice, y once. Predicted on trn2 in bfloat16 for a rank of Llama-3.1,
    share of the floor and, in brackets, what two launches reach without starting the second one: 70B over 64 ranks, one
    sequence of 1024 positions 93 % (88 %), 16 of 8192 97 % (95 %); 8B over 8 ranks, 16 of 4096 97 % (95 %). Bound: HBM;
    the first loads and the last product are not hidden.
    With weights of fp8, and with caches of fp8 too, 8B over 8 ranks takes 54 % and 53 % of the time of bfloat16 for one
    sequence of 4096 positions, 70 % and 55 % for 16, all-reduces excluded; 56 % and 55 %, 72 % and 54 % with them.
    Weights of int8 take longer than those of bfloat16: one engine converts them.
    With weights of 4 bits and caches of fp8, 8B over 8 ranks, T = 1 takes 51 % of the time of bfloat16, all-reduces
    included, and T = 16 54 %, as fp8 does. The Vector engine unpacks the weights: w_qkv and w_o before it prepares
    masks and angles, the first weights of the MLP while w_o is multiplied and while ranks are summed. Bound: it.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.attention_block_decode import (
    attend_hidden_states,
    attention_block_decode,
    attention_block_decode_reference,
    compute_step_sizes,
    keeps_hidden,
    wrap_weights,
)
from nki_kernels.attention_decode import check_rope_positions
from nki_kernels.cache.create import create_cache
from nki_kernels.decode.arguments import DecodeStep
from nki_kernels.decode.feed_forward import compute_feed_forward, prepare_feed_forward
from nki_kernels.mlp import activation_function, mlp, mlp_reference
from nki_kernels.norms.norm import Norm, create_rms_norm
from nki_kernels.projection.feed_forward_weights import check_arguments, wrap_mlp_weights

cores = (1,)


@nki.jit
def decoder_layer_decode(
    x,
    norm_weight,
    w_qkv,
    eps,
    q_size,
    kv_size,
    k_cache: nt.mutable_tensor,
    v_cache: nt.mutable_tensor,
    positions,
    scale,
    w_o,
    mlp_norm_weight,
    w_up,
    w_down,
    w_gate=None,
    num_kv_heads=None,
    cos=None,
    sin=None,
    q_norm=None,
    k_norm=None,
    replica_group=None,
    slots=None,
    block_tables=None,
    window=None,
    softcap=None,
    sinks=None,
    rope_positions=None,
    activation="silu",
    b_gate=None,
    b_up=None,
    b_down=None,
    k_scale=None,
    v_scale=None,
    w_qkv_scales=None,
    w_o_scales=None,
    w_gate_scales=None,
    w_up_scales=None,
    w_down_scales=None,
    w_qkv_zeros=None,
    w_o_zeros=None,
    w_gate_zeros=None,
    w_up_zeros=None,
    w_down_zeros=None,
    nibble_dtype="float8_e4m3",
):
    """Compute a decoder layer of a decode step: attention block, then feed-forward block, each summed over ranks.

    Returns (y [T, H] in x's dtype, k_cache, v_cache); the keys and values of the new tokens are written to
    the caches. The module docstring describes the arguments. AssertionError on two physical cores, or if
    arguments do not fit together.
    """
    assert nl.num_programs() == 1, (
        "decoder_layer_decode takes one physical core; on two, launch attention_block_decode and mlp"
    )
    mlp_weights = wrap_mlp_weights(
        (x.shape[1], w_up.shape[1]),
        (w_gate, w_up, w_down),
        (w_gate_scales, w_up_scales, w_down_scales),
        (w_gate_zeros, w_up_zeros, w_down_zeros),
        (None, None, None),
        (b_gate, b_up, b_down),
        nibble_dtype,
        False,
    )
    mlp_norm = Norm(mlp_norm_weight, None, 0.0, eps)
    check_arguments(x, mlp_weights, mlp_norm, x.shape[1])
    weights = wrap_weights(
        Norm(norm_weight, None, 0.0, eps),
        (w_qkv, w_qkv_scales, w_qkv_zeros),
        (w_o, w_o_scales, w_o_zeros),
        q_size,
        kv_size,
        nibble_dtype,
    )
    angle_rows = check_rope_positions(rope_positions, positions)
    cache = create_cache(k_cache, v_cache, slots, block_tables, None, x.shape[0])
    step = DecodeStep(
        positions,
        angle_rows,
        scale,
        cos,
        sin,
        create_rms_norm(q_norm, eps),
        create_rms_norm(k_norm, eps),
        window,
        softcap,
        sinks,
    )
    sizes = compute_step_sizes(x, weights, cache, step, num_kv_heads)
    if not (keeps_hidden(x, weights, sizes) and can_share_hidden(weights, mlp_weights)):
        between, k_cache, v_cache = attention_block_decode(
            x,
            norm_weight,
            w_qkv,
            eps,
            q_size,
            kv_size,
            k_cache,
            v_cache,
            positions,
            scale,
            w_o,
            num_kv_heads,
            cos,
            sin,
            q_norm,
            k_norm,
            replica_group,
            slots,
            block_tables,
            window,
            softcap,
            sinks,
            rope_positions,
            k_scale=k_scale,
            v_scale=v_scale,
            w_qkv_scales=w_qkv_scales,
            w_o_scales=w_o_scales,
            w_qkv_zeros=w_qkv_zeros,
            w_o_zeros=w_o_zeros,
            nibble_dtype=nibble_dtype,
        )
        y = mlp(
            between,
            w_up,
            w_down,
            w_gate,
            mlp_norm_weight,
            eps,
            replica_group,
            activation,
            b_gate,
            b_up,
            b_down,
            w_gate_scales=w_gate_scales,
            w_up_scales=w_up_scales,
            w_down_scales=w_down_scales,
            w_gate_zeros=w_gate_zeros,
            w_up_zeros=w_up_zeros,
            w_down_zeros=w_down_zeros,
            nibble_dtype=nibble_dtype,
        )
        return y, k_cache, v_cache
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    function = activation_function(activation)
    # The small operands of the MLP are loaded ahead of caches and weights, behind which they would arrive late.
    operands = prepare_feed_forward(mlp_norm, mlp_weights, function, replica_group, y)
    step.load_scales(k_scale, v_scale, cache)
    tile = attend_hidden_states(x, weights, cache, step, sizes, replica_group, operands)
    compute_feed_forward(tile, operands)
    return y, k_cache, v_cache


def can_share_hidden(weights, mlp_weights):
    """Return whether the feed-forward block takes hidden states as the attention block leaves them in SBUF.

    w_qkv and all matrices of the feed-forward block have 4 bits then, with scales of columns, or none of them has.

    Args:
        weights: `BlockWeights` of the attention block.
        mlp_weights: `Weights` of the feed-forward block.
    """
    for matrix in (mlp_weights.w_up, mlp_weights.w_down):
        if matrix.adds_zero_points() != weights.is_paired():
            return False
        if matrix.nibbles is not None and not matrix.adds_zero_points():
            return False
    return True


def decoder_layer_decode_reference(
    x: np.ndarray,
    norm_weight: np.ndarray,
    w_qkv: np.ndarray,
    eps: float,
    q_size: int,
    kv_size: int,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    positions: np.ndarray,
    scale: float,
    w_o: np.ndarray,
    mlp_norm_weight: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    w_gate: np.ndarray | None = None,
    num_kv_heads: int | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    q_norm: np.ndarray | None = None,
    k_norm: np.ndarray | None = None,
    replica_group: object = None,
    slots: np.ndarray | None = None,
    block_tables: np.ndarray | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    rope_positions: np.ndarray | None = None,
    activation: str = "silu",
    b_gate: np.ndarray | None = None,
    b_up: np.ndarray | None = None,
    b_down: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    w_qkv_scales: np.ndarray | None = None,
    w_o_scales: np.ndarray | None = None,
    w_gate_scales: np.ndarray | None = None,
    w_up_scales: np.ndarray | None = None,
    w_down_scales: np.ndarray | None = None,
    w_qkv_zeros: np.ndarray | None = None,
    w_o_zeros: np.ndarray | None = None,
    w_gate_zeros: np.ndarray | None = None,
    w_up_zeros: np.ndarray | None = None,
    w_down_zeros: np.ndarray | None = None,
    nibble_dtype: str = "float8_e4m3",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the kernel's results on one rank with NumPy: y [T, H], and the caches, updated in place.

    Calls the references of `attention_block_decode` and `mlp`. `replica_group` and `nibble_dtype` are not read: nothing
    is summed over ranks.
    """
    attended = (x, norm_weight, w_qkv, eps, q_size, kv_size, k_cache, v_cache, positions, scale, w_o)
    tables = (num_kv_heads, cos, sin, q_norm, k_norm)
    options = (slots, block_tables, window, softcap, sinks, rope_positions)
    between, k_cache, v_cache = attention_block_decode_reference(
        *attended,
        *tables,
        None,
        *options,
        k_scale=k_scale,
        v_scale=v_scale,
        w_qkv_scales=w_qkv_scales,
        w_o_scales=w_o_scales,
        w_qkv_zeros=w_qkv_zeros,
        w_o_zeros=w_o_zeros,
    )
    weights = (w_up, w_down, w_gate, mlp_norm_weight)
    y = mlp_reference(
        between,
        *weights,
        eps,
        None,
        activation,
        b_gate,
        b_up,
        b_down,
        w_gate_scales=w_gate_scales,
        w_up_scales=w_up_scales,
        w_down_scales=w_down_scales,
        w_gate_zeros=w_gate_zeros,
        w_up_zeros=w_up_zeros,
        w_down_zeros=w_down_zeros,
    )
    return y, k_cache, v_cache
