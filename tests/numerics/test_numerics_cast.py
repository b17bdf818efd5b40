"""Conversions against a rounder written in integer arithmetic from the definitions of the formats.

It shares nothing with the code under test: it takes float32 bit patterns apart, rounds the significand as an
integer and puts the target's pattern together. Warnings are errors here, so none can leak to a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from nkw.errors import Unsupported
from simulate.numerics import DTYPES, DType, cast, from_float32, to_float32
from simulate.numerics.dtypes import (
    bfloat16,
    bool_,
    float8_e4m3,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)

pytestmark = pytest.mark.filterwarnings("error")


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with a sign bit."""

    dtype: DType
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def top(self) -> int:
        """The pattern of infinity, or of NaN in a format without; the largest finite value is one less."""
        if self.has_infinity:
            return (2**self.exponent_bits - 1) << self.mantissa_bits
        return 2 ** (self.exponent_bits + self.mantissa_bits) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)


FORMATS = [
    Format(float16, 5, 10),
    Format(bfloat16, 8, 7),
    Format(tfloat32, 8, 10),
    Format(float8_e4m3, 4, 3),
    Format(float8_e4m3fn, 4, 3, has_infinity=False),
    Format(float8_e5m2, 5, 2),
]
by_format = pytest.mark.parametrize("target", FORMATS, ids=lambda f: str(f.dtype))


def bit_length(n: np.ndarray) -> np.ndarray:
    length = np.zeros_like(n)
    for k in range(32):
        length[n >> k != 0] = k + 1
    return length


def half_even(n: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Round n / 2**shift to an integer, ties to even; exact for shift <= 0."""
    right = np.clip(shift, 0, 40)
    quotient, remainder = n >> right, n & ((np.int64(1) << right) - 1)
    half = (np.int64(1) << right) >> 1
    up = (right > 0) & ((remainder > half) | ((remainder == half) & (quotient % 2 == 1)))
    return (quotient + up) << np.clip(-shift, 0, 40)


def reference_patterns(bits: np.ndarray, target: Format) -> tuple[np.ndarray, np.ndarray]:
    """Return the target's patterns for float32 patterns, and where the result is NaN."""
    bits = bits.astype(np.int64)
    negative, exponent, mantissa = bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF
    significand = mantissa + ((exponent > 0).astype(np.int64) << 23)
    unit = np.maximum(exponent, 1) - 127 - 23
    leading = unit + bit_length(significand) - 1
    smallest_unit = 1 - target.bias - target.mantissa_bits
    rounded_unit = np.maximum(leading - target.mantissa_bits, smallest_unit)
    rounded = half_even(significand, rounded_unit - unit)
    # A normal number's hidden bit adds the one by which its exponent field exceeds the count of units below.
    pattern = rounded + ((rounded_unit - smallest_unit) << target.mantissa_bits)
    pattern = np.where(significand == 0, 0, np.minimum(pattern, target.top))
    nan = (exponent == 255) & (mantissa != 0)
    pattern = np.where((exponent == 255) & (mantissa == 0), target.top, pattern)
    if not target.has_infinity:
        nan |= pattern == target.top
    return pattern + negative * target.sign, nan


def edge_patterns() -> np.ndarray:
    """Return every sign and exponent, with mantissas around every tie a format can meet, subnormals included."""
    mantissas = {0, 1, 2, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x3FFFFF, 0x400001}
    for position in range(23):
        half = 1 << position
        above = [0, 2 * half, 4 * half, 6 * half, 0x7FFFFF & ~(2 * half - 1), 0x7FFFFF & ~(4 * half - 1)]
        mantissas |= {base + half + delta for base in above for delta in (-1, 0, 1)}
    chosen = np.array(sorted(m for m in mantissas if m < 2**23), np.uint32)
    high = np.arange(512, dtype=np.uint32) << np.uint32(23)
    return (high[:, None] | chosen).ravel()


def random_patterns() -> np.ndarray:
    return np.random.default_rng(20).integers(0, 2**32, 100_000, dtype=np.uint32)


def patterns_of(array: np.ndarray, target: Format) -> np.ndarray:
    bits = array.view(f"u{target.dtype.itemsize}").astype(np.int64)
    return bits >> 13 if target.dtype == tfloat32 else bits


def is_nan(patterns: np.ndarray, target: Format) -> np.ndarray:
    magnitude = patterns & (target.sign - 1)
    return magnitude > target.top if target.has_infinity else magnitude == target.top


@by_format
@pytest.mark.parametrize("patterns", [edge_patterns(), random_patterns()], ids=["edges", "random"])
def test_rounds_to_nearest_even(target: Format, patterns: np.ndarray) -> None:
    got = from_float32(patterns.view(np.float32), target.dtype)
    assert got.dtype == target.dtype.storage
    if target.dtype == tfloat32:
        finite = np.isfinite(got)
        assert not (got.view(np.uint32)[finite] & 0x1FFF).any(), "10 bits of mantissa are left"
    expected, nan = reference_patterns(patterns, target)
    rounded = patterns_of(got, target)
    assert is_nan(rounded[nan], target).all()
    wrong = ~nan & (rounded != expected)
    shown = [
        f"{p:08x}: {f:x}, expected {e:x}"
        for p, f, e in zip(patterns[wrong], rounded[wrong], expected[wrong], strict=True)
    ]
    assert not wrong.any(), f"{wrong.sum()} wrong, first {shown[:3]}"


@by_format
def test_overflow_starts_half_a_unit_above_the_largest_value(target: Format) -> None:
    """The tie goes to the even neighbour, which in an IEEE format lies beyond the end."""
    largest = target.dtype.max
    unit = 2.0 ** (np.floor(np.log2(largest)) - target.mantissa_bits)
    tie = np.float32(largest + unit / 2)
    below, above = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))
    got = to_float32(
        from_float32(np.array([largest, below, tie, above], np.float32), target.dtype), target.dtype
    )
    assert got[:2].tolist() == [largest, largest]
    if target.has_infinity:
        assert got[2:].tolist() == [np.inf, np.inf]
        assert to_float32(from_float32(np.array([-above]), target.dtype), target.dtype).tolist() == [-np.inf]
    else:
        assert got[2] == largest, "448 is the even neighbour of 464"
        assert np.isnan(got[3])


@pytest.mark.parametrize(
    "dtype", [float16, bfloat16, float8_e4m3, float8_e4m3fn, float8_e5m2, float8_e8m0fnu], ids=str
)
def test_every_pattern_survives_float32(dtype: DType) -> None:
    width = dtype.itemsize
    patterns = np.arange(256**width, dtype=f"u{width}")
    wide = to_float32(patterns.view(dtype.storage), dtype)
    assert wide.dtype == np.float32
    back = from_float32(wide, dtype)
    nan = np.isnan(wide)
    assert np.array_equal(back.view(patterns.dtype)[~nan], patterns[~nan])
    assert np.isnan(to_float32(back[nan], dtype)).all()


@by_format
def test_every_pattern_has_the_value_of_its_definition(target: Format) -> None:
    """sign, exponent and mantissa multiplied out; the patterns of tfloat32 are float32's upper 19 bits."""
    tf32 = target.dtype == tfloat32
    patterns = np.arange(2 * target.sign, dtype=np.int64)
    stored = (patterns << 13).astype(np.uint32) if tf32 else patterns.astype(f"u{target.dtype.itemsize}")
    got = to_float32(stored.view(target.dtype.storage), target.dtype)
    field = patterns >> target.mantissa_bits & (2**target.exponent_bits - 1)
    mantissa = patterns & (2**target.mantissa_bits - 1)
    significand = mantissa + np.where(field > 0, 2**target.mantissa_bits, 0)
    value = np.ldexp(
        significand.astype(np.float64), np.maximum(field, 1) - target.bias - target.mantissa_bits
    )
    value = np.where(patterns & target.sign, -value, value)
    finite = (patterns & (target.sign - 1)) < target.top
    assert np.array_equal(got[finite], value[finite])
    assert not np.isfinite(got[~finite]).any()
    assert np.array_equal(np.signbit(got[finite]), (patterns[finite] & target.sign) != 0)


def test_e8m0_holds_powers_of_two() -> None:
    """2**(b - 127), the byte 255 NaN; between two powers the nearer one, ties go to the even significand."""
    every = to_float32(np.arange(256, dtype=np.uint8).view(float8_e8m0fnu.storage), float8_e8m0fnu)
    assert every[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert np.isnan(every[255])
    values = np.array([1.0, 1.49, 1.5, 1.51, 2.0, 3.0, 0.75, 2.0**127, 2.0**-127], np.float32)
    stored = from_float32(values, float8_e8m0fnu).view(np.uint8)
    assert (stored.astype(int) - 127).tolist() == [0, 0, 1, 1, 1, 2, 0, 127, -127]
    special = from_float32(np.array([-1.0, np.inf, -np.inf, np.nan], np.float32), float8_e8m0fnu).view(
        np.uint8
    )
    assert special.tolist() == [255] * 4


INTEGERS = [int8, uint8, int16, uint16, int32, uint32]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_saturate_at_their_limits(dtype: DType) -> None:
    """One below, at and one above each limit, in steps that float32 can hold there."""
    info = np.iinfo(dtype.storage)
    for limit in (int(info.min), int(info.max)):
        border = np.float32(limit)
        steps = [np.nextafter(border, np.float32(-np.inf)), border, np.nextafter(border, np.float32(np.inf))]
        nearby = [*steps, border - np.float32(1), border + np.float32(1)]
        got = from_float32(np.array(nearby, np.float32), dtype)
        assert got.dtype == dtype.storage
        assert got.tolist() == [min(max(round(float(v)), int(info.min)), int(info.max)) for v in nearby]
    far = from_float32(np.array([np.inf, -np.inf, 3e38, -3e38], np.float32), dtype)
    assert far.tolist() == [info.max, info.min, info.max, info.min]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_round_ties_to_even(dtype: DType) -> None:
    values = np.array([0.5, 1.5, 2.5, 3.5, 0.49999997, 0.50000006, 2.4999998, 100.5, 101.5], np.float32)
    assert from_float32(values, dtype).tolist() == [round(float(v)) for v in values]
    if info_min := int(np.iinfo(dtype.storage).min):
        assert info_min < 0
        assert from_float32(-values, dtype).tolist() == [round(-float(v)) for v in values]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_nan_becomes_integer_zero(dtype: DType) -> None:
    values = np.array([np.nan, 1.0, -np.nan], np.float32)
    assert from_float32(values, dtype).tolist() == [0, 1, 0]


def test_int32_to_float32_rounds_ties_to_even() -> None:
    base = 2**24
    exact = np.array([base - 1, base, base + 1, base + 2, base + 3, -(base + 1), 2**31 - 1], np.int32)
    expected = [base - 1, base, base, base + 2, base + 4, -base, 2**31]
    assert to_float32(exact, int32).tolist() == expected
    assert to_float32(np.array([2**32 - 1], np.uint32), uint32).tolist() == [2**32]


def test_different_integer_dtypes_go_through_float32() -> None:
    assert cast(np.array([2**24 + 1], np.int32), int32, uint32).tolist() == [2**24]
    assert cast(np.array([300, -1], np.int16), int16, uint8).tolist() == [255, 0]
    assert cast(np.array([2**32 - 1], np.uint32), uint32, int32).tolist() == [2**31 - 1]


def test_bool_is_one_for_anything_but_zero() -> None:
    values = np.array([0.0, -0.0, 1e-45, -2.0, np.inf, np.nan, 1.0], np.float32)
    got = from_float32(values, bool_)
    assert got.dtype == np.uint8
    assert got.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert to_float32(got, bool_).tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert cast(np.array([0, 256], np.int32), int32, bool_).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_equal_dtypes_keep_their_bits(dtype: DType) -> None:
    patterns = np.random.default_rng(5).integers(0, 256, 64 * dtype.itemsize, dtype=np.uint8)
    array = patterns.view(dtype.storage)
    assert np.array_equal(cast(array, dtype, dtype).view(np.uint8), patterns)


def test_float32_is_handed_through() -> None:
    array = np.ones(3, np.float32)
    assert to_float32(array, float32) is array
    assert from_float32(array, float32) is array
    assert cast(array, float32, float32) is array


def test_tfloat32_is_read_without_the_bits_below_its_mantissa() -> None:
    words = np.random.default_rng(6).integers(0, 2**32, 4096, dtype=np.uint32)
    words = np.append(words, np.uint32([0x7F800001, 0xFF801FFF, 0x00001FFF, 0x80001000])).astype(np.uint32)
    read = to_float32(words.view(np.float32), tfloat32).view(np.uint32)
    assert np.array_equal(read, words // 2**13 * 2**13)


PACKED = [dtype for dtype in DTYPES.values() if dtype.is_packed]


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_refuses_to_convert_packed_values(dtype: DType) -> None:
    array = np.zeros(4, dtype.storage)
    plain = np.zeros(4, np.float32)
    for attempt in (lambda: cast(array, dtype, float32), lambda: cast(plain, float32, dtype)):
        with pytest.raises(Unsupported) as refusal:
            attempt()
        assert refusal.value.code == "NKW-CAST-PACKED"
        assert refusal.value.message == (
            f"{dtype} packs four values per element and is never converted; "
            f"view it as {dtype.storage.name} or use quantize_mx and nc_matmul_mx"
        )


UNPACKED = [dtype for dtype in DTYPES.values() if not dtype.is_packed]


@pytest.mark.parametrize("source", UNPACKED, ids=str)
@pytest.mark.parametrize("target", UNPACKED, ids=str)
def test_every_pair_is_a_read_followed_by_a_write(source: DType, target: DType) -> None:
    """Also that no input pattern lets a warning out, and that shapes and strides do not matter."""
    patterns = np.random.default_rng(7).integers(0, 256, (6, 8 * source.itemsize), dtype=np.uint8)
    array = patterns.view(source.storage)[:, ::2]
    before = array.copy()
    got = cast(array, source, target)
    assert (got.dtype, got.shape) == (target.storage, array.shape)
    if source != target:
        again = from_float32(to_float32(np.ascontiguousarray(array), source), target)
        assert got.tobytes() == again.tobytes()
    assert array.tobytes() == before.tobytes(), "the source is left alone"


@pytest.mark.parametrize("dtype", UNPACKED, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1, 1), (3, 0, 2), (2, 3, 4, 5)], ids=str)
def test_shapes_are_kept(dtype: DType, shape: tuple[int, ...]) -> None:
    converted = from_float32(np.zeros(shape, np.float32), dtype)
    assert converted.shape == to_float32(converted, dtype).shape == shape


def test_signalling_nan_raises_no_warning() -> None:
    signalling = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    for dtype in UNPACKED:
        got = to_float32(from_float32(signalling, dtype), dtype)
        assert np.isnan(got).all() or dtype.is_integer


@pytest.mark.parametrize(
    "dtype", [float16, bfloat16, float8_e4m3, float8_e4m3fn, float8_e5m2, float8_e8m0fnu], ids=str
)
def test_values_kept_as_float32_are_never_rounded(dtype: DType) -> None:
    kept = dtype.stored_as_float32()
    values = np.array([1 / 3, -1e30, 7e-30], np.float32)
    assert from_float32(values, kept) is values
    assert to_float32(values, kept) is values
    rounded = from_float32(values, dtype)
    assert np.array_equal(cast(rounded, dtype, kept), to_float32(rounded, dtype), equal_nan=True)
    assert cast(values, kept, dtype).tobytes() == rounded.tobytes()
