"""An independent reference for rounding, and sample data of every dtype.

Rounding is done in float64 by the definition of a format (fraction bits, smallest exponent, largest value), without
the tables and bit operations of the code under test.
"""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np

# fraction bits, exponent of the smallest normal number, largest finite value, what overflow gives
_FLOATS = {
    "float32": (23, -126, (2 - 2.0**-23) * 2.0**127, np.inf),
    "tfloat32": (10, -126, (2 - 2.0**-10) * 2.0**127, np.inf),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127, np.inf),
    "float16": (10, -14, 65504.0, np.inf),
    "float8_e4m3": (3, -6, 240.0, np.inf),
    "float8_e4m3fn": (3, -6, 448.0, np.nan),
    "float8_e5m2": (2, -14, 57344.0, np.inf),
}
STORAGE = {name: getattr(ml_dtypes, name, None) or getattr(np, name, np.float32) for name in _FLOATS}
STORAGE["tfloat32"] = np.float32
STORAGE.update({name: getattr(np, name) for name in "int8 uint8 int16 uint16 int32 uint32".split()})

FLOATS = tuple(name for name in _FLOATS if name != "tfloat32")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 values once to `dtype`, ties to even, as float64."""
    values = np.asarray(values, np.float64)
    if dtype in _FLOATS:
        bits, smallest, largest, overflow = _FLOATS[dtype]
        _, exponents = np.frexp(np.where(np.isfinite(values), values, 1.0))
        quantum = np.ldexp(1.0, np.maximum(exponents - 1, smallest) - bits)
        finite = np.rint(np.where(np.isfinite(values), values, 0.0) / quantum) * quantum
        result = np.where(np.isfinite(values), finite, values)
        return np.where(np.abs(result) > largest, np.copysign(overflow, result), result)
    limits = np.iinfo(dtype)
    return np.where(np.isnan(values), 0, np.clip(np.rint(values), limits.min, limits.max))


def through_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return what an engine writes for exact results `values`: float32 first, then the destination's dtype."""
    return rounded(rounded(values, "float32"), dtype)


def sample(dtype: str, shape: tuple[int, ...], seed: str = "") -> np.ndarray:
    """Return finite values of moderate size and both signs, where the dtype has them."""
    random = np.random.default_rng(zlib.crc32(f"{dtype}{shape}{seed}".encode()))
    if dtype in _FLOATS:
        return rounded(random.standard_normal(shape) * 4, dtype).astype(STORAGE[dtype])
    limits = np.iinfo(dtype)
    wide = random.integers(limits.min, limits.max, shape, endpoint=True, dtype=STORAGE[dtype])
    return np.where(random.random(shape) < 0.5, wide, wide % 7).astype(STORAGE[dtype])


def as_float64(array: np.ndarray) -> np.ndarray:
    """Return the values an engine sees of an array's elements: exact but for the float32 they become."""
    return rounded(array.astype(np.float64), "float32")


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert equal values, NaN equal to NaN; shows the first difference and how many there are."""
    seen, wanted = actual.astype(np.float64), np.asarray(expected, np.float64)
    assert seen.shape == wanted.shape
    wrong = ~((seen == wanted) | (np.isnan(seen) & np.isnan(wanted)))
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} differ; at {index}: {seen[index]!r}, not {wanted[index]!r}"
        )


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert equal bit patterns."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert actual.tobytes() == np.ascontiguousarray(expected).tobytes()


def every_bit_pattern(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random bits as `dtype`, NaN payloads and all."""
    size = int(np.prod(shape)) * np.dtype(STORAGE[dtype]).itemsize
    random = np.random.default_rng(zlib.crc32(f"{dtype}{shape}".encode()))
    return random.integers(0, 256, size, dtype=np.uint8).view(STORAGE[dtype]).reshape(shape)
