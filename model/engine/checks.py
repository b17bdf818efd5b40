"""Checks of the types of arguments, which return the argument in its plain Python type or raise ModelError.

Numbers of NumPy are accepted as well as numbers of Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from reprlib import Repr
from typing import Any

import numpy as np

from model.errors import ModelError

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def display_value(value: Any) -> str:
    """Return a short text of a value for a message; Python prints no integer of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 4096:
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value) if isinstance(value, str | bytes) or not isinstance(value, Real) else str(value)


def check_integer(name: str, value: Any) -> int:
    """Return a whole number as int. Raises ModelError for any other type, floats included."""
    try:
        return int(index(value))
    except TypeError:
        raise ModelError(f"{name} is {display_value(value)}; it must be a whole number") from None


def check_optional_integer(name: str, value: Any) -> int | None:
    """Return a whole number as int, or None as it is. Raises ModelError for any other type."""
    return None if value is None else check_integer(name, value)


def check_number(name: str, value: Any) -> float:
    """Return a number, a NumPy scalar as its Python value. Raises ModelError for any other type."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, int | float):
        raise ModelError(f"{name} is {display_value(value)}; it must be a number")
    return value


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Raise ModelError for a number outside least … most, and for NaN; None passes."""
    if value is not None and not least <= value <= most:
        raise ModelError(f"{name} is {display_value(value)}; it must be between {least:g} and {most:g}")


def check_flag(name: str, value: Any) -> bool:
    """Return a truth value as bool; 0 and 1 count as such. Raises ModelError for any other value."""
    if isinstance(value, bool | np.bool_ | int) and value in (0, 1):
        return bool(value)
    raise ModelError(f"{name} is {display_value(value)}; it must be True or False")


def check_text(name: str, value: Any) -> str:
    """Return a text. Raises ModelError for any other type, bytes included."""
    if not isinstance(value, str):
        raise ModelError(f"{name} is {display_value(value)}; it must be a text")
    return value


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a text or the texts of an iterable as a tuple. Raises ModelError for any other type."""
    if isinstance(value, str):
        return (value,)
    texts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{name} is {display_value(value)}; it must be a text or a list of texts")
    return texts


def check_token_ids(name: str, value: Any) -> list[int]:
    """Return the token ids of an iterable, which is read once. Raises ModelError for a text, bytes or another type."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise ModelError(f"{name} is {display_value(value)}; it must be a list of token ids")
    token_ids = list(value)
    if set(map(type, token_ids)) <= {int}:
        return token_ids
    return [check_integer(f"an element of {name}", token_id) for token_id in token_ids]


def check_vocabulary(name: str, token_ids: Iterable[int], size: int) -> None:
    """Raise ModelError for the first token id that a vocabulary of `size` tokens does not have."""
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < size), None)
    if outside is not None:
        raise ModelError(f"{name} has token id {display_value(outside)}; the vocabulary has {size} tokens")


def check_sequence(name: str, value: Any, elements: str) -> Sequence[Any]:
    """Return the elements of an iterable that is no text and no mapping. Raises ModelError for any other type.

    `elements` names what the iterable has, for the message.
    """
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise ModelError(f"{name} is {display_value(value)}; it must be a list of {elements}")
    return list(value)
