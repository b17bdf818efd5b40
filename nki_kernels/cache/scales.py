"""Scales of caches: a cache of 8 bits holds keys and values divided by the scale of their head, and rounded.

The decode and prompt kernels load scales, round new keys and values, and apply scales through this module. A row of
latent attention has a scale for its latent and one for its rotated key, whose magnitudes have nothing in common.

    stored = round(x * (1 / scale)) within the range of the cache's dtype;   used = stored * scale

Attention is linear in the scales of a head. So kernels compute with stored numbers: queries are multiplied by the
scale of their keys, and outputs by the scale of their values. New tokens attend to the rounded numbers of each other,
as later tokens will. So a prompt gives the same outputs in one launch and in several.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS, load_repeated
from nki_kernels.weights import is_fp8

LARGEST_BFLOAT16 = (2.0 - 2.0**-7) * 2.0**127
LARGEST_STORED = {
    "int8": 127.0,
    "float8_e4m3": 240.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "bfloat16": LARGEST_BFLOAT16,
}
"""Largest numbers that caches with scales store, by the name of their dtype."""


@dataclass
class RowScales(nl.NKIObject):
    """Scales of latent rows stored in `dtype`, and their inverses, of the latent and of the key: [128, 1] in SBUF."""

    dtype: object
    latent: nl.NkiTensor
    key: nl.NkiTensor
    inverse_latent: nl.NkiTensor
    inverse_key: nl.NkiTensor

    def round_latents(self, tile):
        """Replace latents in SBUF, in place, by the numbers that the cache stores. A partition has at most one row."""
        round_to_cache(tile, self.inverse_latent[0 : tile.shape[0], :], self.dtype)

    def round_keys(self, tile):
        """Replace rotated keys in SBUF, in place, by the numbers that the cache stores."""
        round_to_cache(tile, self.inverse_key[0 : tile.shape[0], :], self.dtype)


def load_row_scales(row_scale, dtype):
    """Load the scales of latent rows into SBUF and return them, with their inverses, as `RowScales`; None without any.

    Args:
        row_scale: [1, 2] float32 in HBM, of the latent and of the rotated key, or None.
        dtype: of the cache.

    Raises:
        AssertionError: the scales have another shape, or do not go with the dtype.
    """
    if row_scale is None:
        return None
    find_stored_range(dtype)
    assert row_scale.shape == (1, 2), f"row_scale is [1, 2], of latent and key, not {row_scale.shape}"
    scales = load_repeated(row_scale, PARTITIONS)
    inverses = invert(scales)
    return RowScales(dtype, scales[:, 0:1], scales[:, 1:2], inverses[:, 0:1], inverses[:, 1:2])


@dataclass
class CacheScales(nl.NKIObject):
    """Scales of a cache of `dtype`, and their inverses: [128, Hk] float32 in SBUF, the same on every partition."""

    dtype: object
    keys: nl.NkiTensor
    values: nl.NkiTensor
    inverse_keys: nl.NkiTensor
    inverse_values: nl.NkiTensor

    def select_share(self, share, kv_heads):
        """Return the scales of a share's kv heads, as views.

        Args:
            share: a `Share`.
            kv_heads: number of kv heads of the whole launch.
        """
        return CacheScales(
            self.dtype,
            share.select_columns(self.keys, kv_heads),
            share.select_columns(self.values, kv_heads),
            share.select_columns(self.inverse_keys, kv_heads),
            share.select_columns(self.inverse_values, kv_heads),
        )


def load_scales(k_scale, v_scale, cache):
    """Load the scales of a cache into SBUF and return them, with their inverses, as `CacheScales`; None without scales.

    A launch without caches has none.

    Args:
        k_scale: [1, Hk] float32 in HBM, or None.
        v_scale: the same for values.

    Raises:
        AssertionError: only one scale is given, or a scale has another shape. Caches with scales are not both int8 or
            both of one other dtype, or int8 caches have none.
    """
    if cache.k_cache is None:
        return None
    dtype = cache.k_cache.dtype
    assert (k_scale is None) == (v_scale is None), "k_scale and v_scale come together: pass both or neither"
    if k_scale is None:
        assert dtype != nl.int8, "caches of int8 take k_scale and v_scale; pass both"
        return None
    find_stored_range(dtype)
    assert cache.v_cache.dtype == dtype, (
        f"k_cache is {dtype}, v_cache is {cache.v_cache.dtype}; caches with scales have one dtype"
    )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        assert scale.shape == (1, cache.kv_heads), f"{name} is [1, {cache.kv_heads}], not {scale.shape}"
    keys, values = load_repeated(k_scale, PARTITIONS), load_repeated(v_scale, PARTITIONS)
    return CacheScales(dtype, keys, values, invert(keys), invert(values))


def invert(scales):
    """Return 1 / scales as a new float32 SBUF tile, because the Vector engine multiplies and does not divide."""
    result = nl.ndarray(scales.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=result, data=scales)
    return result


def find_stored_range(dtype):
    """Return the least and the largest number that a cache of `dtype` with scales stores.

    Raises AssertionError for other dtypes than int8, float8_e4m3, float8_e4m3fn, float8_e5m2 and bfloat16.
    """
    if dtype == nl.int8:
        return -128.0, 127.0
    if dtype == nl.float8_e5m2:
        return -57344.0, 57344.0
    if dtype == nl.bfloat16:
        return -LARGEST_BFLOAT16, LARGEST_BFLOAT16
    if dtype == nl.float8_e4m3fn:
        return -448.0, 448.0
    assert dtype == nl.float8_e4m3, (
        f"scales go with caches of int8, float8_e4m3, float8_e4m3fn, float8_e5m2 or bfloat16, not {dtype}"
    )
    return -240.0, 240.0


def choose_cache_operand(stored, dtype):
    """Return the dtype in which products take numbers of a cache of dtype `stored`, beside activations of `dtype`.

    The Tensor engine pairs fp8 with bfloat16; other numbers are converted to the activations' dtype.
    """
    if dtype != nl.float32 and is_fp8(stored):
        return stored
    return dtype


def count_bytes(dtype):
    """Return the bytes of an element of a cache or of activations: 1, 2 or 4."""
    if is_fp8(dtype) or dtype == nl.int8:
        return 1
    return 4 if dtype == nl.float32 else 2


def round_to_cache(tile, inverse_scales, dtype):
    """Replace keys or values in SBUF, in place, by the numbers that the cache stores: divided, clipped and rounded.

    Args:
        tile: keys or values in the activations' dtype, which it keeps.
        inverse_scales: 1 / scale of each element, shaped like `tile`, or of each partition, [partitions, 1].
        dtype: of the cache, one of those of `find_stored_range`.
    """
    least, largest = find_stored_range(dtype)
    ratios = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    if len(inverse_scales.shape) == 2 and inverse_scales.shape[1] == 1:
        nisa.tensor_scalar(dst=ratios, data=tile, op0=nl.multiply, operand0=inverse_scales)
    else:
        nisa.tensor_tensor(dst=ratios, data1=tile, data2=inverse_scales, op=nl.multiply)
    stored = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=stored, data=ratios, op0=nl.minimum, operand0=largest, op1=nl.maximum, operand1=least
    )
    nisa.tensor_copy(dst=tile, src=stored)


def load_scale_column(scales, times, together):
    """Return scales as a column [times * Hk * together, 1] float32 in SBUF, ordered by time, kv head and repetition.

    Args:
        scales: [128, Hk] in SBUF, the same on every partition.
        times: how often the row of all heads is repeated.
        together: how often each head's scale is repeated within the row.
    """
    heads = scales.shape[1]
    column = nl.ndarray((times * heads * together, 1), dtype=nl.float32, buffer=nl.sbuf)
    row = scales[0:1, :].reshape((1, 1, heads, 1)).broadcast(1, times).broadcast(3, together)
    # The queue of other loads may be full of keys by now.
    transfer(column, row, SCALAR)
    return column


def store_reference(rows: np.ndarray, scale: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """Return what a cache of `dtype` stores of `rows`: divided by `scale`, clipped and rounded.

    Without a scale `rows` is returned as it is.

    Args:
        scale: broadcasts to `rows`, or None.
    """
    if scale is None:
        return rows
    largest = LARGEST_STORED[np.dtype(dtype).name]
    ratios = np.clip(widened(rows) * (1 / scale), -largest - (dtype == np.int8), largest)
    return (np.rint(ratios) if dtype == np.int8 else ratios).astype(dtype)


def spread_reference(row_scale: np.ndarray | None, rank: int, width: int) -> np.ndarray | None:
    """Return the scale of each of `width` elements of a latent row, of which `rank` are the latent; None for None."""
    return None if row_scale is None else np.repeat(row_scale.reshape(-1), (rank, width - rank))


def use_reference(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Return what attention takes of stored rows, in float32: times `scale`, which broadcasts to them, if any."""
    return widened(stored) if scale is None else widened(stored) * scale
