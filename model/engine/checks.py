"""Checks of the types of user arguments, which return the argument in its plain Python type or raise ModelError.

Sampling parameters and the inputs of `LLM` use them. Numbers of NumPy are accepted as well as numbers of Python.
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
    """Return a short text of a value for a message; an integer of over 4,096 bits is described by its size."""
    if isinstance(value, int) and value.bit_length() > 4096:
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value) if isinstance(value, str | bytes) or not isinstance(value, Real) else str(value)


def check_integer(name: str, value: Any) -> int:
    """Return a whole number as int; NumPy integers count, floats do not.

    Raises:
        ModelError: The value is no whole number.
    """
    try:
        return int(index(value))
    except TypeError:
        raise ModelError(f"{name} is {display_value(value)}; it must be a whole number") from None


def check_optional_integer(name: str, value: Any) -> int | None:
    """Return a whole number as int, or None as it is.

    Raises:
        ModelError: The value is neither.
    """
    return None if value is None else check_integer(name, value)


def check_number(name: str, value: Any) -> float:
    """Return an int or float; a NumPy scalar as its Python value.

    Raises:
        ModelError: The value is no number.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, int | float):
        raise ModelError(f"{name} is {display_value(value)}; it must be a number")
    return value


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Check that a number is from `least` to `most`; None passes.

    Raises:
        ModelError: The number is outside, or NaN.
    """
    if value is not None and not least <= value <= most:
        raise ModelError(f"{name} is {display_value(value)}; it must be between {least:g} and {most:g}")


def check_flag(name: str, value: Any) -> bool:
    """Return a truth value as bool; 0 and 1 count as such.

    Raises:
        ModelError: The value is anything else.
    """
    if isinstance(value, bool | np.bool_ | int) and value in (0, 1):
        return bool(value)
    raise ModelError(f"{name} is {display_value(value)}; it must be True or False")


def check_text(name: str, value: Any) -> str:
    """Return a str.

    Raises:
        ModelError: The value has another type, such as bytes.
    """
    if not isinstance(value, str):
        raise ModelError(f"{name} is {display_value(value)}; it must be a text")
    return value


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a tuple of texts: of one text, or of the texts of an iterable.

    Raises:
        ModelError: The value is neither.
    """
    if isinstance(value, str):
        return (value,)
    texts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{name} is {display_value(value)}; it must be a text or a list of texts")
    return texts


def check_token_ids(name: str, value: Any) -> list[int]:
    """Return the token ids of an iterable or array as a list of int; the iterable is read once.

    Raises:
        ModelError: The value is a text, bytes, a mapping or no iterable, or an element is no whole number.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise ModelError(f"{name} is {display_value(value)}; it must be a list of token ids")
    token_ids = list(value)
    if set(map(type, token_ids)) <= {int}:
        return token_ids
    return [check_integer(f"an element of {name}", token_id) for token_id in token_ids]


def check_vocabulary(name: str, token_ids: Iterable[int], size: int) -> None:
    """Check that all token ids are from 0 to `size` - 1.

    Raises:
        ModelError: A token id is outside; the message names the first one.
    """
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < size), None)
    if outside is not None:
        raise ModelError(f"{name} has token id {display_value(outside)}; the vocabulary has {size} tokens")


def check_sequence(name: str, value: Any, elements: str) -> Sequence[Any]:
    """Return the elements of an iterable as a list.

    Args:
        name: Name of the argument, for the message.
        value: The argument.
        elements: What the list should contain, for the message.

    Raises:
        ModelError: The value is a text, bytes, a mapping or no iterable.
    """
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise ModelError(f"{name} is {display_value(value)}; it must be a list of {elements}")
    return list(value)
