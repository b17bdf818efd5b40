"""attention_mixed: attention of sequences that decode and of prompts, whose rows follow theirs, in one launch.

    o[t] = attention_decode for the first `decoding` rows, attention_prefill for the last ones

Everything else of a step takes both kinds of rows alike (selective batching), so weights are read once for all of them.

Dimensions:
    As in the two kernels: T rows, of which the first belong to A sequences that decode, as many new tokens each, and
    the last ones to B prompts of equal lengths; Hq query heads and Hk key/value heads of size D; P pages of `page`
    positions; N and M pages of a sequence that decodes and of a prompt.

Arguments:
    q              [T, Hq * D] @ HBM, float32 or bfloat16; rotated
    k, v           [T, Hk * D] @ HBM, q's dtype; or both None: the caches hold those of the new tokens already
    k_cache, v_cache  [P, page, Hk, D] @ HBM, any float dtype, or int8 with scales; the new positions are written
    positions      [T, 1] int32 @ HBM, as the tables count them
    scale          compile-time float > 0
    decoding       compile-time int, rows of the sequences that decode, between 1 and T - 1
    num_kv_heads   compile-time int or None
    slots          [T, 1] int32 @ HBM, where the caches take the new tokens
    block_tables   [A, N] int32 @ HBM, pages of the sequences that decode
    prompt_tables  [B, M] int32 @ HBM, pages of the prompts
    prefix         compile-time int, the cached positions of each prompt that are read
    window, softcap, sinks, k_scale, v_scale, k_pages, v_pages, newest_tables  as in attention_decode; prompts with
                   pages of 4 bits as in attention_prefill
    returns o      [T, Hq * D] @ HBM, q's dtype, and the two caches; o alone without k and v

Layout, tiling
    Those of `attention_decode`, then those of `attention_prefill`. The rows that decode come first; the first loads of
    the prompts are issued after all loads of the decode step, and run while its last groups are computed. On two cores
    a barrier separates the two, because a prompt's table may name a page after its own that the other core writes.

Limits:
    Those of both kernels.

Cost
    That of both. Predicted for Hq = 4, Hk = 1, D = 128 in bfloat16 on trn2, in microseconds, apart and together: 16
    sequences of 2048 positions and a prompt of 512 tokens, 98.8 and 103.4; the same and 496 tokens behind 2048 cached
    ones, 222.4 and 218.2.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.attention_decode import attention_decode_reference, check_packed, compute_sizes
from nki_kernels.attention_prefill import attend_prompts, attention_prefill_reference
from nki_kernels.cache.create import create_cache, create_prompt_cache
from nki_kernels.cache.packed_pages import PageArguments
from nki_kernels.decode.arguments import DecodeStep, RankArguments
from nki_kernels.decode.attend import attend_share
from nki_kernels.decode.share import wait_for_other_core
from nki_kernels.prefill.checks import check_prefill
from nki_kernels.prefill.prompts import Prompts, PromptStep
from nki_kernels.tiles import expect_dims

cores = (1, 2)


@nki.jit
def attention_mixed(
    q,
    k_cache: nt.mutable_tensor,
    v_cache: nt.mutable_tensor,
    positions,
    scale,
    decoding,
    k=None,
    v=None,
    num_kv_heads=None,
    slots=None,
    block_tables=None,
    prompt_tables=None,
    prefix=0,
    window=None,
    softcap=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
    k_pages=None,
    v_pages=None,
    newest_tables=None,
):
    """Compute attention of decoding sequences and of prompts in one launch, on paged caches.

    Rows 0 … decoding - 1 of q are the new tokens of the decoding sequences, the other rows those of the
    prompts. Returns (o [T, Hq * D] in q's dtype, k_cache, v_cache); new keys and values are written to
    the caches. Without k and v nothing is written, and o alone is returned. The module docstring
    describes the arguments and limits; AssertionError if the arguments violate them.
    """
    expect_dims(2, q, "q [T, Hq * D]")
    check_rows(q.shape[0], decoding, positions, slots, block_tables, prompt_tables)
    decode_rows, prompt_rows = (0, decoding), (decoding, q.shape[0])
    tokens = slice_rows(q, decode_rows), slice_rows(k, decode_rows), slice_rows(v, decode_rows)
    decode_slots = None if k is None else slice_rows(slots, decode_rows)
    pages = PageArguments(k_pages, v_pages, newest_tables)
    if pages.is_given():
        check_packed(window, None, k_scale)
    cache = create_cache(k_cache, v_cache, decode_slots, block_tables, None, decoding, k is None, pages)
    # A window that covers all positions of the tables is none.
    shorter, decode_positions = (
        drop_covering_window(window, cache.capacity),
        slice_rows(positions, decode_rows),
    )
    step = DecodeStep(decode_positions, decode_positions, scale, window=shorter, softcap=softcap, sinks=sinks)
    sizes = compute_sizes(tokens, cache, step, num_kv_heads)
    prompt_tokens = slice_rows(q, prompt_rows), slice_rows(k, prompt_rows), slice_rows(v, prompt_rows)
    prompt_slots, prompt_pages = slice_rows(slots, prompt_rows), PageArguments(k_pages, v_pages)
    prompt_cache = create_prompt_cache(k_cache, v_cache, prompt_slots, prompt_tables, None, prompt_pages)
    shorter = drop_covering_window(window, prefix + (q.shape[0] - decoding) // prompt_cache.sequences)
    prompt_step = PromptStep(scale, prefix, slice_rows(positions, prompt_rows), shorter, softcap, sinks)
    check_prefill(prompt_tokens, prompt_cache, prompt_step, num_kv_heads)
    o = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    step.load_scales(k_scale, v_scale, cache)
    attend_share(slice_rows(o, decode_rows), tokens, cache, sizes, step, RankArguments())
    # A prompt's table may name pages that the other core writes, so its loads wait for the decode rows' writes.
    wait_for_other_core(nl.num_programs(), k_cache, nisa.engine.sync)
    wait_for_other_core(nl.num_programs(), v_cache, nisa.engine.gpsimd)
    attend_prompts(Prompts(slice_rows(o, prompt_rows), prompt_tokens, prompt_cache, prompt_step, step.scales))
    if k is None:
        return o
    return o, k_cache, v_cache


def slice_rows(tensor, bounds):
    """Return a view of rows bounds[0] … bounds[1] - 1 of a tensor, or None for None."""
    return None if tensor is None else tensor[bounds[0] : bounds[1]]


def check_rows(tokens, decoding, positions, slots, block_tables, prompt_tables):
    """Raise AssertionError if rows of one kind are missing, or positions, slots or tables are.

    Of `tokens` rows at least one decodes and at least one is a prompt's. positions and slots are [tokens, 1];
    both block tables are needed, because the caches are paged.
    """
    assert 0 < decoding < tokens, (
        f"decoding is {decoding} of {tokens} rows; there have to be rows of both kinds: for one kind launch "
        "attention_decode or attention_prefill"
    )
    assert positions.shape == (tokens, 1), f"positions have to be [{tokens}, 1], not {positions.shape}"
    assert slots is not None and slots.shape == (tokens, 1), (
        f"slots have to be [{tokens}, 1], not {slots if slots is None else slots.shape}"
    )
    assert block_tables is not None and prompt_tables is not None, (
        "attention_mixed takes paged caches: give block_tables and prompt_tables"
    )


def drop_covering_window(window, positions):
    """Return the window if it is shorter than `positions`, else None: it would hide nothing."""
    return window if window is not None and window < positions else None


def attention_mixed_reference(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    positions: np.ndarray,
    scale: float,
    decoding: int,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    num_kv_heads: int | None = None,
    slots: np.ndarray | None = None,
    block_tables: np.ndarray | None = None,
    prompt_tables: np.ndarray | None = None,
    prefix: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    k_pages: np.ndarray | None = None,
    v_pages: np.ndarray | None = None,
    newest_tables: np.ndarray | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute o [T, Hq * D] with NumPy: attention_decode's reference for the first rows, then attention_prefill's.

    Returns (o in q's dtype, k_cache, v_cache); the caches are updated in place. Without k and v o alone is
    returned.
    """
    assert slots is not None
    outputs = []
    options = window, softcap, sinks
    for row_slice, decodes in ((slice(decoding), True), (slice(decoding, None), False)):
        row_q, row_k, row_v = (rows if rows is None else rows[row_slice] for rows in (q, k, v))
        if decodes:
            cache_arguments = None if k is None else slots[row_slice], block_tables
            done = attention_decode_reference(
                row_q,
                k_cache,
                v_cache,
                positions[row_slice],
                scale,
                row_k,
                row_v,
                num_kv_heads,
                *(None,) * 4,
                0.0,
                *cache_arguments,
                *options,
                k_scale=k_scale,
                v_scale=v_scale,
                k_pages=k_pages,
                v_pages=v_pages,
                newest_tables=newest_tables,
            )
        else:
            cache_arguments = positions[row_slice], prefix, slots[row_slice], prompt_tables
            done = attention_prefill_reference(
                row_q,
                k_cache,
                v_cache,
                scale,
                row_k,
                row_v,
                num_kv_heads,
                *cache_arguments,
                *options,
                k_scale=k_scale,
                v_scale=v_scale,
                k_pages=k_pages,
                v_pages=v_pages,
            )
        outputs.append(done if isinstance(done, np.ndarray) else done[0])
    o = np.concatenate(outputs)
    return o if k is None else (o, k_cache, v_cache)
