"""Number formats by sign, exponent and mantissa: bits to values and values to bits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np


class Kind(Enum):
    """How the bits of an element are read."""

    floating = "floating"
    signed = "signed"
    unsigned = "unsigned"
    boolean = "boolean"
    packed = "packed"


@dataclass(frozen=True)
class Format:
    """One element type; `exponent`, `mantissa` and `largest` (the bits of the largest finite value) describe floats.

    `infinite` tells whether the format has infinities. `dropped` counts the mantissa bits that the stored word has
    beyond the format's own (tfloat32 lies in a float32 word).
    """

    name: str
    bytes: int
    number_kind: Kind
    exponent: int = 0
    mantissa: int = 0
    infinite: bool = True
    dropped: int = 0

    @property
    def bits(self) -> int:
        return 8 * self.bytes

    @property
    def is_float(self) -> bool:
        return self.number_kind is Kind.floating

    @property
    def is_integer(self) -> bool:
        return self.number_kind in (Kind.signed, Kind.unsigned, Kind.boolean)

    @property
    def unsigned(self) -> np.dtype:
        """The numpy type of the raw bits."""
        return np.dtype(f"<u{self.bytes}")

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> int:
        """The bits of the largest finite value."""
        width = self.exponent + self.mantissa
        return (2**width - 1) - (2**self.mantissa if self.infinite else 1)

    @property
    def not_a_number(self) -> int:
        top = 2 ** (self.exponent + self.mantissa) - 1
        return top if not self.infinite else self.largest + 1 + 2 ** (self.mantissa - 1)

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and largest integer."""
        if self.number_kind is Kind.signed:
            return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        return 0, 2**self.bits - 1

    # -- bits to values -----------------------------------------------------------------------------------------

    def decode(self, bits: np.ndarray) -> np.ndarray:
        """Return the exact values of raw bits, as float64."""
        if self.is_float and self.bytes <= 2:
            return self._table[bits]
        return self._values(bits)

    @cached_property
    def _table(self) -> np.ndarray:
        return self._values(np.arange(2**self.bits))

    def _values(self, bits: np.ndarray) -> np.ndarray:
        bits = bits.astype(np.int64)
        if not self.is_float:
            if self.number_kind is Kind.signed:
                bits = np.where(bits >= 2 ** (self.bits - 1), bits - 2**self.bits, bits)
            return bits.astype(np.float64)
        bits = bits >> self.dropped
        fraction = bits & (2**self.mantissa - 1)
        field = (bits >> self.mantissa) & (2**self.exponent - 1)
        magnitude = bits & (2 ** (self.exponent + self.mantissa) - 1)
        significand = np.where(field == 0, fraction, fraction + 2**self.mantissa).astype(np.float64)
        value = np.ldexp(significand, np.maximum(field, 1) - self.bias - self.mantissa)
        beyond = np.where(self.infinite & (magnitude == self.largest + 1), np.inf, np.nan)
        value = np.where(magnitude > self.largest, beyond, value)
        return np.where(bits >> (self.exponent + self.mantissa), -value, value)

    # -- values to bits -----------------------------------------------------------------------------------------

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Round values once, to nearest with ties to even; integers saturate, floats overflow."""
        values = np.asarray(values, np.float64)
        nan = np.isnan(values)
        if self.number_kind is Kind.boolean:
            return (values != 0).astype(self.unsigned)
        if not self.is_float:
            low, high = self.limits
            integers = np.clip(np.rint(np.where(nan, 0.0, values)), low, high).astype(np.int64)
            return (integers & (2**self.bits - 1)).astype(self.unsigned)
        magnitude = np.where(np.isfinite(values), np.abs(values), 0.0)
        exponent = np.maximum(np.frexp(magnitude)[1].astype(np.int64) - 1, 1 - self.bias)
        steps = np.rint(np.ldexp(magnitude, self.mantissa - exponent)).astype(np.int64)
        # A normal number's steps contain the implicit one, which adds 1 to the exponent field below it.
        bits = np.where(magnitude == 0, 0, ((exponent + self.bias - 1) << self.mantissa) + steps)
        overflow = self.largest + 1 if self.infinite else self.not_a_number
        bits = np.where((bits > self.largest) | np.isinf(values), overflow, bits)
        bits = np.where(nan, self.not_a_number, bits)
        bits = bits | (np.signbit(values).astype(np.int64) << (self.exponent + self.mantissa))
        return (bits << self.dropped).astype(self.unsigned)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return values as they are after being written in this format."""
        return self.decode(self.encode(values))


def _float(
    name: str, bytes_: int, exponent: int, mantissa: int, infinite: bool = True, dropped: int = 0
) -> Format:
    return Format(name, bytes_, Kind.floating, exponent, mantissa, infinite, dropped)


FORMATS = {
    row.name: row
    for row in (
        Format("bool_", 1, Kind.boolean),
        *(Format(f"int{8 * n}", n, Kind.signed) for n in (1, 2, 4)),
        *(Format(f"uint{8 * n}", n, Kind.unsigned) for n in (1, 2, 4)),
        _float("float32", 4, 8, 23),
        _float("tfloat32", 4, 8, 10, dropped=13),
        _float("bfloat16", 2, 8, 7),
        _float("float16", 2, 5, 10),
        _float("float8_e5m2", 1, 5, 2),
        _float("float8_e4m3", 1, 4, 3),
        _float("float8_e4m3fn", 1, 4, 3, infinite=False),
        Format("float8_e4m3fn_x4", 4, Kind.packed),
        Format("float8_e5m2_x4", 4, Kind.packed),
        Format("float4_e2m1fn_x4", 2, Kind.packed),
        Format("float8_e8m0fnu", 1, Kind.packed),
    )
}
"""By the name that nki.language gives it."""

FLOAT32_MAX = float(FORMATS["float32"].decode(np.array([FORMATS["float32"].largest]))[0])
UNIT = 2.0**-24
"""Half a unit in the last place of 1 in float32: the relative error of one rounding."""
TINY = 2.0**-149
"""The smallest float32: the absolute error of a rounding that underflows is at most half of it."""


def single(values: np.ndarray | float) -> np.ndarray:
    """Round to float32 by IEEE 754; float64 sums, products and quotients of float32 numbers round correctly so."""
    return np.asarray(values, np.float64).astype(np.float32).astype(np.float64)
