"""attention_block_decode: a decode step from the norm before attention to the output projection, in one launch.

    q, k, v = qkv_projection(x);  o = attention_decode(q, k, v);  y = x + sum over ranks of o @ w_o

Dimensions
    As in the three kernels: T new tokens of B sequences, hidden size H, Hq query heads and Hk key/value heads of size D
    on this rank, S positions that the caches hold; Q = Hq * D and KV = Hk * D.

Arguments
    x            [T, H] @ HBM, float32 or bfloat16
    norm_weight  [1, H] @ HBM
    w_qkv        [H, Q + 2 KV] @ HBM
    eps          compile-time float, of the norms
    q_size, kv_size  compile-time ints, Q and KV
    k_cache, v_cache, positions, scale, num_kv_heads, cos, sin, q_norm, k_norm, slots, block_tables, window, softcap,
    sinks        as in attention_decode
    w_o          [Q, H] @ HBM
    replica_group  the ranks whose products are added, or None
    returns y    [T, H] @ HBM, x's dtype, and the two caches

Layout and tiling
    Those of the three kernels, which share the launch. What one of them returns goes through HBM; it is small. Sync
    triggers the loads of weights and caches and waits for no activation, so the DMA engines bring keys, values and w_o
    while queries are still projected.

Limits
    Those of the three kernels.

Cost
    HBM: w_qkv, w_o and both caches once. Predicted on trn2 in bfloat16 for 4 heads on 1 and H = 4096, share of the
    floor and, in brackets, what three launches reach: 4 sequences of 4096 positions 83 % (72 %), 16 of 1024 82 %
    (65 %); one sequence of 1024, where norm, product, softmax and product follow each other, 71 % (59 %).
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.attention_decode import (
    attend,
    attention_decode_reference,
    check_caches,
    check_options,
    check_shapes,
    check_sizes,
    check_tables,
)
from nki_kernels.decode.pipeline import Work
from nki_kernels.decode.sizes import Sizes
from nki_kernels.decode.tokens import expect_tokens
from nki_kernels.output_projection import output_projection, output_projection_reference
from nki_kernels.qkv_projection import qkv_projection, qkv_projection_reference


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
):
    """Norm, queries, keys and values, attention with the caches, output projection, and the residual."""
    sizes = Sizes(x.shape[0], q_size, x.dtype, k_cache, block_tables)
    check_tables(sizes.depth, cos, sin, q_norm, k_norm)
    check_sizes(sizes)
    check_options(sizes, window, softcap, sinks)
    tokens = expect_tokens(sizes, positions, (cos, sin))
    q, k, v = qkv_projection(x, norm_weight, w_qkv, eps, q_size, kv_size)
    check_caches(q, k, k_cache, v_cache, slots, block_tables)
    check_shapes(q, k, v, positions, scale, num_kv_heads, sizes)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    work = Work(sizes, scale, k_cache, v_cache, v, o, slots, block_tables, (window, softcap, sinks))
    attend(work, q, k, tokens, (q_norm, k_norm, eps))
    return output_projection(o, w_o, x, replica_group), k_cache, v_cache


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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three references one after another; of one rank."""
    q, k, v = qkv_projection_reference(x, norm_weight, w_qkv, eps, q_size, kv_size)
    turned = (cos, sin, q_norm, k_norm, eps)
    paged = (slots, block_tables)
    o, k_cache, v_cache = attention_decode_reference(
        q, k, v, k_cache, v_cache, positions, scale, num_kv_heads, *turned, *paged, window, softcap, sinks
    )
    return output_projection_reference(o, w_o, x), k_cache, v_cache
