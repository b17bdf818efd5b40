"""Types of options: functions that argparse calls with the text of an option, and which return its value.

A text that is refused raises argparse.ArgumentTypeError, whose message argparse prints.
"""

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
    """Return the integer that a text is.

    Raises:
        argparse.ArgumentTypeError: The text is no integer.
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None


_MOST_COUNTS = 16
_FACTORS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def _size(text: str) -> int:
    """Return the integer that a text is; 25.6k is 25,600 and 1K is 1,024, as in vLLM.

    Raises:
        argparse.ArgumentTypeError: The text is no such number.
    """
    factor = _FACTORS.get(text[-1:])
    if factor is None:
        return integer(text)
    digits = text[:-1]
    is_decimal = text[-1] in "km" and re.fullmatch(r"\d+\.\d+", digits, re.ASCII)
    return int(Decimal(digits) * factor) if is_decimal else integer(digits) * factor


def number(text: str) -> float:
    """Return the float that a text is; inf and nan are accepted.

    Raises:
        argparse.ArgumentTypeError: The text is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number") from None


def _share(text: str) -> float:
    """Return a share as a float; 0.9 and 90% are the same.

    Raises:
        argparse.ArgumentTypeError: The text is no number.
    """
    return number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is as a dict.

    Raises:
        argparse.ArgumentTypeError: The text is no JSON, or another value than an object.
    """
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
    """Return a function that reads a text with `read` and refuses numbers for which `is_taken` is False.

    Args:
        read: Reads a number.
        is_taken: Whether a number is accepted.
        refusal: End of the message about a refused number, after the text.
    """

    def read_checked(text: str) -> Number:
        """Return the number that a text is.

        Raises:
            argparse.ArgumentTypeError: The text is no number, or the number is refused.
        """
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
    """Return a function that reads a number from a text and refuses numbers below `lowest` or above `highest`."""
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
    """Return the name and the text of NAME=TEXT, without blanks around them.

    Raises:
        argparse.ArgumentTypeError: The text has no `=` or no name.
    """
    name, separator, content = text.partition("=")
    if not separator or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not like NAME=TEXT")
    return name.strip(), content.strip()


def parse_limit(names: Sequence[str]) -> Callable[[str], tuple[str, float]]:
    """Return a function that reads NAME:MILLISECONDS, with one of `names`."""

    def read_limit(text: str) -> tuple[str, float]:
        """Return the name and the milliseconds, as a float, of a text such as "ttft:200".

        Raises:
            argparse.ArgumentTypeError: The name is unknown, or what follows the colon is not 0 or a positive number.
        """
        name, _, limit = text.partition(":")
        if name not in names:
            raise argparse.ArgumentTypeError(
                f"{text!r:.60} has no known metric; write NAME:MILLISECONDS with {', '.join(names)}"
            )
        return name, temperature(limit)

    return read_limit


def parse_choices(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a function that reads some of `names`, separated by commas."""

    def read_choices(text: str) -> tuple[str, ...]:
        """Return the names in the order of the text.

        Raises:
            argparse.ArgumentTypeError: A name is unknown.
        """
        chosen = tuple(map(str.strip, text.split(",")))
        unknown = next((name for name in chosen if name not in names), None)
        if unknown is not None:
            raise argparse.ArgumentTypeError(f"{unknown!r:.60} is not one of {', '.join(names)}")
        return chosen

    return read_choices


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Return the numbers of a text in which they are separated by commas.

    Raises:
        argparse.ArgumentTypeError: A number is not from 0 to 100.
    """
    return tuple(map(_between(0, 100), text.split(",")))


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the positive whole numbers of a text in which they are separated by commas.

    Raises:
        argparse.ArgumentTypeError: A number is not positive or not whole, or there are more than 16.
    """
    numbers = text.split(",")
    if len(numbers) > _MOST_COUNTS:
        raise argparse.ArgumentTypeError(f"{len(numbers)} numbers; give at most {_MOST_COUNTS}")
    return tuple(map(count, numbers))


def parse_origins(text: str) -> tuple[str, ...]:
    """Return the origins of a JSON list of texts, as vLLM takes them.

    Raises:
        argparse.ArgumentTypeError: The text is no such list, or an origin is none that a browser sends.
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
    """Return whether a text is an origin as browsers write it, "null", or "*".

    Browsers write it in lower case, without the default port of the scheme and without a path.
    """
    if text in ("*", "null"):
        return True
    matched = _ORIGIN.fullmatch(text)
    return matched is not None and (matched["scheme"], matched["port"]) not in _DEFAULT_PORTS
