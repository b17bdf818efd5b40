"""Numbers on the command line, each with the sentence that refuses another text; options of several commands; and the
prompt of no options.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from nkw.targets import HARDWARE_VARIABLE, TARGETS

ACTIVATIONS = ("auto", "float32", "bfloat16")
BACKENDS = ("simulate", "numpy", "neuron")
FIRST_PROMPT = "Once upon a time"


def add_cores(parser: argparse.ArgumentParser, target: str) -> None:
    """Add `--target`, by default a chip, and `--tp`."""
    parser.add_argument(
        "--target",
        metavar="CHIP",
        choices=TARGETS,
        default=target,
        help="trn1, inf2, trn2 or trn3 (default: %(default)s)",
    )
    parser.add_argument(
        "--tp",
        metavar="N",
        type=count,
        default=1,
        help="tensor-parallel ranks, one core each (default: %(default)s)",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add `--backend` and `--no-check`."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        choices=BACKENDS,
        default="simulate",
        help="simulate, numpy or neuron (default: %(default)s)",
    )
    parser.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not compare the tokens with the numpy model, which takes time and memory of its own",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add `--dtype`."""
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        choices=ACTIVATIONS,
        default="float32",
        help="of activations and cache: float32, bfloat16 or auto, the checkpoint's (default: %(default)s)",
    )


def add_sequence(parser: argparse.ArgumentParser) -> None:
    """Add `--sp` to the options of a command that has `--tp`."""
    parser.add_argument(
        "--sp",
        action="store_true",
        help="the ranks of --tp cut the rows of prompts among them, for norms and residuals",
    )


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add `--hardware`."""
    parser.add_argument(
        "--hardware",
        metavar="FILE",
        help="an overlay, whose numbers replace those of the chips' records (docs/calibrate.md; default: "
        f"{HARDWARE_VARIABLE}, else none)",
    )


def add_buckets(parser: argparse.ArgumentParser) -> None:
    """Add `--buckets`."""
    parser.add_argument(
        "--buckets",
        metavar="SIZES",
        help="sizes to which steps are rounded up, such as 'sequences=1,16 tokens=64,512 context=2048', or in nkw "
        "traffic auto, which fits them to the requests (default: powers of two)",
    )


def whole(text: str) -> int:
    """Return a whole number. Raises ArgumentTypeError for another text."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None


def number(text: str) -> float:
    """Return a number. Raises ArgumentTypeError for another text."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number") from None


def _share(text: str) -> float:
    """Return 0.9 of 0.9 or 90%."""
    return number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


Number = TypeVar("Number", int, float)


def _checked(
    read: Callable[[str], Number], is_taken: Callable[[Number], bool], refusal: str
) -> Callable[[str], Number]:
    """Return a reader of numbers that refuses some: with the text, and `refusal` behind it."""

    def read_checked(text: str) -> Number:
        value = read(text)
        if not is_taken(value):
            raise argparse.ArgumentTypeError(f"{text!r:.60} {refusal}")
        return value

    return read_checked


count = _checked(whole, lambda value: value >= 1, "is not a positive whole number")
seed = _checked(whole, lambda value: value >= 0, "is negative")
temperature = _checked(number, lambda value: 0 <= value < math.inf, "is neither 0 nor a positive number")
probability = _checked(number, lambda value: 0 < value <= 1, "is not above 0 and at most 1")
load = _checked(_share, lambda value: 0.01 <= value <= 10, "is not a share from 1% to 1000%")
"""A share of a rate, 0.9 or 90%."""


def _between(lowest: float, highest: float) -> Callable[[str], float]:
    return _checked(
        number, lambda value: lowest <= value <= highest, f"is not a number from {lowest:g} to {highest:g}"
    )


price = _between(1e-6, 1e9)
"""Dollars an hour; beyond the limits prices of tokens leave float64."""
rate = _between(1e-6, 1e9)
"""Requests a second; at the highest rate they come 1 ns apart."""
pause = _between(0, 1e6)
"""Seconds."""
