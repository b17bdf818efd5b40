"""Types of options: functions that parse a text of the command line, or raise ArgumentTypeError."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from nkw.errors import shown

_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[1-9]\d{0,4}))?"
)
_DEFAULT_PORTS = (("http", "80"), ("https", "443"))


def integer(text: str) -> int:
    """Return an integer. Raises ArgumentTypeError for another text."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None


_FACTORS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def _size(text: str) -> int:
    """Return an integer; 25.6k is 25,600 and 1K is 1,024, as in vLLM. Raises ArgumentTypeError for another text."""
    factor = _FACTORS.get(text[-1:])
    if factor is None:
        return integer(text)
    digits = text[:-1]
    is_decimal = text[-1] in "km" and re.fullmatch(r"\d+\.\d+", digits, re.ASCII)
    return int(Decimal(digits) * factor) if is_decimal else integer(digits) * factor


def number(text: str) -> float:
    """Return a number. Raises ArgumentTypeError for another text."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number") from None


def _share(text: str) -> float:
    """Return a share; 0.9 and 90% are the same. Raises ArgumentTypeError for another text."""
    return number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises ArgumentTypeError for another text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no JSON object")
    return value


Number = TypeVar("Number", int, float)


def _checked(
    read: Callable[[str], Number], is_taken: Callable[[Number], bool], refusal: str
) -> Callable[[str], Number]:
    """Return a reader of the numbers for which `is_taken` holds. `refusal` ends the message about others."""

    def read_checked(text: str) -> Number:
        """Return a number. Raises ArgumentTypeError for a refused number."""
        value = read(text)
        if not is_taken(value):
            raise argparse.ArgumentTypeError(f"{text!r:.60} {refusal}")
        return value

    return read_checked


count = _checked(integer, lambda value: value >= 1, "is not a positive whole number")
size = _checked(_size, lambda value: value >= 1, "is not a positive whole number")
"""Count that may end in k, K, m or M."""
two_or_more = _checked(
    count, lambda value: value >= 2, "is not at least 2: one long job would stop all others"
)
seed = _checked(integer, lambda value: value >= 0, "is negative")
temperature = _checked(number, lambda value: 0 <= value < math.inf, "is neither 0 nor a positive number")
probability = _checked(number, lambda value: 0 < value <= 1, "is not above 0 and at most 1")
minimum = _checked(number, lambda value: 0 <= value <= 1, "is not a number from 0 to 1")
load = _checked(_share, lambda value: 0.01 <= value <= 10, "is not a share from 1% to 1000%")
"""Share of a rate, such as 0.9 or 90%."""


def _between(lowest: float, highest: float) -> Callable[[str], float]:
    """Return a reader of numbers between two bounds, both included."""
    return _checked(
        number, lambda value: lowest <= value <= highest, f"is not a number from {lowest:g} to {highest:g}"
    )


price = _between(1e-6, 1e9)
"""Dollars an hour; outside of the bounds, prices of tokens exceed float64."""
rate = _between(1e-6, 1e9)
"""Requests a second; at the highest rate, requests arrive 1 ns apart."""
pause = _between(0, 1e6)
"""Seconds."""
request_rate = _checked(number, lambda value: value > 0, "is neither a positive number nor inf")
"""Requests a second, or inf."""
burstiness = _between(1e-3, 1e3)
share_below_one = _checked(number, lambda value: 0 <= value < 1, "is not a number from 0 to below 1")
tokens_or_dataset = _checked(
    integer, lambda value: value >= 1 or value == -1, "is neither a positive whole number nor -1"
)


def parse_pair(text: str) -> tuple[str, str]:
    """Return the two texts of NAME=TEXT. Raises ArgumentTypeError for a text without `=` or without a name."""
    name, separator, content = text.partition("=")
    if not separator or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not like NAME=TEXT")
    return name.strip(), content.strip()


def parse_limit(names: Sequence[str]) -> Callable[[str], tuple[str, float]]:
    """Return a reader of NAME:MILLISECONDS for some names."""

    def read_limit(text: str) -> tuple[str, float]:
        """Return a name and its limit. Raises ArgumentTypeError for another text."""
        name, _, limit = text.partition(":")
        if name not in names:
            raise argparse.ArgumentTypeError(
                f"{text!r:.60} has no known metric; write NAME:MILLISECONDS with {', '.join(names)}"
            )
        return name, temperature(limit)

    return read_limit


def parse_choices(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a reader of some names with commas between them."""

    def read_choices(text: str) -> tuple[str, ...]:
        """Return the names. Raises ArgumentTypeError for an unknown one."""
        chosen = tuple(map(str.strip, text.split(",")))
        unknown = next((name for name in chosen if name not in names), None)
        if unknown is not None:
            raise argparse.ArgumentTypeError(f"{unknown!r:.60} is not one of {', '.join(names)}")
        return chosen

    return read_choices


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Return numbers with commas between them. Raises ArgumentTypeError for one that is not from 0 to 100."""
    return tuple(map(_between(0, 100), text.split(",")))


def parse_origins(text: str) -> tuple[str, ...]:
    """Return the origins of a JSON list, as vLLM takes them.

    Raises argparse.ArgumentTypeError for any other text, and for an origin that no browser sends.
    """
    try:
        origins = json.loads(text)
    except (ValueError, RecursionError):
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(
            f"""{shown(text)} is no JSON list of texts; write it like '["https://chat.example"]'"""
        )
    wrong = next((origin for origin in origins if not _is_origin(origin)), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(
            f"{shown(wrong)!r} is no origin; write scheme://host or scheme://host:port in lower case, without the "
            "scheme's default port and without a path, or *"
        )
    return tuple(origins)


def _is_origin(text: str) -> bool:
    """Return whether a text is an origin as browsers write it, "null", or "*"."""
    if text in ("*", "null"):
        return True
    matched = _ORIGIN.fullmatch(text)
    return matched is not None and (matched["scheme"], matched["port"]) not in _DEFAULT_PORTS
