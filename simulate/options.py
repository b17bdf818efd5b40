"""Options of the simulator's commands: one table by subject, from which each command has its rows.

The functions `read_…` are argparse types: they convert the text of an option and raise ArgumentTypeError with a
message for a wrong text. This module imports nothing that takes long, so that the help of a command does not wait for
the simulator. A contract test compares the choices below with the names that the simulator knows.
"""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from nkw.options import OptionTable, Rows
from nkw.process import parse_seconds
from nkw.targets import HARDWARE_VARIABLE, TARGETS
from simulate.level import LEVEL_VARIABLE, LEVELS, NEWEST, RULES_VARIABLE, Rules

TRIALS = 200
"""Candidates of `tune` without a limit."""
MAX_SIZES = 64
"""Sizes of a sweep."""
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Sweep(NamedTuple):
    """Values that `--sweep NAME=N,N` gives a named size; `sizes` are distinct and ascending."""

    name: str
    sizes: tuple[int, ...]


def read_sweep(text: str) -> Sweep:
    """Return the sweep of NAME=N,N, with 1 to 64 sizes of 1 or more. Raises ArgumentTypeError for another text."""
    match = re.fullmatch(r"([A-Za-z_]\w*)=([0-9]{1,9}(?:,[0-9]{1,9})*)", text, re.ASCII)
    sizes = sorted({int(size) for size in match[2].split(",")}) if match else []
    if match is None or not sizes[0] or len(sizes) > MAX_SIZES:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no sweep; give a name and 1 to {MAX_SIZES} sizes, such as B=1,4,8,16"
        )
    return Sweep(match[1], tuple(sizes))


def _read_digits(text: str, max_digits: int, least: int, refusal: str) -> int:
    """Return the number that a text of ASCII digits has.

    Args:
        text: The text.
        max_digits: The largest number of digits.
        least: The smallest number.
        refusal: The end of the message, after the quoted text.

    Raises:
        ArgumentTypeError: The text is another text, too long, or a number below `least`.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= max_digits and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r:.40} {refusal}")
    return int(text)


def read_rank_count(text: str) -> int:
    """Return a number of ranks, 1 to 999. Raises ArgumentTypeError for another text."""
    return _read_digits(text, 3, 1, "is no number of ranks; give 1 to 999")


def read_count(text: str) -> int:
    """Return a count of trials or processes, 1 or more. Raises ArgumentTypeError for another text."""
    return _read_digits(text, 7, 1, "is no count; give 1 or more")


def read_seed(text: str) -> int:
    """Return a seed, 0 or more, of at most nine digits. Raises ArgumentTypeError for another text."""
    return _read_digits(text, 9, 0, "is no seed; give 0 or more")


def read_repetitions(text: str) -> int:
    """Return how many times a launch is executed again, 0 or more. Raises ArgumentTypeError for another text."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; give an integer of 0 or more")
    return int(text)


def read_trips(text: str) -> tuple[int, ...]:
    """Return the trip counts of N or N,N, each 0 or more. Raises ArgumentTypeError for another text."""
    counts = text.split(",")
    if not all(count.isascii() and count.isdecimal() and len(count) < 10 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no list of counts; give N or N,N")
    return tuple(map(int, counts))


def read_percentage(text: str) -> Fraction:
    """Return a percentage as a fraction, such as 1/50 for 2%. Raises ArgumentTypeError for another text."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)%", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no percentage; give for example 2%")
    return Fraction(match[1]) / 100


def read_bytes(text: str) -> int:
    """Return a size of memory in bytes, such as 2**33 for 8G; K, M, G and T are powers of 1024.

    Raises ArgumentTypeError for another text, and for sizes below 1 MiB or from 2**60 bytes on.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?)([kmgt]?)i?b?", text, re.ASCII | re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get(match[2].lower(), 1)) if match else 0
    if not 2**20 <= size < 2**60:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no size of memory; give 1M or more, such as 512M or 8G"
        )
    return size


_MACHINE: Rows = {
    "--target": dict(choices=TARGETS, help="the chip (default: the environment's, else trn2)"),
    "--hardware": dict(
        metavar="FILE",
        help="an overlay, whose numbers replace those of the chip's record (docs/calibrate.md; default: "
        f"{HARDWARE_VARIABLE}, else none)",
    ),
    "--level": dict(
        choices=[str(level) for level in LEVELS],
        help=f"the release of NKI that kernels are written for (default: {LEVEL_VARIABLE}, else {NEWEST})",
    ),
    "--rules": dict(
        choices=[rules.value for rules in Rules],
        help="whose refusals hold: the chip's, or those of the vendor's simulator; the others become warnings "
        f"(default: {RULES_VARIABLE}, else chip)",
    ),
    "--ranks": dict(
        type=read_rank_count,
        metavar="N",
        help="launch every kernel that is called like a function on N ranks, with equal arguments (default: 1)",
    ),
    "--time-limit": dict(
        type=parse_seconds,
        metavar="SECONDS",
        help="end a kernel by name after this time, each candidate of tune (default: 3600; none where stdin is a "
        "terminal)",
    ),
    "--memory-limit": dict(
        type=read_bytes,
        metavar="SIZE",
        help="memory that a kernel by name may take, such as 8G (default: that of the machine; none where stdin is a "
        "terminal)",
    ),
}
_LAUNCHES: Rows = {
    "--replay": dict(
        action="store_true", help="replay a launch whose program an earlier, checked launch recorded"
    ),
    "--exact": dict(
        action="store_true", help="replay instruction by instruction: the bytes of an eager launch"
    ),
    "--verify-replay": dict(
        action="store_true", help="compare every replay with an eager launch, and stop at a difference"
    ),
    "--replay-report": dict(
        action="store_true", help="print which launches were replayed, and why others were not"
    ),
    "--trips": dict(
        type=read_trips,
        default=(),
        metavar="N[,N…]",
        help="how often device loops of a kernel run whose bounds only the device knows, in the order they are reached",
    ),
    "--sweep": dict(
        type=read_sweep,
        metavar="NAME=N[,N…]",
        help="launch a kernel with each of these sizes in the place of NAME, as in 'f32[B,512]' --sweep B=1,4,8, and "
        "find the size at which capacity ends",
    ),
    "--products": dict(
        action="store_true", help="also list the matmuls whose operands are not proven to be integers"
    ),
    "--orders": dict(
        type=read_repetitions,
        default=0,
        metavar="N",
        help="execute every launch again in N other orders of instructions that its dependences allow",
    ),
    "--seeds": dict(
        type=read_repetitions,
        default=0,
        metavar="N",
        help="run every launch of several cores again with N other schedules of its cores",
    ),
}
_JUDGEMENTS: Rows = {
    "--reading": dict(
        choices=["serial", "program", "scheduled", "dataflow"],
        default="program",
        help="what may overlap (default: %(default)s: engines and DMA queues, each in program order)",
    ),
    "--advice": dict(action="store_true", help="print all advice, and the vendor's bounds"),
    "--against": dict(
        nargs="+",
        default=(),
        metavar=("KERNEL|FILE", "SHAPES"),
        help="compare with another kernel and its arguments, with a file that --json wrote, or with what "
        "neuron-explorer or neuron-profile measured (a folder of Parquet, a summary in JSON); its words end at the "
        "next option, before a script at --",
    ),
    "--fail-above": dict(
        type=read_percentage,
        metavar="P%",
        help="with --against: exit status 1 where the time is longer by more than P per cent, for example 2%%",
    ),
    "--ignore": dict(action="append", default=[], metavar="CODE", help="leave out a code"),
    "--as-error|--error": dict(
        action="append",
        default=[],
        metavar="CODE",
        help="count a warning as an error; `all` for every one",
    ),
    "--reference": dict(
        metavar="MODULE:NAME",
        help="a function of numpy arrays, also FILE.py:NAME (default: <kernel>_reference of the kernel's module)",
    ),
}
_SEARCH: Rows = {
    "--trials": dict(
        type=read_count,
        metavar="N",
        help=f"candidates to try (default: {TRIALS}; with --seconds as many as it takes)",
    ),
    "--seconds": dict(type=parse_seconds, metavar="N", help="end the search after so many seconds"),
    "--jobs": dict(type=read_count, metavar="N", help="processes that measure (default: one per processor)"),
    "--cluster": dict(
        metavar="ADDRESS",
        help="measure on a Ray cluster: its address, auto, or local to start one here",
    ),
    "--seed": dict(
        type=read_seed, default=0, metavar="N", help="of the search's random choices (default: 0)"
    ),
    "--write": dict(
        action="store_true",
        help="put the best values into the table tuned.py beside the kernel's file; where they save less than 1 %%, "
        "take the entry out",
    ),
}
_INPUTS: Rows = {
    "--catalogue": dict(
        action="store_true",
        help="the first word is a package with a table of examples, such as nki_kernels: bundle all of its kernels",
    ),
    "folder": dict(help="a bundle with the folder result/ that its run.py wrote"),
    "paths": dict(nargs="+", metavar="path", help="a Python file or a folder"),
    "code": dict(nargs="?", help="for example NKW-UNWRITTEN; without it, all codes"),
    "results": dict(
        nargs="+",
        type=Path,
        help="folders of bundles that ran, or JSON files of measured times (docs/calibrate.md)",
    ),
}
_OUTPUTS: Rows = {
    "--json": dict(
        metavar="FILE",
        help="write the result as JSON (docs/json.md); - is stdout, and all else goes to stderr then",
    ),
    "--trace": dict(metavar="FILE", help="write a trace that opens in Perfetto"),
    "--html": dict(metavar="FILE", help="write the profile as a page for a browser"),
    "--svg": dict(metavar="FILE", help="write the maps as a picture"),
    "--text": dict(action="store_true", help="print the text also beside a page or a comparison"),
    "--format": dict(choices=["text", "json", "sarif"], default="text"),
    "--out=DIR": dict(metavar="DIR", help="the folder to write, which is not there yet"),
    "--out=FILE": dict(
        metavar="FILE", help="write the numbers that are determined as an overlay for --hardware"
    ),
    "--measurements": dict(
        metavar="FILE", help="write the measured times as entries for nkw fidelity and nkw calibrate"
    ),
}

_TABLE = OptionTable(
    {
        "chip and process": _MACHINE,
        "launches": _LAUNCHES,
        "comparisons and findings": _JUDGEMENTS,
        "search": _SEARCH,
        "inputs": _INPUTS,
        "reports": _OUTPUTS,
    }
)
_option, _options = _TABLE.option, _TABLE.options
_RUNNING = "--target --hardware --level --rules --time-limit --memory-limit --json"
"""Options of all commands that run scripts and kernels."""
_ONE_RANK = _option("--ranks", metavar="1", help="the kernel runs on one rank")

HARDWARE = _option("--hardware")
RUN = _options("--replay --exact --verify-replay --replay-report --ranks", _RUNNING)
TIME = _options(
    "--reading --trace --html --advice --text --against --fail-above --sweep --trips --ranks", _RUNNING
)
MEMORY = _options(
    "--svg",
    _option("--text", help="print the text also where a picture is written"),
    "--sweep --trips --ranks",
    _RUNNING,
)
CHECK = _options("--format --ignore --as-error|--error --orders --seeds --products --ranks", _RUNNING)
VERIFY = _options(_ONE_RANK, "--reference", _RUNNING)
TUNE = _options(
    _option(
        "--reading",
        choices=["program", "scheduled", "worse"],
        default="worse",
        help="the time that is minimised: of one reading, or the worse of both (default)",
    ),
    "--trials --seconds --jobs --cluster --seed",
    _option("--html", help="write the report with its curve as a page"),
    "--write --ranks",
    _RUNNING,
)
BUNDLE = _options("--out=DIR --catalogue", _ONE_RANK, "--reference", _RUNNING)
COMPARE = _options("folder --measurements --json")
LINT = _options("paths --level --json --format --ignore --as-error|--error")
DOCTOR = _options("--json")
EXPLAIN = _options("code --json")
CALIBRATE = _options(
    "results --out=FILE",
    _option(
        "--reading",
        choices=["scheduled", "program"],
        default="scheduled",
        help="the prediction of kernels by name (default: %(default)s)",
    ),
    "--hardware --time-limit --memory-limit --json",
)
TARGETS_OPTIONS = _options("--hardware --json")
