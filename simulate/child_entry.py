"""The child process of a command, from its start to the record that it writes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, NoReturn

from nkw.child import ERR, OUT, Judge, Record, begin
from nkw.process import Terminated, imported, measure_address_space
from simulate.tracebacks import print_user_traceback

_PDEATHSIG = 1  # an option of Linux' prctl


@dataclass(frozen=True)
class ChildLimits:
    """Limits of a child; None is no limit.

    seconds: wall-clock time. memory_bytes: address space in addition to that of the parent.
    """

    seconds: float | None = None
    memory_bytes: int | None = None


def become_spawned_child(act: Callable[[], int], arguments: str) -> NoReturn:
    """Run a command as the child that `run_in_child` started as a new interpreter."""
    writers, token, memory_bytes = json.loads(arguments)
    limits = ChildLimits(None, memory_bytes)
    become_child(act, [(-1, writer) for writer in writers], bytes.fromhex(token), limits)


def become_child(
    act: Callable[[], int], pipes: Sequence[tuple[int, int]], token: bytes, limits: ChildLimits
) -> NoReturn:
    """Run the command in this process, which is the child, write the record, and end the process."""
    status = 1
    try:
        writer = pipes[0][1]
        for reader, _ in pipes:
            if reader >= 0:
                os.close(reader)
        os.set_inheritable(writer, False)
        identity = os.fstat(writer)
        set_process_option(_PDEATHSIG, signal.SIGKILL)
        imported()
        judge = _judge_of(pipes)
        limit = None if limits.memory_bytes is None else limits.memory_bytes + measure_address_space()
        before = _limit_memory(limit)
        begin(judge)
        _run(act, judge.record)
        _limit_memory(before)
        if os.getpid() == judge.process and os.path.samestat(identity, os.fstat(writer)):
            data = memoryview(judge.record.to_bytes(token))
            while data:
                data = data[os.write(writer, data) :]
            status = 0
    finally:
        os._exit(status)


def _run(act: Callable[[], int], record: Record) -> None:
    """Run the command and put its end into the record."""
    try:
        record.status = act()
    except KeyboardInterrupt as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        record.ended = "terminated" if isinstance(stopped, Terminated) else "interrupted"
        record.where = ": ".join(map(str, stopped.args))
    except BaseException as error:
        print_user_traceback(error)
        record.ended = f"the command failed: {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"


def _judge_of(pipes: Sequence[tuple[int, int]]) -> Judge:
    """Return the judge of this process; with pipes for them, stdout and stderr become the kernel's."""
    if len(pipes) == 1:
        return Judge(sys.stdout, sys.stderr, sys.stderr, captures=False)
    with suppress(OSError):
        os.setsid()
    columns = _columns()
    progress = _line_buffered(os.dup(ERR), "utf-8")
    encodings = [getattr(stream, "encoding", None) or "utf-8" for stream in (sys.stdout, sys.stderr)]
    for number, (_, writer) in zip((OUT, ERR), pipes[1:]):
        os.dup2(writer, number)
        os.close(writer)
    out, err = (_line_buffered(number, encoding) for number, encoding in zip((OUT, ERR), encodings))
    if columns is not None:
        os.environ.setdefault("COLUMNS", str(columns))
    return Judge(out, err, progress, captures=True)


def _line_buffered(descriptor: int, encoding: str) -> IO[str]:
    return open(descriptor, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)


def _columns() -> int | None:
    """Return the width of the terminal of stdout, None if there is none."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(OUT).columns
    return None


def _limit_memory(most: int | None) -> int | None:
    """Set the soft limit of this process' address space where the platform has one; returns the limit before."""
    try:
        import resource
    except ImportError:
        return None
    if most is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = [limit for limit in (most, hard) if limit != resource.RLIM_INFINITY and limit >= 0]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (min(allowed, default=resource.RLIM_INFINITY), hard))
    return soft


def set_process_option(option: int, value: int) -> None:
    """Set an option of this process where the system is Linux."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
