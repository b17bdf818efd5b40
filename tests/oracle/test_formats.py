"""The oracle's number formats against the values that their definitions give."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle.formats import FORMATS, Format

NARROW = [row for row in FORMATS.values() if row.is_float and row.bytes <= 2]


@pytest.mark.parametrize("format_", NARROW, ids=lambda row: row.name)
def test_every_bit_pattern_survives_a_round_trip(format_: Format) -> None:
    bits = np.arange(2**format_.bits)
    values = format_.decode(bits)
    again = format_.encode(values)
    assert np.array_equal(again[~np.isnan(values)], bits[~np.isnan(values)])
    assert np.isnan(format_.decode(again[np.isnan(values)])).all()


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [
        ("float8_e4m3", 240.0, 2.0**-9),
        ("float8_e4m3fn", 448.0, 2.0**-9),
        ("float8_e5m2", 57344.0, 2.0**-16),
        ("float16", 65504.0, 2.0**-24),
        ("bfloat16", (2 - 2.0**-7) * 2.0**127, 2.0**-133),
        ("float32", (2 - 2.0**-23) * 2.0**127, 2.0**-149),
    ],
)
def test_largest_and_smallest_numbers(name: str, largest: float, smallest: float) -> None:
    format_ = FORMATS[name]
    assert format_.decode(np.array([format_.largest, 1])).tolist() == [largest, smallest]
    beyond = format_.rounded(np.array([2 * largest, -2 * largest, smallest / 2, smallest * 0.75]))
    assert np.isinf(beyond[:2]).all() if format_.infinite else np.isnan(beyond[:2]).all()
    assert beyond[2:].tolist() == [0.0, smallest]


@pytest.mark.parametrize(
    "format_", [row for row in FORMATS.values() if row.is_float], ids=lambda row: row.name
)
def test_ties_go_to_even(format_: Format) -> None:
    unit = 2.0**-format_.mantissa
    values = np.array([1 + unit / 2, 1 + 1.5 * unit, 1 + 0.75 * unit])
    assert format_.rounded(values).tolist() == [1.0, 1 + 2 * unit, 1 + unit]


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_integers_round_to_even_and_saturate(name: str) -> None:
    format_ = FORMATS[name]
    low, high = format_.limits
    values = np.array([0.5, 1.5, 2.5, high + 1.0, low - 1.0, np.inf, -np.inf])
    assert format_.rounded(values).tolist() == [0, 2, 2, high, low, high, low]
