"""Tracebacks of user errors: the user's frames, without those of this package.

An error of a kernel passes some ten frames of the simulator on its way to the user, of which none says more than the
error. NKW_TRACEBACK=full shows them. An exception that no rule raised and that began inside the package is a fault of
the simulator, and keeps all frames.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from nkw.errors import NkwError
from simulate.lines import PACKAGE, PACKAGES

TRACEBACK_VARIABLE = "NKW_TRACEBACK"
_COMMANDS = PACKAGE + "cli.py"


def trim_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without frames of the simulator.

    It is unchanged if NKW_TRACEBACK is "full", if no frame of the user is left, and for an exception other than an
    NkwError that began in the simulator. It is None if a script could not be started, as with a SyntaxError, which
    names its line.
    """
    full_trace = error.__traceback__
    frames = []
    trace = full_trace
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    users = [frame for frame in frames[_count_command_frames(frames) :] if not _is_ours(frame)]
    if os.environ.get(TRACEBACK_VARIABLE) == "full":
        return full_trace
    if frames and not users and _runs_scripts(frames[-1]):
        return None
    began_here = bool(frames) and _is_ours(frames[-1]) and not isinstance(error, NkwError)
    if not users or began_here:
        return full_trace
    kept = None
    for frame in reversed(users):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _count_command_frames(frames: Sequence[TracebackType]) -> int:
    """Return how many of the outermost frames belong to the command that runs a script; 0 if no command runs it."""
    entered = [index for index, frame in enumerate(frames) if frame.tb_frame.f_code.co_filename == _COMMANDS]
    return entered[-1] + 1 if entered else 0


def _is_ours(trace: TracebackType) -> bool:
    """Return whether a traceback entry is code of the simulator, of `nkw`, or of Python's `runpy`."""
    return trace.tb_frame.f_code.co_filename.startswith(PACKAGES) or _runs_scripts(trace)


def _runs_scripts(trace: TracebackType) -> bool:
    """Return whether a traceback entry is code of Python's `runpy`, which runs scripts."""
    file = trace.tb_frame.f_code.co_filename
    return file.startswith("<frozen runpy") or file == runpy.__file__


def print_user_traceback(error: BaseException) -> None:
    """Print an error on stderr with its traceback, without frames of the simulator (see `trim_traceback`)."""
    traceback.print_exception(type(error), error, trim_traceback(error))


def show_user_frames() -> None:
    """Let Python and IPython print uncaught errors without frames of the simulator, in this process; idempotent."""
    before = sys.excepthook
    if getattr(before, "__module__", None) != __name__:

        def hook(error_class: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            kept = trim_traceback(error)
            before(error_class, error.with_traceback(kept), kept)

        sys.excepthook = hook
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), _show_in_notebook)


def _show_in_notebook(
    shell: Any, error_class: type[BaseException], error: BaseException, trace: Any, **_: Any
) -> None:
    """Show an error in IPython without frames of the simulator; a handler for `set_custom_exc`."""
    kept = trim_traceback(error)
    shell.showtraceback((error_class, error.with_traceback(kept), kept), tb_offset=1)
