"""The child process of a command, from its start to the record that it writes to its parent.

`simulate.child_process` in the parent starts the child and reads the record (`nkw.child.Record`): exit status, output
and files of the command. Pipes are pairs (reader, writer) of file descriptors. The first carries the record; two
more, if output is captured, carry stdout and stderr of the kernel.
"""

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
    """Limits of a child process; None is no limit.

    seconds: wall-clock time, which the parent enforces. memory_bytes: address space beyond that of the process before
    the command runs, set as a soft limit of the child.
    """

    seconds: float | None = None
    memory_bytes: int | None = None


def become_spawned_child(act: Callable[[], int], arguments: str) -> NoReturn:
    """Run a command as the child process that `run_in_child` started as a new interpreter; never returns.

    Args:
        act: The command; it returns the exit status.
        arguments: A JSON list from the parent: the writers of the pipes, the record's token in hexadecimal, and the
            memory limit in bytes or null.
    """
    writers, token, memory_bytes = json.loads(arguments)
    limits = ChildLimits(None, memory_bytes)
    become_child(act, [(-1, writer) for writer in writers], bytes.fromhex(token), limits)


def become_child(
    act: Callable[[], int], pipes: Sequence[tuple[int, int]], token: bytes, limits: ChildLimits
) -> NoReturn:
    """Run a command in this process, write its record to the first pipe, and end the process with `os._exit`.

    The process exits with 0 if the record was written, else 1. It is killed when its parent dies (Linux).

    Args:
        act: The command; it returns the exit status. Its exceptions are printed and noted in the record.
        pipes: (reader, writer) descriptors: one pipe, or three if the kernel's stdout and stderr are captured.
            Readers are closed here; -1 stands for a reader that this process does not have.
        token: Random bytes that frame the record, so that the kernel's output cannot pass for one.
        limits: Limits, of which this function sets the memory limit only.
    """
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
        judge = _create_judge(pipes)
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
    """Run the command and store in `record` its exit status, or that an interrupt or an exception ended it.

    An exception is printed on stderr with its user frames; nothing is raised.
    """
    try:
        record.status = act()
    except KeyboardInterrupt as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        record.ended = "terminated" if isinstance(stopped, Terminated) else "interrupted"
        record.where = ": ".join(map(str, stopped.args))
    except BaseException as error:
        print_user_traceback(error)
        record.ended = f"the command failed: {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"


def _create_judge(pipes: Sequence[tuple[int, int]]) -> Judge:
    """Return the `Judge` with the streams of this process.

    With three pipes, descriptors 1 and 2 become the writers of the last two, so that the kernel's output goes to the
    parent, and the process starts its own session. COLUMNS is set to the width of the former terminal unless it is
    set.
    """
    if len(pipes) == 1:
        return Judge(sys.stdout, sys.stderr, sys.stderr, captures=False)
    with suppress(OSError):
        os.setsid()
    columns = _read_terminal_width()
    progress = _open_line_buffered(os.dup(ERR), "utf-8")
    encodings = [getattr(stream, "encoding", None) or "utf-8" for stream in (sys.stdout, sys.stderr)]
    for number, (_, writer) in zip((OUT, ERR), pipes[1:]):
        os.dup2(writer, number)
        os.close(writer)
    out, err = (_open_line_buffered(number, encoding) for number, encoding in zip((OUT, ERR), encodings))
    if columns is not None:
        os.environ.setdefault("COLUMNS", str(columns))
    return Judge(out, err, progress, captures=True)


def _open_line_buffered(descriptor: int, encoding: str) -> IO[str]:
    """Open a file descriptor as a line-buffered text stream, which leaves the descriptor open when it is closed."""
    return open(descriptor, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)


def _read_terminal_width() -> int | None:
    """Return the width of stdout's terminal in columns, or None if stdout is no terminal."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(OUT).columns
    return None


def _limit_memory(most: int | None) -> int | None:
    """Set the soft limit of this process's address space in bytes and return the former soft limit.

    Returns None and sets nothing if `most` is None or the platform has no such limit. The hard limit caps `most`; a
    limit that the system refuses is ignored.
    """
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
    """Call Linux' `prctl(option, value)` for this process; does nothing on other systems, and ignores failures."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
