"""Number formats of caches, and the scales of a model's caches.

A format with scales stores keys and values divided by the scale of their head, clipped and rounded. Kernels and the
reference model attend to stored numbers times their scales, also for the tokens of the same step. So a token has the
same keys and values in the step that computes it and in every later step.

The numbers of vLLM's formats fit two facts of the chips. Before trn3 their float8_e4m3 ends at 240, while checkpoints
have scales for float8_e4m3fn, which ends at 448: a scale is doubled, and stored numbers are half as large. An unsigned
exponent of two changes no mantissa, so only numbers below 2^-5 are rounded differently. Chips that multiply
float8_e4m3fn store it (`choose_cache_format`).

Four bits are for full pages. A token attends to its own page as it is, and to earlier ones as four bits store them. So
what it reads depends on its position alone, and not on the tokens that are computed with it. In a page each element of
a key has a scale, and each value of a token and head. (KIVI, arXiv 2402.02750.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from model.errors import ModelError
from model.formats.format import ChipLimits
from nkw.errors import shown

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
AUTO = "auto"
"""Name of the default cache format."""
E4M3FN = "fp8_e4m3fn"
"""Name of the cache format fp8 on chips that multiply float8_e4m3fn."""
INT4 = "int4"
"""Name of vLLM's cache format of four bits, for pages of attention to all positions."""
STEPS = np.float32(7.25)
"""The largest magnitude of a group of four bits, counted in its scale: stored numbers are -8 … 7 times the scale."""
LEAST_MAGNITUDE = np.float32(2.0**-100)
"""Least magnitude from which the scale of a group is computed, so that groups of zeros have a scale."""


@dataclass(frozen=True)
class CacheFormat:
    """Number format of the keys and values in a cache.

    dtype    dtype of the stored numbers; None for the dtype of the activations
    largest  stored number for the largest magnitude of a head, which determines the scale; 0 for scales of 1
    packs_pages  whether full pages have four bits; `dtype` is then that of the pages that new tokens fill
    """

    dtype: np.dtype | None = None
    largest: float = 0.0
    packs_pages: bool = False

    def choose_dtype(self, activations: np.dtype) -> np.dtype:
        """Return the dtype of the stored numbers, for a dtype of the activations."""
        return self.dtype or activations

    def is_rounded(self, activations: np.dtype) -> bool:
        """Return whether kernels take scales, and round new keys and values before they attend to them.

        They do for all dtypes but that of the activations; `nki_kernels.cache.scales` lists the dtypes.
        """
        return self.choose_dtype(activations) != activations

    def round(self, rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return what attention takes of keys or values after a cache has stored them, float32 like `rows`.

        Args:
            rows: Keys or values in float32.
            scales: Their scales, which broadcast to them.
        """
        if self.dtype is None:
            return rows
        is_integer = self.dtype.kind == "i"
        limits = (np.iinfo if is_integer else ml_dtypes.finfo)(self.dtype)
        ratios = np.clip(rows * (np.float32(1) / scales), float(limits.min), float(limits.max))
        return (np.rint(ratios) if is_integer else ratios).astype(self.dtype).astype(np.float32) * scales


_FP8 = CacheFormat(np.dtype(ml_dtypes.float8_e4m3), 224.0)

CACHE_FORMATS = {
    AUTO: CacheFormat(),
    "bfloat16": CacheFormat(BFLOAT16),
    "fp8": _FP8,
    "fp8_e4m3": _FP8,
    "fp8_e5m2": CacheFormat(np.dtype(ml_dtypes.float8_e5m2)),
    "int8": CacheFormat(np.dtype(np.int8), 127.0),
    E4M3FN: CacheFormat(np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
    INT4: CacheFormat(packs_pages=True),
}
"""Cache formats by the names of vLLM's `kv_cache_dtype`. 224 is half of 448, to which scales of e4m3fn belong."""


def choose_cache_format(name: str, chip: ChipLimits) -> str:
    """Return the name of the format in which a chip stores caches of the format `name`.

    The formats fp8 and fp8_e4m3 become fp8_e4m3fn on a chip that multiplies these numbers.

    Args:
        name: A name in `CACHE_FORMATS`.
        chip: The chip.

    Raises:
        ModelError: The name is fp8_e4m3fn, and the chip does not multiply it.
    """
    if name == E4M3FN and not chip.matmul_e4m3fn:
        raise ModelError("kv_cache_dtype is 'fp8_e4m3fn', and this chip multiplies float8_e4m3: use fp8")
    return E4M3FN if chip.matmul_e4m3fn and CACHE_FORMATS[name] == _FP8 else name


def check_cache_dtype(name: str, has_pages: bool = True) -> None:
    """Check that `name`, the option kv_cache_dtype, names a cache format; return nothing.

    Args:
        name: The name.
        has_pages: Whether caches have pages.

    Raises:
        ModelError: CACHE_FORMATS lacks the name, or its format is for pages and there are none.
    """
    if name in CACHE_FORMATS and CACHE_FORMATS[name].packs_pages and not has_pages:
        raise ModelError(
            f"kv_cache_dtype is '{name}', which is for pages, and this cache is contiguous: use int8 or fp8, or the "
            "engine (nkw serve, LLM)",
            "NKW-MODEL-OPTION",
        )
    if name not in CACHE_FORMATS:
        raise ModelError(f"kv_cache_dtype is '{shown(name, 40)}'; it is one of {', '.join(CACHE_FORMATS)}")


@dataclass(frozen=True, eq=False)
class CacheScales:
    """Scales of a model's caches.

    `by_array` has the scales of an array by its name: one, or one for each of the model's key/value heads; of the
    rows of latent attention one, or one for the latent and one for the rotated key. Other arrays have scales of 1.
    """

    by_array: Mapping[str, np.ndarray] = field(default_factory=dict)

    def find(self, array: str, count: int) -> np.ndarray:
        """Return the `count` scales of an array, float32 [count]."""
        scales = np.asarray(self.by_array.get(array, 1), np.float32).reshape(-1)
        return np.broadcast_to(scales, (count,))


UNSCALED = CacheScales()
"""Scales of 1."""


@dataclass(frozen=True)
class CacheRounding:
    """Format and scales with which the reference model stores keys, values and rows of latent attention.

    `block_size` is the number of positions of a page, for a format that packs pages.
    """

    format: CacheFormat = CacheFormat()
    scales: CacheScales = UNSCALED
    block_size: int = 0

    def store_heads(self, array: str, rows: np.ndarray) -> np.ndarray:
        """Return keys or values [heads, positions, head_dim] of the cache array `array` as attention takes them."""
        return self.format.round(rows, self.scales.find(array, len(rows)).reshape(-1, 1, 1))

    def store_latents(self, array: str, rows: np.ndarray, rank: int) -> np.ndarray:
        """Return rows [positions, latent | rotated key] as attention takes them; `rank` elements are the latent."""
        scales = np.repeat(self.scales.find(array, 2), (rank, rows.shape[1] - rank))
        return self.format.round(rows, scales)

    def round_pages(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values [heads, positions, head_dim] as later pages read them; a last page may not be full.

        Keys have a scale in bfloat16 for each element of a page, values one in float32 for each position.
        """
        heads, positions, head_dim = keys.shape
        full = positions // self.block_size * self.block_size
        pages = keys[:, :full].reshape(heads, -1, self.block_size, head_dim)
        rounded_keys, rounded_values = keys.copy(), values.copy()
        rounded_keys[:, :full] = round_to_four_bits(pages, 2, BFLOAT16).reshape(heads, full, head_dim)
        rounded_values[:, :full] = round_to_four_bits(values[:, :full], 2, np.dtype(np.float32))
        return rounded_keys, rounded_values


def round_to_four_bits(groups: np.ndarray, axis: int, scale_dtype: np.dtype) -> np.ndarray:
    """Return numbers rounded to -8 … 7 times the scale of their group, float32 like `groups`.

    Args:
        groups: Numbers in float32.
        axis: Axis along which numbers share a scale.
        scale_dtype: Dtype to which scales are rounded.
    """
    largest = np.abs(groups).max(axis=axis, keepdims=True, initial=LEAST_MAGNITUDE)
    scales = (largest * (1 / STEPS)).astype(scale_dtype).astype(np.float32)
    return np.clip(np.rint(groups * (1 / scales)), -8, 7).astype(np.float32) * scales


PLAIN_CACHING = CacheRounding()
"""Caches in the dtype of the activations."""
