"""Rounding of a weight [out, in] to the numbers of a scheme, and the numbers that the result stands for.

Scales are rounded to the dtype in which they are stored before elements are computed, so that elements are nearest to
the stored scales. A scale belongs to a row, or to `group` neighbouring columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.formats.format import SCALES
from model.formats.mx import Mx
from model.formats.scaled import ELEMENT, INT8, LARGEST
from model.quantize.schemes import MX_GROUP, Numbers, Scheme

_LEVELS = {Numbers.int8: (-127, 127), Numbers.int4: (-8, 7)}
"""Smallest and largest element by integer format; int8 without -128, so that it is symmetric."""
_SHARES = np.linspace(1.0, 0.6, 17, dtype=np.float32)
"""Candidates for the scale of int4, as shares of the scale that clips no element."""
_MXFP8_LARGEST_EXPONENT = 8
"""Exponent of the largest element of MXFP8: 448 is 1.75 * 2^8."""
_LARGEST_EXPONENT, _BIAS = 127, 127


@dataclass(frozen=True)
class Rounded:
    """Weight [out, in] as elements and scales.

    elements  [out, in]: int8 for integers, float8_e4m3fn, or float32 multiples of MXFP4
    scales    [out, groups] float32, each exact in the dtype in which it is stored
    """

    elements: np.ndarray
    scales: np.ndarray

    def widen(self) -> np.ndarray:
        """Return each element times its scale, computed in float32: float32 [out, in]."""
        return self.elements.astype(np.float32) * spread(self.scales, self.elements.shape[1])


def spread(scales: np.ndarray, columns: int) -> np.ndarray:
    """Return the scale of each column, [out, columns], of scales [out, groups] of equal groups of columns."""
    group = -(-columns // scales.shape[1])
    return np.repeat(scales, group, axis=1)[:, :columns]


def round_to_nearest(weight: np.ndarray, scheme: Scheme, scale_dtype: np.dtype) -> Rounded:
    """Return a weight [out, in] float32 with each number rounded to the nearest that the scheme has.

    Args:
        weight: Finite numbers.
        scheme: The number format and the group.
        scale_dtype: Dtype of the stored scales; MX scales are powers of two in any case.
    """
    numbers, columns = scheme.numbers, weight.shape[1]
    if numbers is Numbers.mxfp4:
        stored = Mx().pack(weight)
        scales = np.ldexp(np.float32(1), stored[SCALES].astype(np.int32) - _BIAS)
        return Rounded(Mx().widen(stored) / spread(scales, columns), scales)
    scales = (
        _choose_powers(weight) if numbers is Numbers.mxfp8 else choose_scales(weight, scheme, scale_dtype)
    )
    quotients = weight / spread(scales, columns)
    if numbers in _LEVELS:
        return Rounded(round_to_levels(quotients, numbers), scales)
    largest = np.float32(LARGEST[ELEMENT])
    return Rounded(np.clip(quotients, -largest, largest).astype(ELEMENT), scales)


def round_to_levels(quotients: np.ndarray, numbers: Numbers) -> np.ndarray:
    """Return the nearest integers of an integer format, int8; ties go to the even integer."""
    low, high = _LEVELS[numbers]
    return np.clip(np.rint(quotients), low, high).astype(INT8)


def choose_scales(weight: np.ndarray, scheme: Scheme, scale_dtype: np.dtype) -> np.ndarray:
    """Return the scales of a weight [out, in]: float32 [out, groups], rounded to `scale_dtype`; 1 for zeros.

    8 bits have the scale with which the largest magnitude is the largest element. int4 has, of 17 shares of that
    scale from 1 to 0.6, the one with the least sum of squared errors; ties go to the larger scale.
    """
    groups = _group(weight, scheme.group)
    largest = np.abs(groups).max(axis=2)
    if scheme.numbers is not Numbers.int4:
        return _store(
            largest / np.float32(LARGEST[ELEMENT if scheme.numbers is Numbers.fp8 else INT8]), scale_dtype
        )
    low, high = _LEVELS[Numbers.int4]
    widest = largest / np.float32((high - low) / 2)
    best, least = _store(widest, scale_dtype), np.full(widest.shape, np.inf)
    for share in _SHARES:
        scales = _store(widest * share, scale_dtype)
        error = groups - round_to_levels(groups / scales[:, :, None], Numbers.int4) * scales[:, :, None]
        errors = np.square(error, dtype=np.float64).sum(axis=2)
        best, least = np.where(errors < least, scales, best), np.minimum(errors, least)
    return best


def round_rows(x: np.ndarray, numbers: Numbers) -> np.ndarray:
    """Return rows [..., in] rounded as a runtime quantises activations: one float32 scale for each row.

    fp8 is e4m3fn, as in checkpoints' definition; trn1 and trn2 compute in e4m3, whose largest number is 240.
    """
    dtype = ELEMENT if numbers is Numbers.fp8 else INT8
    largest = np.float32(LARGEST[dtype])
    scales = np.abs(x).max(axis=-1, keepdims=True) / largest
    scales = np.where(scales > 0, scales, np.float32(1))
    quotients = np.clip(x / scales, -largest, largest)
    elements = quotients.astype(ELEMENT) if numbers is Numbers.fp8 else np.rint(quotients)
    return elements.astype(np.float32) * scales


def _group(weight: np.ndarray, group: int | None) -> np.ndarray:
    """Return the weight as [out, groups, columns of a group], the last group padded with zeros."""
    rows, columns = weight.shape
    group = group or columns
    padded = np.pad(weight, ((0, 0), (0, -columns % group)))
    return padded.reshape(rows, -1, group)


def _store(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return scales rounded to a dtype as float32, and 1 for scales that are 0 then."""
    stored = scales.astype(dtype).astype(np.float32)
    return np.where(stored > 0, stored, np.float32(1))


def _choose_powers(weight: np.ndarray) -> np.ndarray:
    """Return the powers of two of MXFP8 blocks of 32 columns, float32 [out, blocks].

    The largest element of a block then has the largest exponent of e4m3fn, as in OCP Microscaling Formats 1.0, 6.3.
    Blocks of zeros have 1.
    """
    largest = np.abs(_group(weight, MX_GROUP)).max(axis=2)
    exponents = np.where(largest > 0, np.frexp(largest)[1] - 1 - _MXFP8_LARGEST_EXPONENT, 0)
    return np.ldexp(np.float32(1), np.clip(exponents, -_BIAS, _LARGEST_EXPONENT)).astype(np.float32)
