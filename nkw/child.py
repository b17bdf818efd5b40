"""Child process that runs the user's kernel for a command of the simulator, and the record of its result.

The child judges the kernel, for example compares it with its reference. The parent trusts a record only if it is
complete and the child exited with status 0. A kernel that exits, crashes or hangs leaves no record, and a missing
record is never a pass. In the child, output and files of the command become part of the record, and output of the
kernel passes through.

`simulate.child_process` starts and awaits the child. Functions of this module also work in a process that is no child.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any, TypeVar

OUT, ERR = 1, 2
"""Descriptors of stdout and stderr, which also number the streams of a record."""
_FRAME = 8  # bytes that store the length of a record

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Record:
    """Result of a command in a child: its exit status, its output in order, and its files.

    Attributes:
        status: Exit status of the command.
        printed: Pairs of OUT or ERR and a text.
        files: Path, label in messages, error code and text of every file.
        ended: Empty for a complete command; "interrupted" or "terminated", or why the command failed.
        where: The text of an interrupt, such as the last instruction.
    """

    status: int = 0
    printed: list[tuple[int, str]] = field(default_factory=list)
    files: list[tuple[str, str, str, str]] = field(default_factory=list)
    ended: str = ""
    where: str = ""

    def to_bytes(self, token: bytes) -> bytes:
        """Return `token`, the length of the record in 8 bytes, the record as JSON, and `token` again.

        The second token marks the record as complete.
        """
        content = json.dumps(asdict(self)).encode()
        return token + len(content).to_bytes(_FRAME, "big") + content + token

    @classmethod
    def from_bytes(cls, data: bytes, token: bytes) -> Record | None:
        """Return the record in the bytes that `to_bytes` made.

        Returns:
            The record, or None if the bytes are incomplete or do not begin and end with `token`.
        """
        if not (cls.is_complete(data, token) and data.startswith(token) and data.endswith(token)):
            return None
        return cls(**json.loads(data[len(token) + _FRAME : -len(token)]))

    @staticmethod
    def is_complete(data: bytes | bytearray, token: bytes) -> bool:
        """Return whether `data` has exactly the length that its first bytes announce, without a check of the tokens."""
        head = len(token) + _FRAME
        announced = int.from_bytes(data[len(token) : head], "big")
        return len(data) >= head and len(data) == head + announced + len(token)


class _Printed(io.TextIOBase):
    """Stdout or stderr of a command in a child: text that is written becomes part of the record."""

    def __init__(self, number: int, record: Record, real: IO[str]) -> None:
        self._number, self._record = number, record
        self._real_encoding, self._is_terminal = getattr(real, "encoding", "utf-8") or "utf-8", real.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the stream on which the parent will print the text."""
        return self._real_encoding

    def isatty(self) -> bool:
        """Return whether the parent will print the text to a terminal."""
        return self._is_terminal

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Append a text to the record and return its length."""
        self._record.printed.append((self._number, text))
        return len(text)


class Judge:
    """State of a child process: its record, the streams of the command, and the streams of the kernel.

    Args:
        out: Stdout of the kernel.
        err: Stderr of the kernel.
        progress: Stream whose output is shown at once.
        captures: Whether only the kernel writes to descriptors 1 and 2, so that they can be muted.
    """

    def __init__(self, out: IO[str], err: IO[str], progress: IO[str], captures: bool) -> None:
        self.record = Record()
        self.captures = captures
        self.progress = progress
        self.out, self.err = out, err
        self.printed_out, self.printed_err = (
            _Printed(number, self.record, real) for number, real in ((OUT, sys.stdout), (ERR, sys.stderr))
        )
        self.process = os.getpid()


_judge: Judge | None = None


def begin(judge: Judge) -> None:
    """Make this process the child of a command, for good.

    From now on sys.stdout and sys.stderr write to the judge's record.
    """
    global _judge
    _judge = judge
    sys.stdout, sys.stderr = judge.printed_out, judge.printed_err


def is_child() -> bool:
    """Return whether this process is the child of a command."""
    return _judge is not None


def choose_progress_stream() -> IO[str]:
    """Return the stream to which progress is written: the judge's in a child, and stderr otherwise."""
    return sys.stderr if _judge is None else _judge.progress


def record_file(path: str, label: str, code: str, text: str) -> None:
    """Add a file to the record of this child, so that the parent writes it; only for a child.

    Args:
        path: Path of the file.
        label: Name of the file in messages.
        code: Error code if the file cannot be written.
        text: Text of the file.
    """
    assert _judge is not None
    _judge.record.files.append((path, label, code, text))


def leave_if_copied() -> None:
    """End this process with status 0 if it is a fork of the child, made by the kernel; otherwise return.

    Only the child itself continues with the command.
    """
    if _judge is not None and os.getpid() != _judge.process:
        os._exit(0)


@contextmanager
def user_output(to_stderr: bool) -> Iterator[None]:
    """Give code of the user in the block the stdout and stderr that it would have without a child.

    In a child they are the kernel's streams, and the record's streams return after the block. A block inside another
    one changes nothing.

    Args:
        to_stderr: Whether stdout of the block goes to stderr, so that stdout has only the report.
    """
    judge = _judge
    if judge is None:
        with redirect_stdout(sys.stderr) if to_stderr else nullcontext():
            yield
        return
    if sys.stdout not in (judge.printed_out, judge.printed_err):  # inside another such block
        yield
        return
    before = sys.stdout, sys.stderr
    report_on_stderr = sys.stdout is judge.printed_err
    sys.stdout, sys.stderr = judge.err if to_stderr or report_on_stderr else judge.out, judge.err
    try:
        yield
    finally:
        leave_if_copied()
        for stream in (judge.out, judge.err):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def end_after(seconds: float | None) -> Iterator[None]:
    """End this child with SIGALRM if the block takes longer than `seconds`.

    No limit is kept without a child, or if `seconds` is None.
    """
    if _judge is None or seconds is None:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def mute_output() -> Iterator[None]:
    """Drop what is written to descriptors 1 and 2 in the block, also by compiled libraries.

    Only a child whose judge captures the kernel's output drops it; other processes write as usual.
    """
    judge = _judge
    if judge is None or not judge.captures:
        yield
        return
    saved = [os.dup(OUT), os.dup(ERR)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, OUT)
        os.dup2(nowhere, ERR)
        yield
    finally:
        leave_if_copied()
        for number, descriptor in zip((OUT, ERR), saved):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def show_once(function: Function) -> Function:
    """Return a function that calls `function` and drops its output from the second call on.

    The output is dropped only where `mute_output` drops it.
    """
    called = False

    def call(*args: Any, **keywords: Any) -> Any:
        nonlocal called
        with mute_output() if called else nullcontext():
            called = True
            return function(*args, **keywords)

    return call  # type: ignore[return-value]
