"""Conversion between dtypes, by every engine and the DMA.

Equal dtypes keep their bits. Different dtypes always go through float32:

- to a smaller float: round to nearest, ties to even. Overflow gives infinity; float8_e4m3fn has none and gives NaN (not
  documented for plain casts; the format has nothing else, and only MX quantisation saturates).
- to tfloat32: a 10-bit mantissa in 4 bytes, same rounding. The reference's table of dtypes gives tfloat32 as
  (1S,8E,10M): the lower 13 bits of its word belong to no number. A cast writes them as 0; a float32 tile viewed as
  tfloat32 may have others, which an engine does not see and a copy between equal dtypes keeps.
- to an integer: round to nearest, ties to even, then saturate. NaN gives 0: not documented, and the choice of most
  saturating converters.
- to bool_: any nonzero value, NaN included, gives 1.
- to float8_e8m0fnu: the nearest power of two; zero gives the smallest scale, negative or infinite values NaN.
- integers to float32: round to nearest, ties to even, so magnitudes above 2**24 are inexact.

Subnormal numbers of every format are kept; nothing documents a flush to zero. Stochastic rounding, which a runtime can
switch on, is not modelled.

These functions run for every operand of every simulated instruction. ml_dtypes converts float32 and bfloat16 as fast as
integer arithmetic on the bits would (25 and 4 us against 22 and 7 us for 128 x 512 elements, before the NaN handling
that the bit form still lacks), so it is used. Its 8-bit conversions take 400 us; tables take 40 to 80.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nkw.errors import Unsupported
from simulate.numerics.dtypes import DTYPES, DType, bool_, float32, tfloat32
from simulate.numerics.quiet import quiet

Float32Array = NDArray[np.float32]

_FLOAT32 = float32.storage


def cast(array: NDArray[Any], source: DType, target: DType) -> NDArray[Any]:
    """Convert an array from one dtype to another, by the rules at the top of this module.

    Args:
        array: Elements of `source`, in `source.storage`.
        source: The dtype of the array.
        target: The dtype to convert to.

    Returns:
        A new array in `target.storage` of the same shape; the array itself, not a copy, if the dtypes are equal.

    Raises:
        Unsupported: One of two different dtypes is a packed x4 type (NKW-CAST-PACKED).
    """
    if source is target or (source == target and source.storage is target.storage):
        return array
    return from_float32(to_float32(array, source), target)


def to_float32(array: NDArray[Any], dtype: DType) -> Float32Array:
    """Convert the operand of an engine, an array of `dtype` in `dtype.storage`, to float32.

    Returns:
        A new float32 array; the array itself if the dtype is stored as float32 and is not tfloat32.

    Raises:
        Unsupported: The dtype is a packed x4 type (NKW-CAST-PACKED).
    """
    if dtype.storage is _FLOAT32 and dtype is not tfloat32:
        return array
    return _TO_FLOAT32[dtype](array)


def from_float32(array: Float32Array, dtype: DType) -> NDArray[Any]:
    """Round float32 results of an engine once to a dtype.

    Returns:
        A new array in `dtype.storage`; the array itself if the dtype is stored as float32 and is not tfloat32.

    Raises:
        Unsupported: The dtype is a packed x4 type (NKW-CAST-PACKED).
    """
    if dtype.storage is _FLOAT32 and dtype is not tfloat32:
        return array
    return _FROM_FLOAT32[dtype](array)


def _refuse_packed(dtype: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def refuse(array: NDArray[Any]) -> NDArray[Any]:
        raise Unsupported(
            "NKW-CAST-PACKED",
            f"{dtype} packs four values per element and is never converted; "
            f"view it as {DTYPES[dtype.storage.name]} or use quantize_mx and nc_matmul_mx",
        )

    return refuse


def _astype(storage: np.dtype[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that converts an array with `astype(storage)`, without NumPy's warnings of NaN and overflow."""

    @quiet
    def convert(array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(storage)

    return convert


def _widen_8bit(dtype: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that converts an array of an 8-bit float dtype to float32, by a table of all bit patterns."""

    @cache
    def table() -> Float32Array:
        return np.arange(256, dtype=np.uint8).view(dtype.storage).astype(np.float32)

    def widen(array: NDArray[Any]) -> NDArray[Any]:
        return table().take(array.view(np.uint8))

    return widen


def _narrow_8bit(dtype: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that rounds a float32 array to an 8-bit float, by a table over the float32's upper 16 bits.

    The lower 16 bits only decide on which side of a tie a number lies. Or-ing "any of them set" into the lowest kept
    bit (rounding to odd) preserves that, because the kept 8 bits of precision exceed the at most 4 of the target by the
    two that rounding to odd needs. The table then rounds once, to the nearest even.
    """

    @cache
    def table() -> NDArray[np.uint8]:
        upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
        return _astype(dtype.storage)(upper.view(np.float32)).view(np.uint8)

    def narrow(array: NDArray[Any]) -> NDArray[Any]:
        bits = array.view(np.uint32)
        index = bits >> np.uint32(16)
        index |= (bits & np.uint32(0xFFFF)) != 0
        return table().take(index).view(dtype.storage)

    return narrow


def _read_tfloat32(array: NDArray[Any]) -> NDArray[Any]:
    upper: NDArray[Any] = (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return upper


def _round_to_tfloat32(array: NDArray[Any]) -> NDArray[Any]:
    bits = array.view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded_bits = (bits >> np.uint32(13)) & np.uint32(1)
    rounded_bits += bits
    rounded_bits += np.uint32(0xFFF)
    rounded_bits &= np.uint32(0xFFFFE000)
    rounded = rounded_bits.view(np.float32)
    if nan.any():
        rounded[nan] = np.nan
    return rounded


def _saturate(dtype: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return a function that rounds a float32 array to an integer dtype: to nearest even, then clipped; NaN gives 0.

    The limits of 32-bit dtypes are no float32 numbers, so these dtypes are clipped in float64.
    """
    limits = np.iinfo(dtype.storage)
    wide = np.dtype(np.float64 if dtype.itemsize == 4 else np.float32)

    @quiet
    def saturate(array: NDArray[Any]) -> NDArray[Any]:
        rounded = np.rint(array, dtype=wide) if wide == np.float32 else np.rint(array).astype(wide)
        np.clip(rounded, limits.min, limits.max, out=rounded)
        nan = np.isnan(rounded)
        if nan.any():
            rounded[nan] = 0
        return rounded.astype(dtype.storage)

    return saturate


def _truth(array: NDArray[Any]) -> NDArray[Any]:
    return (array != 0).view(np.uint8)


def _reader(dtype: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    if dtype.is_packed:
        return _refuse_packed(dtype)
    if dtype == tfloat32:
        return _read_tfloat32
    if dtype.is_float and dtype.itemsize == 1:
        return _widen_8bit(dtype)
    return _astype(float32.storage)


def _writer(dtype: DType) -> Callable[[NDArray[Any]], NDArray[Any]]:
    if dtype.is_packed:
        return _refuse_packed(dtype)
    if dtype == tfloat32:
        return _round_to_tfloat32
    if dtype == bool_:
        return _truth
    if dtype.is_integer:
        return _saturate(dtype)
    return _narrow_8bit(dtype) if dtype.itemsize == 1 else _astype(dtype.storage)


_TO_FLOAT32: dict[DType, Callable[[NDArray[Any]], NDArray[Any]]] = {d: _reader(d) for d in DTYPES.values()}
_FROM_FLOAT32: dict[DType, Callable[[NDArray[Any]], NDArray[Any]]] = {d: _writer(d) for d in DTYPES.values()}
