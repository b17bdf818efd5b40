"""The line of the user's kernel that is running."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import CodeType, TracebackType

import numpy as np

from nkw.errors import Location, NkwError
from simulate.lines import PACKAGE, PACKAGES, location

_NUMPY = os.path.dirname(np.__file__) + "/"
_LAUNCHER = PACKAGE + "run/launcher.py"

_ours: dict[int, tuple[CodeType, bool]] = {}
"""By id of a code object: the object, which keeps the id its own, and whether it is ours. Hashing a code is slow."""


def kernel_line(inside: int = 1) -> tuple[CodeType, int]:
    """Code and line number of the innermost frame outside this package; the first `inside` callers are inside it."""
    frame = sys._getframe(inside)
    while True:
        code = frame.f_code
        known = _ours.get(id(code)) or _judged(code)
        if not known[1] or frame.f_back is None:
            return code, frame.f_lineno
        frame = frame.f_back


def _judged(code: CodeType) -> tuple[CodeType, bool]:
    known = _ours[id(code)] = code, code.co_filename.startswith(PACKAGES)
    return known


def running_lines() -> tuple[tuple[CodeType, int], ...]:
    """The kernel's lines that are running, outermost caller first, without lines of this package."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        code: CodeType = frame.f_code
        known = _ours.get(id(code)) or _judged(code)
        if not known[1]:
            found.append((code, frame.f_lineno))
        elif code.co_filename == _LAUNCHER:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(found))


def blame_line(error: NkwError, line: tuple[CodeType, int]) -> None:
    """Give an error without a line this one, with its callers where it is the running one."""
    if error.where is None:
        chain = running_lines()
        error.where = location(line)
        if chain and chain[-1] == line:
            error.callers = _named(chain[:-1])


def blame_traceback(error: NkwError) -> None:
    """Give an error without a line the innermost kernel line in its traceback, with its callers."""
    if error.where is None:
        lines = [(trace.tb_frame.f_code, trace.tb_lineno) for trace in kernel_traces(error.__traceback__)]
        if lines:
            error.where, error.callers = location(lines[-1]), _named(lines[:-1])


def kernel_traces(trace: TracebackType | None) -> list[TracebackType]:
    """Return the entries of a traceback that are lines of a kernel, outermost first.

    Lines of this package, of NumPy and of the `__init__` that a dataclass generates are left out.
    """
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        generated = code.co_filename == "<string>" and code.co_name == "__init__"
        if not generated and not code.co_filename.startswith((*PACKAGES, _NUMPY)):
            lines.append(trace)
        trace = trace.tb_next
    return lines


def _named(chain: Sequence[tuple[CodeType, int]]) -> tuple[Location, ...]:
    return tuple(location(line) for line in reversed(chain))


def here() -> Location:
    """The line of the user's kernel that is running now."""
    return location(kernel_line())
