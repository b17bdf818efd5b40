"""Reading of JSON and arrays from an untrusted folder.

No file outside of the folder is opened, including through links. Sizes are checked before bytes are read;
arrays are read without pickle. Every defect raises InvalidArgument (NKW-BUNDLE) with a sentence.
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
"""Most bytes of a manifest or result."""
_MOST_HEADER_BYTES = 4096  # most bytes of an .npy header, of which numpy writes some hundred

DTYPES: dict[str, Any] = {
    name: np.dtype(name)
    for name in "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split()
} | {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in "bfloat16 float8_e4m3 float8_e4m3fn float8_e5m2 float8_e8m0fnu".split()
}
"""Dtypes of arrays in a bundle, by name."""


def get_storage_dtype(dtype: Any) -> Any:
    """Return the numpy dtype under which an array is stored: its own, or an unsigned integer of equal width.

    The integer stands for dtypes that numpy lacks, such as bfloat16.
    """
    dtype = np.dtype(dtype)
    return np.dtype(f"uint{8 * dtype.itemsize}") if dtype.kind == "V" or dtype.isbuiltin != 1 else dtype


def make_error(sentence: str) -> InvalidArgument:
    """Return, but do not raise, the error NKW-BUNDLE for a bundle or result that cannot be used."""
    return InvalidArgument("NKW-BUNDLE", shown(sentence))


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the absolute path of a file below the folder, with links followed; the file need not exist.

    Raises:
        InvalidArgument: If the path leaves the folder, including through a link, or is the folder itself.
    """
    try:
        root = folder.resolve()
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise make_error(f"{name!r:.80} is no path: {error}") from None
    if not path.is_relative_to(root) or path == root:
        raise make_error(f"{name!r:.80} leads out of {folder}; files of a bundle must be inside its folder")
    return path


def read_json(folder: Path, name: str) -> Fields:
    """Read the object in a JSON file of the folder.

    Raises:
        InvalidArgument: If the file leaves the folder, cannot be read, is too large, or is no JSON object.
    """
    path = resolve_inside(folder, name)
    try:
        with opened(path) as file:
            content = file.read(MOST_JSON_BYTES + 1)
    except OSError as error:
        raise make_error(f"{folder / name} cannot be read: {error.strerror or error}") from None
    if len(content) > MOST_JSON_BYTES:
        raise make_error(f"{folder / name} holds more than {MOST_JSON_BYTES:,} bytes")
    try:
        content_object = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise make_error(f"{folder / name} is not JSON: {error or type(error).__name__}") from None
    if not isinstance(content_object, dict):
        raise make_error(f"{folder / name} holds no JSON object")
    return Fields(content_object, str(folder / name))


def read_array(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read an array from an .npy file of the folder, stored as the dtype or as unsigned integers of its bits.

    Args:
        dtype: Name in DTYPES of the returned array's dtype.
        shape: Shape that the file must have.

    Raises:
        InvalidArgument: If dtype, shape or size differ, or if the file leaves the folder or is no .npy file.
    """
    element = DTYPES[dtype]
    path, bits = resolve_inside(folder, name), get_storage_dtype(DTYPES[dtype])
    num_bytes = math.prod(shape) * element.itemsize
    try:
        with opened(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Python's parser about a broken header
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version} of the format")
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            stored_shape, fortran, stored = read[version](file, max_header_size=_MOST_HEADER_BYTES)
            if stored_shape != shape:
                raise ValueError(f"it has shape {list(stored_shape)}, not {list(shape)}")
            if stored.hasobject or stored not in (bits, element):
                raise ValueError(f"it holds {stored}, not {bits}")
            if os.fstat(file.fileno()).st_size < num_bytes:
                raise ValueError(f"it is shorter than {num_bytes} bytes")
            content = file.read(num_bytes + 1)
    except Exception as error:  # numpy passes on any error of Python's parser and tokenizer
        reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
        raise make_error(f"{folder / name} cannot be used: {reason.splitlines()[0]:.200}") from None
    if len(content) != num_bytes:
        raise make_error(f"{folder / name} does not hold {num_bytes} bytes of values")
    array = np.frombuffer(content, element)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


class Fields:
    """An object of a JSON file, with access to members by name and type. `location` names the object in errors.

    Every `read_` method raises InvalidArgument (NKW-BUNDLE) if the member is missing or has another type.
    """

    def __init__(self, values: Mapping[str, Any], location: str) -> None:
        self.values = values
        self.location = location

    def _make_error(self, name: str, expected: str) -> InvalidArgument:
        """Return, without raising it, the error for a member that is missing or is not what `expected` says."""
        problem = "is missing" if name not in self.values else f"is {self.values[name]!r:.40}"
        return make_error(f"{self.location}: {name!r:.40} {problem}; {expected} is wanted")

    def has(self, name: str) -> bool:
        """Return whether a member exists and is not null."""
        return self.values.get(name) is not None

    def read_text(self, name: str, default: str | None = None) -> str:
        """Return the string under `name`, or the default if it is absent.

        Raises InvalidArgument for another type, or if it is absent and there is no default.
        """
        member = self.values.get(name, default)
        if not isinstance(member, str):
            raise self._make_error(name, "text")
        return member

    def read_optional_text(self, name: str) -> str | None:
        """Return the string under `name`, or None if it is null or absent. Raises InvalidArgument for another type."""
        return self.read_text(name) if self.has(name) else None

    def read_choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return the string under `name`. Raises InvalidArgument unless it is one of `choices`."""
        member = self.values.get(name)
        if not isinstance(member, str) or member not in choices:
            raise self._make_error(name, f"one of {', '.join(choices)}")
        return member

    def read_number(self, name: str) -> float:
        """Return the number under `name` as a float.

        Raises InvalidArgument unless it is finite and at least 0.
        """
        member = self.values.get(name)
        if isinstance(member, bool) or not isinstance(member, (int, float)):
            raise self._make_error(name, "a number")
        try:
            wide = float(member)
        except OverflowError:
            wide = math.inf
        if not 0 <= wide < math.inf:
            raise self._make_error(name, "a finite number of at least 0")
        return wide

    def read_optional_number(self, name: str) -> float | None:
        """Return the number under `name` as a float, or None if it is null or absent.

        Raises InvalidArgument unless it is finite and at least 0.
        """
        return self.read_number(name) if self.has(name) else None

    def read_count(self, name: str, least: int = 0) -> int:
        """Return the integer under `name`. Raises InvalidArgument unless it is at least `least` and below 2**62."""
        member = self.values.get(name)
        if isinstance(member, bool) or not isinstance(member, int) or not least <= member < 1 << 62:
            raise self._make_error(name, f"a whole number of at least {least}")
        return member

    def read_shape(self, name: str) -> tuple[int, ...]:
        """Return the list of sizes under `name` as a shape.

        Raises InvalidArgument unless it has at most 16 sizes of at least 0, with a product below 2**48.
        """
        member = self.values.get(name)
        if not isinstance(member, list) or len(member) > 16:
            raise self._make_error(name, "a list of sizes")
        for size in member:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 40:
                raise self._make_error(name, "a list of sizes")
        if math.prod(member) >= 1 << 48:
            raise self._make_error(name, "a shape that fits into a memory")
        return tuple(member)

    def read_numbers(self, name: str) -> tuple[float, ...]:
        """Return the list of numbers under `name` as floats.

        Raises InvalidArgument unless all are finite and at least 0.
        """
        items = self._read_list(name)
        return tuple(items.read_number(index) for index in items.values)

    def read_counts(self, name: str) -> tuple[int, ...]:
        """Return the list of integers under `name`. Raises InvalidArgument unless all are at least 0."""
        items = self._read_list(name)
        return tuple(items.read_count(index) for index in items.values)

    def read_texts(self, name: str) -> tuple[str, ...]:
        """Return the list of strings under `name`. Raises InvalidArgument for another type."""
        items = self._read_list(name)
        return tuple(items.read_text(index) for index in items.values)

    def _read_list(self, name: str) -> Fields:
        """Return the list under `name` as an object whose members are named "0", "1", and so on.

        Raises InvalidArgument for another type.
        """
        member = self.values.get(name)
        if not isinstance(member, list):
            raise self._make_error(name, "a list")
        return Fields(
            {str(index): element for index, element in enumerate(member)}, f"{self.location}: {name}"
        )

    def read_object(self, name: str) -> Fields:
        """Return the JSON object under `name` as `Fields`. Raises InvalidArgument for another type."""
        member = self.values.get(name)
        if not isinstance(member, dict):
            raise self._make_error(name, "an object")
        return Fields(member, f"{self.location}: {name}")

    def read_rows(self, name: str) -> Iterator[Fields]:
        """Yield the elements of the list under `name`, each as `Fields`.

        Raises InvalidArgument unless all are JSON objects.
        """
        rows = self._read_list(name)
        for index in rows.values:
            yield rows.read_object(index)

    def read_named_texts(self, name: str) -> dict[str, str]:
        """Return the JSON object under `name` as a dict.

        Raises InvalidArgument unless all of its values are strings.
        """
        members = self.read_object(name)
        return {str(key): members.read_text(key) for key in members.values}

    def read_named_numbers(self, name: str) -> dict[str, float]:
        """Return the JSON object under `name` as a dict of floats.

        Raises InvalidArgument unless all of its values are finite numbers of at least 0.
        """
        members = self.read_object(name)
        return {str(key): members.read_number(key) for key in members.values}
