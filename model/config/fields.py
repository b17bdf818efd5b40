"""The fields of a JSON object, each checked when it is read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from model.errors import ModelError
from nkw.files import read_text

_CODE = "NKW-MODEL-CONFIG"
MOST_COUNT = 2**31 - 1
"""The largest count that is read: ids and positions are int32 in the kernels."""
MOST_JSON_BYTES = 2**24
"""Of a JSON file; the largest published one, an index of shards, take 9 MB. Read, it takes up to 20 times as much."""


class Fields:
    """The fields of one JSON object; every access checks the type, and an error names file, field and value.

    `refusals` collects what a config describes and no layer computes, which a plan can do without; see `unsupported`.
    """

    def __init__(self, path: Path, optional: bool = False) -> None:
        self._path = path
        self._prefix = ""
        self._values = {} if optional and not os.path.lexists(path) else read_json(path)
        self.refusals: list[str] = []

    def table(self, name: str, default: dict[str, Any] | None = None) -> Fields:
        """The object in field `name`; the default, else an empty one, where the field is absent or null."""
        value = self.get(name, default)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"{value!r:.60} is not an object")
        inner = object.__new__(Fields)
        inner._path, inner._prefix, inner._values = self._path, f"{self._prefix}{name}.", value or {}
        inner.refusals = self.refusals
        return inner

    def error(self, name: str, what: str) -> ModelError:
        """The error to raise about field `name`."""
        return ModelError(f"{self._path}: {self._prefix}{name}: {what}", _CODE)

    def unsupported(self, name: str, what: str) -> None:
        """Note that field `name` asks for what no layer computes."""
        self.refusals.append(str(self.error(name, what)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null, which says more than its absence where a family has a default."""
        return name in self._values and self._values[name] is None

    def get(self, name: str, default: Any) -> Any:
        """The value as it stands, unchecked; null counts as absent."""
        value = self._values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, most: int = MOST_COUNT) -> int:
        """A positive whole number, at most `most`."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"{value!r:.60} is not a positive whole number")
        if value > most:
            raise self.error(name, f"{value!s:.60} is more than any machine holds; at most {most:,}")
        return value

    def pair(self, name: str) -> tuple[int, int]:
        """Two positive whole numbers, each at most the largest count."""
        value = self.get(name, None)
        whole = isinstance(value, list) and all(
            type(number) is int and 0 < number <= MOST_COUNT for number in value
        )
        if not whole or len(value) != 2:
            raise self.error(name, f"{value!r:.60} is not two positive whole numbers")
        return value[0], value[1]

    def number(self, name: str, default: float | None = None, positive: bool = True) -> float:
        """A finite number, greater than 0 unless `positive` is False."""
        value = self._required(name, default)
        good = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        )
        if not good or (positive and value <= 0):
            raise self.error(name, f"{value!r:.60} is not a {'positive' if positive else 'finite'} number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r:.60} is neither true nor false")
        return value

    def token_ids(self, name: str, vocabulary: int) -> tuple[int, ...]:
        """One token id or a list of them, each inside the vocabulary; empty where absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int):
                raise self.error(name, f"{value!r:.60} is neither a token id nor a list of them")
            if not 0 <= each < vocabulary:
                raise self.error(name, f"{each!s:.60} is not a token of a vocabulary of {vocabulary}")
        return tuple(ids)

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(name, "missing")
        return value


class _Contradiction(ValueError):
    """A field that stands twice in one object, with different values."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if values[name] != value:
                raise _Contradiction(f"{name:.60} stands twice, with different values")
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 16 MiB; ModelError where there is none."""
    try:
        values = json.loads(read_text(path, MOST_JSON_BYTES), object_pairs_hook=_object)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing", _CODE) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", _CODE) from None
    except _Contradiction as error:
        raise ModelError(f"{path}: {error}", _CODE) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", _CODE) from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a JSON {type(values).__name__}, not an object", _CODE)
    return values
