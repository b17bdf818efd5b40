"""Settings from environment variables: chip, logical core, replay, device loops, and the variables of torchrun."""

from __future__ import annotations

import os
import socket

from nkw.errors import InvalidArgument
from nkw.targets import DEFAULT_TARGET, LNC_VARIABLE, TARGET_VARIABLE
from simulate.hardware import Hardware, hardware
from simulate.level import LEVEL_VARIABLE, LNC_BY_ENVIRONMENT, Level

PRECISE_VARIABLE = "NKI_PRECISE_FP"
REPLAY_VARIABLE = "NKW_REPLAY"
RANKS_VARIABLE = "NKW_RANKS"
LOOP_EVENTS_VARIABLE = "NKW_LOOP_EVENTS"
_LOOP_EVENTS = 500_000  # about ten seconds of eager instructions

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets in the environment of every process."""

_MOST_RANKS = 2**20
"""Upper limit of WORLD_SIZE, more processes than any cluster starts."""


def target_hardware(target: str | None = None, logical_core_size: int = 1) -> Hardware:
    """Return the record of the chip to simulate.

    Args:
        target: The name of the chip; None for NEURON_PLATFORM_TARGET_OVERRIDE, else trn2.
        logical_core_size: Physical cores of a rank. The record has the times of collectives for that size.

    Raises:
        InvalidArgument: No chip has the name.
    """
    return hardware(target or os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET, logical_core_size)


SETS_LOGICAL_CORE = (
    "kernel[2] up to NKI 0.6, by NEURON_LOGICAL_NC_CONFIG=2 at level 0.7, "
    "by logical_core_size= in simulate.World"
)
"""Ways to get a logical core of two physical cores, for messages."""


def check_logical_core(chip: Hardware, size: int) -> None:
    """Raise InvalidArgument if the chip has no logical cores of `size` physical cores."""
    if size not in chip.logical_core_sizes:
        raise InvalidArgument(
            "NKW-LNC",
            f"a logical core of {size} physical cores; {chip.name} has "
            + " or ".join(map(str, chip.logical_core_sizes))
            + f". The size is set by {SETS_LOGICAL_CORE}",
        )


def read_core_count(kernel: str, grid: int | None, level: Level) -> int:
    """Return the number of physical cores of a kernel that is called like a function, 1 or 2.

    It is the grid, else 1. From level 0.7 on, NEURON_LOGICAL_NC_CONFIG decides if there is no grid.

    Args:
        kernel: The name of the kernel, for messages.
        grid: The grid of `kernel[grid](…)`, None for `kernel(…)`.
        level: The release of NKI.

    Raises:
        InvalidArgument: The variable is neither 1 nor 2, or it and the call disagree, which the runtime (0.6) and the
            compiler (0.7) refuse.
    """
    text = os.environ.get(LNC_VARIABLE, "")
    if text not in ("", "1", "2"):
        raise InvalidArgument("NKW-LNC", f"{LNC_VARIABLE} is {text!r:.40}; set it to 1 or 2")
    if grid is None and level.has(LNC_BY_ENVIRONMENT):
        return int(text or 1)
    size = grid or 1
    if text and int(text) != size:
        call = f"{kernel}(…)" if grid is None else f"{kernel}[{grid}](…)"
        cure = (
            f"at {LEVEL_VARIABLE}={level} write {kernel}[{text}](…)"
            if grid is None
            else "give both the same number of cores, or only one of them"
        )
        raise InvalidArgument(
            "NKW-LNC", f"{call} is a launch on {size} physical cores and {LNC_VARIABLE} is {text}; {cure}"
        )
    return size


def read_rank_count() -> int:
    """Return the number of ranks of a kernel that is called like a function: NKW_RANKS, else 1.

    Raises:
        InvalidArgument: NKW_RANKS is no number from 1 to 999.
    """
    text = os.environ.get(RANKS_VARIABLE, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 4 and int(text)):
        raise InvalidArgument(
            "NKW-WORLD", f"{RANKS_VARIABLE} is {text!r:.40}; set it to a number of ranks from 1 to 999"
        )
    return int(text or 1)


def is_replay_requested() -> bool:
    """Return whether NKW_REPLAY=1 is set, so that kernels that are called like functions run in mode replay.

    Raises:
        InvalidArgument: NKW_REPLAY is not 0, 1 or empty.
    """
    return REPLAY_VARIABLE in os.environ and read_switch(REPLAY_VARIABLE)


def read_switch(variable: str) -> bool:
    """Return True if an environment variable is 1, False if it is 0, empty or missing.

    Raises:
        InvalidArgument: The variable has another text.
    """
    text = os.environ.get(variable, "0")
    if text not in ("0", "1", ""):
        raise InvalidArgument("NKW-REPLAY-OPTION", f"{variable} is {text!r}; set it to 0 or 1")
    return text == "1"


def max_loop_events() -> int:
    """Return how many instructions the iterations of one device loop may issue: NKW_LOOP_EVENTS, else 500,000.

    Raises:
        InvalidArgument: NKW_LOOP_EVENTS is no number.
    """
    text = os.environ.get(LOOP_EVENTS_VARIABLE, "")
    if not text:
        return _LOOP_EVENTS
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument("NKW-LOOP-OPTION", f"{LOOP_EVENTS_VARIABLE} is {text!r}; set it to a count")
    return int(text)


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process as one of several.

    All of its variables are then set, and WORLD_SIZE is not 1.
    """
    return all(name in os.environ for name in TORCHRUN_VARIABLES) and os.environ["WORLD_SIZE"] != "1"


def read_rank() -> int:
    """Return the rank that torchrun gave this process, from RANK.

    Raises:
        InvalidArgument: RANK or WORLD_SIZE has a text that torchrun would not set.
    """
    ranks = _read_integer("WORLD_SIZE", 1, _MOST_RANKS)
    return _read_integer("RANK", 0, ranks - 1)


def check_environment() -> None:
    """Raise InvalidArgument if a variable of torchrun is missing or has a text that torchrun would not set.

    A MASTER_ADDR that no name server knows is refused too, because torch would search for it until its timeout.
    """
    absent = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if absent:
        raise InvalidArgument(
            "NKW-PROCESSES",
            f"{', '.join(absent)} not set: start the processes with torchrun --nproc-per-node N SCRIPT",
        )
    read_rank()
    host, port = os.environ["MASTER_ADDR"], _read_integer("MASTER_PORT", 1, 2**16 - 1)
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError):
        raise InvalidArgument(
            "NKW-PROCESSES", f"MASTER_ADDR is {host!r:.60}, which names no host; set it to the host of rank 0"
        ) from None


def _read_integer(variable: str, least: int, most: int) -> int:
    """Return the integer of a variable that is set. Raises InvalidArgument for another text or a number out of range.

    Args:
        variable: The name of the variable.
        least: The smallest number.
        most: The largest number.
    """
    text = os.environ[variable]
    # int() also accepts digits of any length and script, blanks and underscores.
    if not (
        text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most
    ):
        raise InvalidArgument(
            "NKW-PROCESSES",
            f"{variable} is {text!r:.60}; torchrun sets a whole number from {least} to {most}",
        )
    return int(text)
