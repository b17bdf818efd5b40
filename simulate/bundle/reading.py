"""Reads JSON and arrays from an untrusted folder.

No file outside of the folder is opened, wherever links lead; sizes are looked at before bytes are read; arrays are read
without pickle. Whatever is wrong raises InvalidArgument (NKW-BUNDLE) with one sentence.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import InvalidArgument, shown
from nkw.files import opened

MOST_JSON_BYTES = 32_000_000
"""The longest manifest or result that is read."""
_MOST_HEADER_BYTES = 4096  # of an .npy file: numpy writes some hundred for shapes of any rank

DTYPES: dict[str, Any] = {
    each: np.dtype(each)
    for each in "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split()
} | {
    each: np.dtype(getattr(ml_dtypes, each))
    for each in "bfloat16 float8_e4m3 float8_e4m3fn float8_e5m2 float8_e8m0fnu".split()
}
"""Dtypes of arrays in a bundle, by name."""


def bits_of(dtype: Any) -> Any:
    """The dtype under which an array is stored: numpy's own, or an unsigned integer as wide for one that it lacks."""
    dtype = np.dtype(dtype)
    return np.dtype(f"uint{8 * dtype.itemsize}") if dtype.kind == "V" or dtype.isbuiltin != 1 else dtype


def refused(sentence: str) -> InvalidArgument:
    """The error for a bundle or a result that cannot be used."""
    return InvalidArgument("NKW-BUNDLE", shown(sentence))


def within(folder: Path, name: str) -> Path:
    """The path of a file of the folder. Raises InvalidArgument for one that lies outside, also through a link."""
    try:
        root = folder.resolve()
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise refused(f"{name!r:.80} is no path: {error}") from None
    if not path.is_relative_to(root) or path == root:
        raise refused(f"{name!r:.80} leads out of {folder}")
    return path


def read_json(folder: Path, name: str) -> Fields:
    """The object that a JSON file of the folder holds."""
    path = within(folder, name)
    try:
        with opened(path) as file:
            content = file.read(MOST_JSON_BYTES + 1)
    except OSError as error:
        raise refused(f"{folder / name} cannot be read: {error.strerror or error}") from None
    if len(content) > MOST_JSON_BYTES:
        raise refused(f"{folder / name} holds more than {MOST_JSON_BYTES:,} bytes")
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise refused(f"{folder / name} is not JSON: {error or type(error).__name__}") from None
    if not isinstance(value, dict):
        raise refused(f"{folder / name} holds no JSON object")
    return Fields(value, str(folder / name))


def read_array(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of the folder, which has this dtype and shape, or the bits of this dtype.

    Raises InvalidArgument for another dtype or shape, for a file that is longer or shorter than that, or no .npy file.
    """
    element = DTYPES[dtype]
    path, bits = within(folder, name), bits_of(DTYPES[dtype])
    wanted = math.prod(shape) * element.itemsize
    try:
        with opened(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser about a broken header
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version} of the format")
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            seen, fortran, stored = read[version](file, max_header_size=_MOST_HEADER_BYTES)
            if seen != shape:
                raise ValueError(f"it has shape {list(seen)}, not {list(shape)}")
            if stored.hasobject or stored not in (bits, element):
                raise ValueError(f"it holds {stored}, not {bits}")
            if os.fstat(file.fileno()).st_size < wanted:
                raise ValueError(f"it is shorter than {wanted} bytes")
            content = file.read(wanted + 1)
    except (
        Exception
    ) as error:  # numpy's reader of headers lets through whatever Python's parser and tokenizer raise
        why = str(getattr(error, "strerror", None) or error) or type(error).__name__
        raise refused(f"{folder / name} cannot be used: {why.splitlines()[0]:.200}") from None
    if len(content) != wanted:
        raise refused(f"{folder / name} does not hold {wanted} bytes of values")
    array = np.frombuffer(content, element)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


class Fields:
    """An object of a JSON file, whose members are taken by name and type; `place` names it in errors."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def _wrong(self, name: str, wanted: str) -> InvalidArgument:
        said = "is missing" if name not in self.values else f"is {self.values[name]!r:.40}"
        return refused(f"{self.place}: {name!r:.40} {said}; {wanted} is wanted")

    def has(self, name: str) -> bool:
        """Whether there is such a member, other than null."""
        return self.values.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string, or None where it is null or missing."""
        return self.text(name) if self.has(name) else None

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        """One of the known strings."""
        value = self.values.get(name)
        if not isinstance(value, str) or value not in known:
            raise self._wrong(name, f"one of {', '.join(known)}")
        return value

    def number(self, name: str) -> float:
        """A finite number of at least 0."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, "a number")
        try:
            wide = float(value)
        except OverflowError:
            wide = math.inf
        if not 0 <= wide < math.inf:
            raise self._wrong(name, "a finite number of at least 0")
        return wide

    def optional_number(self, name: str) -> float | None:
        """A finite number of at least 0, or None where it is null or missing."""
        return self.number(name) if self.has(name) else None

    def count(self, name: str, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
            raise self._wrong(name, f"a whole number of at least {least}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """A list of sizes."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > 16:
            raise self._wrong(name, "a list of sizes")
        for each in value:
            if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 1 << 40:
                raise self._wrong(name, "a list of sizes")
        if math.prod(value) >= 1 << 48:
            raise self._wrong(name, "a shape that fits into a memory")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers of at least 0."""
        items = self._list(name)
        return tuple(items.number(index) for index in items.values)

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        items = self._list(name)
        return tuple(items.count(index) for index in items.values)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        items = self._list(name)
        return tuple(items.text(index) for index in items.values)

    def _list(self, name: str) -> Fields:
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return Fields({str(place): each for place, each in enumerate(value)}, f"{self.place}: {name}")

    def fields(self, name: str) -> Fields:
        """An object."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self.place}: {name}")

    def rows(self, name: str) -> Iterator[Fields]:
        """The objects of a list."""
        rows = self._list(name)
        for place in rows.values:
            yield rows.fields(place)

    def named_texts(self, name: str) -> dict[str, str]:
        """An object whose members are strings."""
        found = self.fields(name)
        return {str(each): found.text(each) for each in found.values}

    def named_numbers(self, name: str) -> dict[str, float]:
        """An object whose members are finite numbers of at least 0."""
        found = self.fields(name)
        return {str(each): found.number(each) for each in found.values}
