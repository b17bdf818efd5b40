"""attention_block_decode: a decode step from the norm before attention to the output projection, in one launch.

    q, k, v = qkv_projection(x);  o = attention_decode(q, k, v);  y = x + sum over ranks of o @ w_o

Dimensions:
    As in the three kernels: T new tokens of B sequences, hidden size H, Hq query heads and Hk key/value heads of size D
    on this rank, S positions that the caches hold; Q = Hq * D and KV = Hk * D.

Arguments:
    x            [T, H] @ HBM, float32 or bfloat16
    norm_weight  [1, H] @ HBM
    w_qkv        [H, Q + 2 KV] @ HBM
    eps          compile-time float, of the norms
    q_size, kv_size  compile-time ints, Q and KV
    k_cache, v_cache, positions, scale, num_kv_heads, cos, sin, q_norm, k_norm, slots, block_tables, window, softcap,
    sinks, rope_positions, position_group, position_ranks, position_rank, k_scale, v_scale  as in attention_decode
    w_o          [Q, H] @ HBM
    w_qkv_scales [1, Q + 2 KV] @ HBM, float32; w_o_scales [1, H] the same; or None. Scales multiply the columns of their
                 weight, whose dtype is then float8_e4m3, float8_e5m2 or int8, or uint8 for 4 bits
    w_qkv_zeros, w_o_zeros, nibble_dtype
                 zero points and operands of weights of 4 bits, as in qkv_projection and output_projection
    replica_group  the ranks whose products are added, or None
    returns y    [T, H] @ HBM, x's dtype, and the two caches

Layout
    H lies on the partitions of hidden states, in runs (see `decode.hidden`), D on those of queries and keys, which come
    from weights that are stationary operands, and of what attention gives. So norm, rotation and residual take 128
    lanes for one token too, nothing is transposed on the way, and nothing but x, y and new keys and values meets HBM.

Tiling
    Of `attention_decode`, after w_qkv streamed past x in parts of 1 MiB. Sync triggers the loads of weights and caches,
    which wait for no result: caches of up to 32 KiB per partition, w_qkv, other caches, and behind the last keys w_o.
    Hidden states of more than 8 KiB per partition, and more than 128 tokens, go through HBM between the three kernels.
    So do those that meet a w_qkv of 4 bits unless they fit in paired runs, see `nibbles`, and heads that meet a w_o of
    4 bits unless they, or neighbours that share the partitions, have 128 elements.

    On two cores each computes half of the columns of q, k and v, attends with its part (see attention_decode), and
    computes half of the columns of y; a barrier stands between.

Limits:
    Those of `attention_decode`, with D up to 256. H up to 8192.

Cost
    HBM: w_qkv, w_o and both caches once. Predicted on trn2 in bfloat16, of the floor: for 4 heads on 1 and H = 4096
    87 % for one sequence of 1024 positions, 89 % for 16, 80 % for 64, where GpSimd addresses new keys for longer than
    the loads of the values take; 95 % for 16 sequences of 4096. For one head, H = 8192 and one sequence of 1024
    positions 83 %: what follows w_qkv is a chain of norm, rotation, scores, softmax and two products.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.attention_decode import (
    attention_decode_reference,
    check_options,
    check_rope_positions,
    check_sizes,
    check_step,
    check_tables,
)
from nki_kernels.cache.create import create_cache
from nki_kernels.decode.arguments import DecodeStep, RankArguments
from nki_kernels.decode.attend import ShareStart
from nki_kernels.decode.block import BlockWeights, compute_attention_block, create_output_tile
from nki_kernels.decode.hidden import can_hold_hidden, load_hidden, store_hidden
from nki_kernels.decode.launch import DecodeLaunch
from nki_kernels.decode.share import find_core_share, wait_for_other_core
from nki_kernels.decode.sizes import Sizes
from nki_kernels.nibbles import count_stored_rows, widen_nibbles_reference
from nki_kernels.norms.norm import Norm, create_rms_norm
from nki_kernels.output_projection import output_projection, output_projection_reference
from nki_kernels.precision import widened
from nki_kernels.qkv_projection import qkv_projection, qkv_projection_reference
from nki_kernels.rmsnorm import MAX_HIDDEN
from nki_kernels.tiles import expect_dims
from nki_kernels.weights import wrap_projection_operand

cores = (1, 2)

MAX_DEPTH = 256
"""Elements of a head: the weights of a taller one leave too little of SBUF to the caches."""


@nki.jit
def attention_block_decode(
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
    position_group=None,
    position_ranks=1,
    position_rank=None,
    k_scale=None,
    v_scale=None,
    w_qkv_scales=None,
    w_o_scales=None,
    w_qkv_zeros=None,
    w_o_zeros=None,
    nibble_dtype="float8_e4m3",
):
    """Compute y = x + attention(norm(x)) of a decode step, from the norm to the output projection.

    Returns (y [T, H] in x's dtype, k_cache, v_cache); the keys and values of the new tokens are written
    to the caches. The module docstring describes the arguments and limits; AssertionError if the
    arguments violate them.
    """
    expect_dims(2, x, "x [T, H]")
    weights = wrap_weights(
        Norm(norm_weight, None, 0.0, eps),
        (w_qkv, w_qkv_scales, w_qkv_zeros),
        (w_o, w_o_scales, w_o_zeros),
        q_size,
        kv_size,
        nibble_dtype,
    )
    angle_rows = check_rope_positions(rope_positions, positions)
    ranks = RankArguments(position_group, position_ranks, position_rank)
    ranks.check()
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
    sizes = compute_step_sizes(x, weights, cache, step, num_kv_heads, position_ranks)
    step.load_scales(k_scale, v_scale, cache)
    if nl.num_programs() == 1 and position_ranks == 1 and keeps_hidden(x, weights, sizes):
        y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = attend_hidden_states(x, weights, cache, step, sizes, replica_group)
        store_hidden(y, tile, weights.is_paired())
        return y, k_cache, v_cache
    share = find_core_share(sizes)
    # Positions and angles are loaded before the projection, because they depend on none of its results.
    start = None if share is None else ShareStart(share, cache, sizes, step)
    q, k, v = qkv_projection(
        x,
        w_qkv,
        q_size,
        kv_size,
        norm_weight,
        eps,
        w_qkv_scales=w_qkv_scales,
        w_qkv_zeros=w_qkv_zeros,
        nibble_dtype=nibble_dtype,
    )
    # Each core projects half of the columns; the barriers run beside each other.
    wait_for_other_core(nl.num_programs(), q, nisa.engine.scalar)
    wait_for_other_core(nl.num_programs(), k, nisa.engine.tensor)
    wait_for_other_core(nl.num_programs(), v, nisa.engine.gpsimd)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    if start is not None:
        start.attend(o, (q, k, v), ranks)
    # Each core projects the outputs of both to half of the columns of y.
    wait_for_other_core(nl.num_programs(), o, nisa.engine.scalar)
    y = output_projection(
        o,
        w_o,
        x,
        replica_group,
        w_o_scales=w_o_scales,
        w_o_zeros=w_o_zeros,
        nibble_dtype=nibble_dtype,
    )
    return y, k_cache, v_cache


def wrap_weights(norm, w_qkv, w_o, q_size, kv_size, nibble_dtype):
    """Return `BlockWeights` of the arrays in HBM, and check scales and zero points.

    Args:
        norm: the `Norm` before the block.
        w_qkv: w_qkv, its scales and its zero points; these two may be None.
        w_o: the same of w_o.
        nibble_dtype: the argument of the kernel.

    Raises:
        AssertionError: scales are not float32, or zero points not uint8, [1, columns of their weight].
    """
    hidden = norm.weight.shape[1]
    return BlockWeights(
        norm,
        wrap_projection_operand("w_qkv", w_qkv[0], hidden, w_qkv[1], w_qkv[2], nibble_dtype),
        wrap_projection_operand("w_o", w_o[0], q_size, w_o[1], w_o[2], nibble_dtype),
        q_size,
        kv_size,
    )


def keeps_hidden(x, weights, sizes):
    """Return whether hidden states x [T, H] @ HBM stay in SBUF between the norm and y.

    Args:
        weights: `BlockWeights`.
        sizes: `Sizes`.
    """
    return can_hold_hidden(x.shape[0], x.shape[1], x.dtype) and weights.can_meet_runs(sizes)


def attend_hidden_states(x, weights, cache, step, sizes, replica_group, following=None):
    """Return y of the attention block as a tile of hidden states in SBUF, in x's dtype.

    The tile is [partition, T, C] with C = ceil(H / 128): partition p holds elements p * C … of each row.
    Called on one core, for rows x [T, H] @ HBM small enough for `can_hold_hidden`. Keys and values of the new
    tokens go to the cache.

    Args:
        weights: `BlockWeights`.
        step: `DecodeStep`, the other arguments of the kernel.
        following: `FeedForwardOperands` of the block that follows, or None.
    """
    launch = DecodeLaunch(sizes, find_core_share(sizes), None, cache, create_output_tile(sizes), step)
    tile = load_hidden(x, weights.is_paired())
    return compute_attention_block(tile, weights, launch, replica_group, following)


def compute_step_sizes(x, weights, cache, step, num_kv_heads, ranks=1):
    """Return the `Sizes` of a decode step on this rank; raise AssertionError if its arguments do not fit.

    Args:
        weights: `BlockWeights`.
        step: `DecodeStep`, the other arguments of the kernel.
        num_kv_heads: the key/value heads that the caller expects in the caches, or None: any number.
        ranks: number of ranks that divide the positions of the caches.
    """
    sizes = Sizes(x.shape[0], weights.q_size, x.dtype, cache, ranks)
    check_step(step, num_kv_heads, sizes, MAX_DEPTH)
    check_weights(x, weights, sizes)
    check_tables(sizes.depth, step)
    check_sizes(sizes)
    check_options(sizes, step)
    return sizes


def check_weights(x, weights, sizes):
    """Raise AssertionError if weights do not fit the hidden states x [T, H], or the heads of the caches.

    The hidden size may be `MAX_HIDDEN` at most, kv_size is that of the caches, and q_size is a multiple of
    it.
    """
    hidden, q_size, kv_size = x.shape[1], weights.q_size, weights.kv_size
    w_qkv, w_o = weights.w_qkv.elements, weights.w_o.elements
    assert hidden <= MAX_HIDDEN, (
        f"attention_block_decode takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    )
    assert kv_size == sizes.kv_heads * sizes.depth, (
        f"kv_size is {kv_size}, but the caches have {sizes.kv_heads} key/value heads of {sizes.depth}: "
        f"pass {sizes.kv_heads * sizes.depth}"
    )
    assert q_size % kv_size == 0, (
        f"q_size {q_size} is no multiple of kv_size {kv_size}: each key/value head serves equally many query heads"
    )
    for name, weight, shape in (
        ("norm_weight", weights.norm.weight, (1, hidden)),
        ("w_qkv", w_qkv, (count_stored_rows(w_qkv, hidden), q_size + 2 * kv_size)),
        ("w_o", w_o, (count_stored_rows(w_o, q_size), hidden)),
    ):
        assert weight.shape == shape, f"{name} has to be {shape} for x {x.shape}, not {weight.shape}"


def attention_block_decode_reference(
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
    position_group: object = None,
    position_ranks: int = 1,
    position_rank: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    w_qkv_scales: np.ndarray | None = None,
    w_o_scales: np.ndarray | None = None,
    w_qkv_zeros: np.ndarray | None = None,
    w_o_zeros: np.ndarray | None = None,
    nibble_dtype: str = "float8_e4m3",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the kernel's results on one rank with NumPy: y [T, H], and the caches, updated in place.

    Calls the references of the three kernels one after another, on weights times their scales. `nibble_dtype`,
    `replica_group` and the `position_*` arguments are not read: nothing is summed over ranks, and the caches hold all
    positions.
    """
    w_qkv = widened(widen_nibbles_reference(w_qkv, x.shape[1], w_qkv_zeros), w_qkv_scales)
    w_o = widened(widen_nibbles_reference(w_o, q_size, w_o_zeros), w_o_scales)
    q, k, v = qkv_projection_reference(x, w_qkv, q_size, kv_size, norm_weight, eps)
    turned = (cos, sin, q_norm, k_norm, eps)
    options = (slots, block_tables, window, softcap, sinks, rope_positions)
    o, k_cache, v_cache = attention_decode_reference(
        q,
        k_cache,
        v_cache,
        positions,
        scale,
        k,
        v,
        num_kv_heads,
        *turned,
        *options,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return output_projection_reference(o, w_o, x), k_cache, v_cache
