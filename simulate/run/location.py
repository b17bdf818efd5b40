"""Kernel lines that are running, and the lines of errors.

A line is a code object and a line number. Code of the simulator and of `nkw` is no part of a kernel.
"""

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

_known_codes: dict[int, tuple[CodeType, bool]] = {}
"""Code objects, and whether they belong to this package, by id. Hashing a code object is slow."""


def kernel_line(inside: int = 1) -> tuple[CodeType, int]:
    """Return code and line number of the innermost running frame outside of the simulator, else of the outermost.

    Args:
        inside: The number of callers that are known to be inside the simulator, and are skipped.
    """
    frame = sys._getframe(inside)
    while True:
        code = frame.f_code
        entry = _known_codes.get(id(code)) or _classify(code)
        if not entry[1] or frame.f_back is None:
            return code, frame.f_lineno
        frame = frame.f_back


def _classify(code: CodeType) -> tuple[CodeType, bool]:
    """Record whether a code object belongs to the simulator, and return the entry (code, belongs)."""
    entry = _known_codes[id(code)] = code, code.co_filename.startswith(PACKAGES)
    return entry


def list_running_lines() -> tuple[tuple[CodeType, int], ...]:
    """Return the kernel lines of the running call stack, outermost caller first.

    They begin at the launch, and lines of the simulator are left out.
    """
    lines: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        code: CodeType = frame.f_code
        entry = _known_codes.get(id(code)) or _classify(code)
        if not entry[1]:
            lines.append((code, frame.f_lineno))
        elif code.co_filename == _LAUNCHER:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(lines))


def blame_line(error: NkwError, line: tuple[CodeType, int]) -> None:
    """Set the location of an error that has none to a kernel line.

    Its callers are set too, if the line is the one that is running.
    """
    if error.where is None:
        chain = list_running_lines()
        error.where = location(line)
        if chain and chain[-1] == line:
            error.callers = _list_callers(chain[:-1])


def blame_traceback(error: NkwError) -> None:
    """Set location and callers of an error that has none: the innermost kernel line of its traceback.

    Does nothing if the traceback has no kernel line.
    """
    if error.where is None:
        lines = [
            (trace.tb_frame.f_code, trace.tb_lineno) for trace in list_kernel_traces(error.__traceback__)
        ]
        if lines:
            error.where, error.callers = location(lines[-1]), _list_callers(lines[:-1])


def list_kernel_traces(trace: TracebackType | None) -> list[TracebackType]:
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


def _list_callers(chain: Sequence[tuple[CodeType, int]]) -> tuple[Location, ...]:
    """Return the locations of lines, given outermost first, in the reverse order."""
    return tuple(location(line) for line in reversed(chain))


def running_location() -> Location:
    """Return the location (file, line, function) of the kernel line that is running."""
    return location(kernel_line())
