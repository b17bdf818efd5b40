"""Numbers on the command line, each with the sentence that refuses another text; options of several commands; and the
prompt of no options.
"""

from __future__ import annotations

import argparse
import math

from simulate.targets import HARDWARE_VARIABLE, TARGETS

ACTIVATIONS = ("auto", "float32", "bfloat16")
BACKENDS = ("simulate", "numpy", "neuron")
FIRST_PROMPT = "Once upon a time"
_LOWEST_RATE, _HIGHEST_RATE = 1e-6, 1e9  # requests a second; at the highest they come 1 ns apart
_LONGEST_PAUSE = 1e6  # seconds
_LOWEST_PRICE, _HIGHEST_PRICE = 1e-6, 1e9  # dollars an hour; beyond them prices of tokens leave float64


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


def count(text: str) -> int:
    """A positive whole number."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a positive whole number")
    return value


def seed(text: str) -> int:
    """A whole number of 0 or more."""
    value = whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is negative")
    return value


def temperature(text: str) -> float:
    """0 or a positive number."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is neither 0 nor a positive number")
    return value


def price(text: str) -> float:
    """Dollars an hour."""
    value = number(text)
    if not _LOWEST_PRICE <= value <= _HIGHEST_PRICE:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a number from {_LOWEST_PRICE:g} to {_HIGHEST_PRICE:g}"
        )
    return value


def rate(text: str) -> float:
    """Requests a second."""
    value = number(text)
    if not _LOWEST_RATE <= value <= _HIGHEST_RATE:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not a number from {_LOWEST_RATE:g} to {_HIGHEST_RATE:g}"
        )
    return value


def load(text: str) -> float:
    """A share of a rate, 0.9 or 90%."""
    value = number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0.01 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a share from 1% to 1000%")
    return value


def pause(text: str) -> float:
    """Seconds, 0 or more."""
    value = number(text)
    if not 0 <= value <= _LONGEST_PAUSE:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number from 0 to {_LONGEST_PAUSE:g}")
    return value


def probability(text: str) -> float:
    """A number above 0 and at most 1."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not above 0 and at most 1")
    return value


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number") from None
