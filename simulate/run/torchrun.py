"""What torchrun says to the processes that it starts: variables of the environment."""

from __future__ import annotations

import os
import socket

from simulate.errors import InvalidArgument

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets in the environment of every process."""

_MOST_RANKS = 2**20
"""More processes than any cluster starts."""


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES) and os.environ["WORLD_SIZE"] != "1"


def rank_of_this_process() -> int:
    """The rank that torchrun gave this process. Raises InvalidArgument for variables that torchrun would not set."""
    ranks = _whole("WORLD_SIZE", 1, _MOST_RANKS)
    return _whole("RANK", 0, ranks - 1)


def check_environment() -> None:
    """Raise InvalidArgument where variables are missing or not what torchrun sets.

    A host that no name server knows is one of these: torch would look it up until its time is over.
    """
    absent = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if absent:
        raise InvalidArgument(
            "NKW-PROCESSES",
            f"{', '.join(absent)} not set: start the processes with torchrun --nproc-per-node N SCRIPT",
        )
    rank_of_this_process()
    host, port = os.environ["MASTER_ADDR"], _whole("MASTER_PORT", 1, 2**16 - 1)
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError):
        raise InvalidArgument("NKW-PROCESSES", f"MASTER_ADDR is {host!r:.60}, which names no host") from None


def _whole(variable: str, least: int, most: int) -> int:
    text = os.environ[variable]
    # int() takes digits of any length and script, and blanks and underscores beside them.
    if not (
        text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most
    ):
        raise InvalidArgument(
            "NKW-PROCESSES",
            f"{variable} is {text!r:.60}; torchrun sets a whole number from {least} to {most}",
        )
    return int(text)
