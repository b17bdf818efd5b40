"""Possible values: what the elements of a tensor can be, known from dtypes and instructions before any data is seen.

`Codes` lists every value that an element may have. `Words` says of 32-bit elements which bits may vary and what the
others are, for words that pack several numbers. None stands for elements about which nothing is known. Every function
returns a superset of the values that can occur.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from simulate.numerics.cast import to_float32
from simulate.numerics.dtypes import DType

MOST_CODES = 1 << 16
"""Number of values up to which they are listed."""
_MOST_FREE_BITS = 12
"""Bits of a part of a word that may vary so that the values of the part are listed."""
_WORD_BYTES = 4


class Integers(NamedTuple):
    """Numbers n * 2**exponent with whole n: the exponent of their common unit, and the largest magnitude of n."""

    exponent: int
    largest: int


@dataclass(frozen=True, eq=False)
class Codes:
    """Every value that an element of a dtype may have: an array of the dtype's storage type, without repetitions."""

    dtype: DType
    array: np.ndarray

    @cached_property
    def integers(self) -> Integers | None:
        """The values as integers times a power of two; None if one of them is not finite, and for packed dtypes."""
        return None if self.dtype.is_packed else find_integers(to_float32(self.array, self.dtype))


@dataclass(frozen=True)
class Words:
    """32-bit elements in which the bits of `varying` may have any value; the others are those of `constant`."""

    varying: int
    constant: int


Possible = Codes | Words | None


def list_codes(dtype: DType, array: np.ndarray) -> Codes | None:
    """Return the distinct elements of an array of a dtype's storage type; None for more than MOST_CODES."""
    bits = np.unique(np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}"))
    return Codes(dtype, bits.view(array.dtype)) if bits.size <= MOST_CODES else None


def get_all_values(dtype: DType) -> Possible:
    """Return every value of a dtype: listed for 8 bits, as words for integers of 32 bits, None for other dtypes.

    Equal dtypes get the same object.
    """
    if dtype.is_packed or dtype.storage.itemsize != dtype.itemsize:
        return None
    if dtype.is_integer and dtype.itemsize == _WORD_BYTES:
        return _ALL_WORDS
    return _list_bytes(dtype) if dtype.itemsize == 1 else None


_ALL_WORDS = Words(0xFFFFFFFF, 0)


@cache
def _list_bytes(dtype: DType) -> Codes:
    """Return all values of a dtype of 8 bits."""
    return Codes(dtype, np.arange(256, dtype=np.uint8).view(dtype.storage))


def join(first: Possible, second: Possible) -> Possible:
    """Return the values of elements that have one of the first or one of the second values, of one dtype."""
    if first is None or second is None or first is second:
        return first if first is second else None
    if isinstance(first, Codes) and isinstance(second, Codes):
        joined = list_codes(first.dtype, np.concatenate([first.array, second.array]))
        return joined if joined is not None else _join_words(describe_bits(first), describe_bits(second))
    return _join_words(describe_bits(first), describe_bits(second))


def _join_words(first: Words | None, second: Words | None) -> Words | None:
    if first is None or second is None:
        return None
    varying = first.varying | second.varying | (first.constant ^ second.constant)
    return Words(varying, first.constant & ~varying)


def describe_bits(possible: Possible) -> Words | None:
    """Return possible values of 32-bit elements as Words; None for other widths."""
    if not isinstance(possible, Codes):
        return possible
    if possible.array.itemsize != _WORD_BYTES:
        return None
    bits = possible.array.view(np.uint32)
    varying = int(np.bitwise_or.reduce(bits ^ bits[0]))
    return Words(varying, int(bits[0]) & ~varying)


def reinterpret(possible: Possible, stored: DType, dtype: DType) -> Possible:
    """Return possible values of elements whose bytes were written as `stored` and are read as `dtype`."""
    if possible is None or stored == dtype:
        return possible
    if any(end.is_packed or end.storage.itemsize != end.itemsize for end in (stored, dtype)):
        return None
    width, target = stored.itemsize, dtype.itemsize
    if isinstance(possible, Codes) and width >= target:
        return list_codes(dtype, possible.array.view(f"u{target}").view(dtype.storage))
    if width == target:
        return possible if dtype.is_integer else None
    if isinstance(possible, Words):
        return _split_words(possible, dtype)
    if target == _WORD_BYTES:
        return _pack_codes(possible)
    return None


def _split_words(words: Words, dtype: DType) -> Codes | None:
    """Return the values of the parts of words that an element of a narrower dtype reads, whichever part it is."""
    width = 8 * dtype.itemsize
    listed = []
    for first in range(0, 8 * _WORD_BYTES, width):
        varying, constant = ((bits >> first) % (1 << width) for bits in (words.varying, words.constant))
        numbers = _list_numbers(varying, constant)
        if numbers is None:
            return None
        listed.append(numbers)
    return list_codes(dtype, np.concatenate(listed).astype(f"u{dtype.itemsize}").view(dtype.storage))


def expand_words(possible: Possible, dtype: DType) -> Codes | None:
    """Return words of a dtype as a list of values; None if too many bits vary, or for unknown values."""
    if not isinstance(possible, Words):
        return possible
    numbers = _list_numbers(possible.varying, possible.constant)
    return None if numbers is None else list_codes(dtype, numbers.view(dtype.storage))


def _list_numbers(varying: int, constant: int) -> np.ndarray | None:
    """Return the uint32 numbers whose bits vary as told; None if more than _MOST_FREE_BITS do."""
    free = [1 << bit for bit in range(8 * _WORD_BYTES) if varying >> bit & 1]
    if len(free) > _MOST_FREE_BITS:
        return None
    numbers = np.array([constant], np.uint32)
    for bit in free:
        numbers = np.concatenate([numbers, numbers | np.uint32(bit)])
    return numbers


def _pack_codes(codes: Codes) -> Words:
    """Return the bits of words that are read where narrower elements with these values were written."""
    width = 8 * codes.array.itemsize
    bits = codes.array.view(f"u{codes.array.itemsize}").astype(np.uint32)
    varying, constant = int(np.bitwise_or.reduce(bits ^ bits[0])), int(bits[0])
    repeats = range(0, 8 * _WORD_BYTES, width)
    varying = sum(varying << first for first in repeats)
    return Words(varying, sum(constant << first for first in repeats) & ~varying)


def find_integers(values: np.ndarray) -> Integers | None:
    """Return finite float32 values as integers times the largest power of two that fits all; None for other values."""
    if not np.isfinite(values).all():
        return None
    nonzero = values[values != 0]
    if not nonzero.size:
        return Integers(0, 0)
    mantissas, exponents = np.frexp(nonzero.astype(np.float64))
    numerators = (mantissas * 2.0**24).astype(np.int64)
    trailing = np.log2(numerators & -numerators).astype(np.int64)
    exponent = int((exponents - 24 + trailing).min())
    return Integers(exponent, int(np.abs(nonzero).max().astype(np.float64) * 2.0**-exponent))


def as_rows(codes: Any, ndim: int) -> np.ndarray:
    """Return a 1-D array as a tile with one element in each partition, (n, 1, …) of `ndim` dims."""
    return np.asarray(codes).reshape(-1, *(1,) * (ndim - 1))
