"""The line of the user's kernel that is running."""

from __future__ import annotations

import os
import sys
from types import CodeType

from simulate.errors import Location

PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + "/"
"""The folder of the simulator, whose frames are no part of a kernel."""

_ours: dict[int, tuple[CodeType, bool]] = {}
"""By id of a code object: the object, which keeps the id its own, and whether it is ours. Hashing a code is slow."""


_locations: dict[tuple[int, int, str], tuple[CodeType, Location]] = {}
"""Locations by code, line and working directory; each with its code, so that the code's id stays its own."""


def kernel_line(inside: int = 1) -> tuple[CodeType, int]:
    """Code and line number of the innermost frame outside this package; the first `inside` callers are inside it."""
    frame = sys._getframe(inside)
    while True:
        code = frame.f_code
        known = _ours.get(id(code)) or _judged(code)
        if not known[1] or frame.f_back is None:
            return code, frame.f_lineno
        frame = frame.f_back


def is_ours(code: CodeType) -> bool:
    """Whether code belongs to this package."""
    return (_ours.get(id(code)) or _judged(code))[1]


def _judged(code: CodeType) -> tuple[CodeType, bool]:
    known = _ours[id(code)] = code, code.co_filename.startswith(PACKAGE)
    return known


def location(line: tuple[CodeType, int]) -> Location:
    """A line as reports name it; a path below the working directory is relative to it."""
    code, number = line
    key = id(code), number, os.getcwd()
    known = _locations.get(key)
    if known is None:
        from pathlib import Path  # with what it imports, 4 ms of a process that reports nothing

        path = Path(code.co_filename)
        try:
            file = str(path.relative_to(key[2]))
        except ValueError:
            file = str(path)
        known = _locations[key] = code, Location(file, number, code.co_name)
    return known[1]


def raised_at(error: BaseException) -> Location | None:
    """The innermost line outside this package in an error's traceback."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        generated = code.co_filename == "<string>" and code.co_name == "__init__"  # of a dataclass
        if not generated and not code.co_filename.startswith(PACKAGE):
            found = location((code, trace.tb_lineno))
        trace = trace.tb_next
    return found


def here() -> Location:
    """The line of the user's kernel that is running now."""
    return location(kernel_line())
