"""Runs a function in a forked copy of this process, so that foreign code changes nothing here and can be limited."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from nkw.process import Limits


def run_forked(work: Callable[[], Any], seconds: int, limits: Limits | None = None) -> Any:
    """Run `work` in a forked process and return its result, converted to JSON and back.

    Returns None if the process ends without a complete result: after `seconds` of wall-clock time, beyond `limits`,
    or by an exception in `work`. The process prints nothing.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        _answer(work, seconds, limits, write_end)
    os.close(write_end)
    try:
        with os.fdopen(read_end) as answer:
            text = answer.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.waitpid(child, 0)
    try:
        return json.loads(text)
    except ValueError:  # nothing, or a beginning: the process was killed
        return None


def _answer(work: Callable[[], Any], seconds: int, limits: Limits | None, write_end: int) -> None:
    """Run `work` in the child process, write its result as JSON to a pipe, and exit; never returns.

    `os._exit` is needed: a normal exit would join the threads of simulated cores, which may wait forever.
    """
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        if limits is not None:
            limits.apply()
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        text = json.dumps(work())
        with os.fdopen(write_end, "w") as answer:
            answer.write(text)
    finally:
        os._exit(0)
