"""latent_keys_values: keys and values of every head, expanded from latents, for the prompts of latent attention.

    row[s]    = [l | k]: the RMS-normalised latent and the rotated key of position s, shared by all heads
    key[h]    = [k | w_uk[h] l]        value[h] = w_uv[h]^T l

The rows of the new tokens are normalised, rotated and written to the cache. `attention_prefill` then attends to the
keys and values, as to contiguous caches that hold those of the new tokens already.

Dimensions:
    T   tokens of B sequences, n of each, one sequence behind the other; Hq heads; L size of the latent; R rotated and P
    plain elements of a key; V of a value; W = L + R; S positions that the cache holds.

Arguments:
    kv            [T, W] @ HBM, float32 or bfloat16: latent and key of the new tokens, neither normalised nor rotated
    cache         [B, S, W] @ HBM, kv's dtype, or with block_tables [P, block, W]; the new rows are written. With
                  row_scale it is int8, fp8 or bfloat16
    positions     [T, 1] @ HBM, int32, consecutive within a sequence, the first at most `prefix`
    norm_weight   [1, L] @ HBM, of the latent; eps: compile-time float
    cos, sin      [S, R/2] @ HBM, float32
    w_uk          [Hq * P, L] @ HBM, float32 or bfloat16; w_uv [L, Hq * V]; heads: compile-time int
    prefix        compile-time int: so many positions before the new tokens are expanded too, valid or not; 0: none.
                  Positions behind the cache, of padded tokens, have rows of zeros
    slots         [T, 1] @ HBM, int32, page * block + offset: where the rows of the new tokens are written
    block_tables  [B, N] @ HBM, int32: the pages of each sequence, in the order of positions
    row_scale     [1, 2] @ HBM, float32: scales of the latent and of the key in a cache of another dtype, see
                  `cache.scales`
    returns keys  [B, Hq, R + P, M] and values [B, Hq, M, V] @ HBM, kv's dtype, by position, and the cache. M is n
                  without a prefix, else prefix + n

Layout
    Latents are transposed to [latent, position]: they are the moving operand of the keys, which leave the Tensor
    engine transposed, as attention reads them, and the stationary operand of the values. A partition holds up to 4
    neighbouring positions, so rows and values move in pieces of 1 KiB and more.

Tiling
    for groups of heads whose projections take 16 KiB of a partition each:
        for pieces of up to 512 positions of each sequence (latent/prompt_pieces.py), a chunk of 128 of each stage in
        turn:
            load piece i + 4; sum squares of i + 3; normalise and rotate i + 2, which goes to the cache; transpose
            i + 1; multiply and store piece i
    With several groups the latents of a sequence stay in SBUF. The Vector and the Scalar engine empty PSUM, whichever
    is behind in work.

Limits:
    L and V up to 512, P and R up to 128; pages of 1, 2, 4 … 128 positions; with several groups of heads transposed
    latents take at most 80 KiB per partition: 10240 positions of 512 elements in bfloat16. One physical core works: of
    two the first.

Cost
    HBM: rows of the cache and projections once, keys and values written. Tensor engine: 2 M B Hq L (P + V) operations.
    Predicted for L = 512, R = 64, P = V = 128 in bfloat16 on trn2 in program order and scheduled, as shares of the
    floor: 2048 new tokens with 16 heads 74 and 80 %, with 4 heads 55 and 63 %, with 2 heads 52 and 66 %; 8192 with 2
    heads 78 and 86 %. New rows behind a prefix are written by run-time addresses, 128 by 128, one DMA after another:
    3.1 us for each besides 2.5 us of GpSimd for their angles. 512 tokens behind 3584 take 97 us with 2 heads, 45 % of
    the floor, with 16 heads 290 us, 75 %.
"""

from __future__ import annotations

import nki
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.cache.latent import create_latent_cache
from nki_kernels.cache.scales import load_row_scales, spread_reference, store_reference, use_reference
from nki_kernels.latent.expansion import Expansion, expand
from nki_kernels.norms.norm import Norm
from nki_kernels.precision import widened
from nki_kernels.rmsnorm import rmsnorm_reference
from nki_kernels.rope import rope_reference
from nki_kernels.tiles import BANK, PARTITIONS, expect_dims

cores = (1,)

MAX_LATENT_BYTES = 81920
"""Bytes per partition of the transposed latents of a sequence, which stay in SBUF for several groups of heads."""

MAX_ROWS = 2**24
"""Rows of a cache: run-time addresses are computed in float32."""


@nki.jit
def latent_keys_values(
    kv,
    cache: nt.mutable_tensor,
    positions,
    norm_weight,
    eps,
    cos,
    sin,
    w_uk,
    w_uv,
    heads,
    prefix=0,
    slots=None,
    block_tables=None,
    row_scale=None,
):
    """Return keys and values of all heads, computed from latents; write the rows of the new tokens to the cache.

    Returns keys [B, Hq, R + P, M], values [B, Hq, M, V] in kv's dtype, and the cache. M counts the
    `prefix` positions, if any, and the new tokens of a sequence. The module docstring describes the
    arguments and limits; AssertionError if the arguments violate them.
    """
    expect_dims(2, kv, "kv [T, W]")
    latents = create_latent_cache(cache, slots, block_tables)
    case = Expansion(kv, latents, positions, (cos, sin), (w_uk, w_uv), heads, prefix)
    check_arguments(case, norm_weight, row_scale)
    keys = nl.ndarray((case.sequences, heads, case.depth, case.count), dtype=kv.dtype, buffer=nl.shared_hbm)
    values = nl.ndarray((case.sequences, heads, case.count, case.value), dtype=kv.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return keys, values, cache
    case.scales = load_row_scales(row_scale, cache.dtype)
    case.load_norm(Norm(norm_weight, None, 0.0, eps))
    expand(case, keys, values)
    return keys, values, cache


def check_arguments(case, norm_weight, row_scale):
    """Raise AssertionError if arguments do not fit each other, or sizes exceed the limits of the module docstring.

    case: `Expansion`, all arguments of the kernel but the norm's and the scales. Without row_scale the cache has
    kv's dtype.
    """
    w_uk, w_uv = case.w_uk, case.w_uv
    tokens, rows = case.kv.shape[0], case.cache.rows
    assert case.kv.shape[1] == case.width and (case.kv.dtype == rows.dtype or row_scale is not None), (
        f"kv is {case.kv.shape} {case.kv.dtype}; the cache has rows of {case.width} {rows.dtype}: give kv both, or "
        "the cache row_scale"
    )
    assert tokens % case.sequences == 0, (
        f"{tokens} tokens do not divide into {case.sequences} sequences: give each equally many"
    )
    assert case.positions.shape == (tokens, 1), (
        f"positions have to be [{tokens}, 1], not {case.positions.shape}"
    )
    case.cache.check(tokens)
    assert case.rope == 2 * case.tables[0].shape[1], (
        f"the cache has rows of {case.width}; w_uk has latents of {case.rank}, cos keys of "
        f"{2 * case.tables[0].shape[1]}: rows of {case.rank + 2 * case.tables[0].shape[1]} hold both"
    )
    assert norm_weight.shape == (1, case.rank), (
        f"norm_weight has to be [1, {case.rank}], not {norm_weight.shape}"
    )
    assert (
        w_uk.shape[0] % case.heads == 0 and w_uv.shape[0] == case.rank and w_uv.shape[1] % case.heads == 0
    ), f"w_uk {w_uk.shape} and w_uv {w_uv.shape} do not divide into {case.heads} heads"
    latent_bytes = case.count * case.latent_tiles * case.item_bytes if len(case.groups) > 1 else 0
    for name, size, most in (
        ("new tokens of a sequence", case.new, case.cache.capacity),
        ("positions of a prefix", case.prefix, case.cache.capacity),
        ("bytes of latents in a partition", latent_bytes, MAX_LATENT_BYTES),
        ("plain elements of a head", case.plain, PARTITIONS),
        ("rotated elements", case.rope, PARTITIONS),
        ("elements of the latent", case.rank, BANK),
        ("elements of a value", case.value, BANK),
        ("rows of the cache", rows.shape[0] * rows.shape[1], MAX_ROWS),
    ):
        assert size <= most, f"latent_keys_values takes at most {most} {name}, not {size}"


def latent_keys_values_reference(
    kv: np.ndarray,
    cache: np.ndarray,
    positions: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    w_uk: np.ndarray,
    w_uv: np.ndarray,
    heads: int,
    prefix: int = 0,
    slots: np.ndarray | None = None,
    block_tables: np.ndarray | None = None,
    row_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute keys and values with NumPy, as float32 products of all rows of a sequence with both projections.

    Returns keys, values, and the cache, which is updated in place.
    """
    tokens, rank, width = len(kv), w_uk.shape[1], cache.shape[2]
    sequences = len(cache) if block_tables is None else len(block_tables)
    new, dtype = tokens // sequences, kv.dtype
    latent = rmsnorm_reference(kv[:, :rank], norm_weight, eps)
    rows = np.concatenate([latent, rope_reference(kv[:, rank:], positions, cos, sin, 1)], axis=1)
    scales = spread_reference(row_scale, rank, width)
    rows = store_reference(rows, scales, cache.dtype)
    for token in range(tokens):
        row = token // new * cache.shape[1] + int(positions[token, 0])
        row = row if slots is None else int(slots[token, 0])
        cache[row // cache.shape[1], row % cache.shape[1]] = rows[token]
    keys, values = [], []
    for sequence in range(sequences):
        sequence_rows = rows[sequence * new : (sequence + 1) * new]
        if prefix:
            pages = cache[sequence : sequence + 1] if block_tables is None else cache[block_tables[sequence]]
            sequence_rows = np.concatenate(
                [pages.reshape(-1, width), np.zeros((prefix + new, width), cache.dtype)]
            )[: prefix + new]
        wide = use_reference(sequence_rows, scales)
        plain = (wide[:, :rank] @ widened(w_uk.astype(dtype)).T).reshape(len(sequence_rows), heads, -1)
        turned = np.broadcast_to(wide[:, None, rank:], (len(sequence_rows), heads, width - rank))
        keys.append(np.concatenate([turned, plain], axis=2).transpose(1, 2, 0))
        values.append(
            (wide[:, :rank] @ widened(w_uv.astype(dtype)))
            .reshape(len(sequence_rows), heads, -1)
            .swapaxes(0, 1)
        )
    return np.stack(keys).astype(dtype), np.stack(values).astype(dtype), cache
