"""Fields of a JSON object, mostly a config.json; each access checks the type of the field.

Families read their configs through `Fields`, so that every error names the file, the field and the value.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from model.errors import ModelError, read_text_file

_CODE = "NKW-MODEL-CONFIG"
MOST_COUNT = 2**31 - 1
"""The largest count that is read: ids and positions are int32 in the kernels."""
MOST_JSON_BYTES = 2**24
"""Most bytes of a JSON file. The largest published index of shards has 9 MB; Python takes up to 20 times as much."""


class Fields:
    """Fields of one JSON object. Errors name the file, the field and the value.

    `refusals` collects what a config describes and no layer computes; a plan can do without it (see `unsupported`).
    """

    def __init__(self, path: Path, optional: bool = False) -> None:
        """Read a JSON file of at most 16 MiB; an `optional` file that is absent has no fields.

        Raises:
            ModelError: The file is missing and not optional, unreadable, too long, not JSON or not an object, or it
                repeats a field with different values.
        """
        self._path = path
        self._prefix = ""
        self._values = {} if optional and not os.path.lexists(path) else read_json(path)
        self.refusals: list[str] = []
        self._read: set[str] = set()

    def table(self, name: str, default: dict[str, Any] | None = None, shared: tuple[str, ...] = ()) -> Fields:
        """Return the fields of the JSON object in the field `name`, none of them read yet, with the same refusals.

        The field `name` itself counts as read afterwards (`list_unread`).

        Args:
            name: the field.
            default: the object if the field is absent or null; None for an empty one.
            shared: names of fields of this object that the inner object has too, unless it has its own.

        Raises:
            ModelError: the field is not an object.
        """
        value = self.get(name, default)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"{value!r:.60} is not an object")
        inherited = {field: self._values[field] for field in shared if field in self._values}
        return self._derive(f"{self._prefix}{name}.", inherited | (value or {}))

    def _derive(self, prefix: str, values: dict[str, Any]) -> Fields:
        """Return fields with these values of the same file, none of them read yet, which collect the same refusals.

        `prefix` comes before the names of fields in messages, such as "rope_scaling.".
        """
        derived = object.__new__(Fields)
        derived._path, derived._prefix, derived._values = self._path, prefix, values
        derived.refusals, derived._read = self.refusals, set()
        return derived

    def add_table(self, name: str, values: dict[str, Any]) -> None:
        """Set the field `name`, which must be absent or null, to a JSON object, as if the file had it."""
        assert self._values.get(name) is None, f"{name} is in the file"
        self._values[name] = values

    def copy_unread(self) -> Fields:
        """Return the same fields, none of them read yet, with an empty list of refusals."""
        copied = self._derive(self._prefix, self._values)
        copied.refusals = []
        return copied

    @property
    def asked_names(self) -> frozenset[str]:
        """Names of the fields that were read or looked for, absent ones included."""
        return frozenset(self._read)

    def list_unread(self) -> tuple[str, ...]:
        """Return the names of the fields that nothing has read, null ones included."""
        return tuple(name for name in self._values if name not in self._read)

    def error(self, name: str, problem: str) -> ModelError:
        """Return, without raising it, an error about the field `name`: "<file>: <full name>: <problem>"."""
        return ModelError(f"{self._path}: {self._prefix}{name}: {problem}", _CODE)

    def unsupported(self, name: str, problem: str) -> None:
        """Add a message to `refusals`: the field `name` describes a computation that no layer has."""
        self.refusals.append(str(self.error(name, problem)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all fields, null ones included."""
        return tuple(self._values)

    def __contains__(self, name: str) -> bool:
        """Return whether a field is present and not null; it counts as read afterwards (`list_unread`)."""
        self._read.add(name)
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether a field is present and null, not absent; it counts as read afterwards (`list_unread`)."""
        self._read.add(name)
        return name in self._values and self._values[name] is None

    def get(self, name: str, default: Any) -> Any:
        """Return the value of a field, of any type; the default if the field is absent or null.

        The field counts as read afterwards (`list_unread`).
        """
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, most: int = MOST_COUNT) -> int:
        """Return the integer in a field, from 1 to `most`; the default if the field is absent or null.

        The field counts as read afterwards (`list_unread`).

        Raises:
            ModelError: The value is anything else, or there is neither a value nor a default.
        """
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"{value!r:.60} is not a positive whole number")
        if value > most:
            raise self.error(name, f"{value!s:.60} is more than any machine holds; at most {most:,}")
        return value

    def pair(self, name: str) -> tuple[int, int]:
        """Return the two integers in a field, a list of two from 1 to `MOST_COUNT`.

        The field counts as read afterwards (`list_unread`).

        Raises:
            ModelError: The value is anything else, or absent.
        """
        value = self.get(name, None)
        numbers = value if isinstance(value, list) else []
        if len(numbers) != 2 or not all(type(n) is int and 0 < n <= MOST_COUNT for n in numbers):
            raise self.error(name, f"{value!r:.60} is not two positive whole numbers")
        return numbers[0], numbers[1]

    def number(self, name: str, default: float | None = None, positive: bool = True) -> float:
        """Return the finite number in a field as a float; the default if the field is absent or null.

        The field counts as read afterwards (`list_unread`).

        Raises:
            ModelError: The value is no finite number, not above 0 where `positive`, or absent without a default.
        """
        value = self._required(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max or (positive and value <= 0):
            raise self.error(name, f"{value!r:.60} is not a {'positive' if positive else 'finite'} number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return the boolean in a field; the default if it is absent or null.

        The field counts as read afterwards (`list_unread`).

        Raises:
            ModelError: The value is anything else.
        """
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r:.60} is neither true nor false")
        return value

    def token_ids(self, name: str, vocabulary: int) -> tuple[int, ...]:
        """Return the token ids of a field that has one id or a list of them; () if the field is absent or null.

        The field counts as read afterwards (`list_unread`).

        Raises:
            ModelError: an id is not an integer, or not below `vocabulary`.
        """
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.error(name, f"{value!r:.60} is neither a token id nor a list of them")
            if not 0 <= token_id < vocabulary:
                raise self.error(name, f"{token_id!s:.60} is not a token of a vocabulary of {vocabulary}")
        return tuple(ids)

    def _required(self, name: str, default: Any) -> Any:
        """Return the value of a field, of any type; the default if the field is absent or null.

        The field counts as read afterwards (`list_unread`).

        Raises:
            ModelError: The field is absent or null, and the default is None.
        """
        value = self.get(name, default)
        if value is None:
            raise self.error(name, "missing")
        return value


class _Contradiction(ValueError):
    """A repeated field of one object with different values."""


def _merge_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (name, value) pairs of a JSON object as a dict, for `json.loads`.

    A name may repeat with equal values; with different ones the function raises _Contradiction.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if values[name] != value:
                raise _Contradiction(f"{name:.60} is repeated with different values")
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file of at most 16 MiB.

    Raises:
        ModelError: the file is missing, unreadable, too long, not JSON or not an object, or repeats a field with
            different values.
    """
    text = read_text_file(path, _CODE, MOST_JSON_BYTES)
    try:
        values = json.loads(text, object_pairs_hook=_merge_pairs)
    except _Contradiction as error:
        raise ModelError(f"{path}: {error}", _CODE) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", _CODE) from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a JSON {type(values).__name__}, not an object", _CODE)
    return values
