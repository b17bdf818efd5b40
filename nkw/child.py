"""Child process that runs the judging function of a command, and the record of its result.

The parent trusts a record only if it is complete and the child exited with status 0. A kernel that exits, crashes or
hangs leaves no record, and a missing record is never a pass. In the child, output and files of the command become part
of the record, and output of the kernel passes through.

`simulate.child_process` starts and awaits the child.
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
    """Result of a command: its exit status, its output in order, and its files.

    printed: pairs of OUT or ERR and a text. files: path, label in messages, error code and text of every file.
    ended: empty for a complete command; "interrupted" or "terminated", or why the command failed. where: the text of an
    interrupt, such as the last instruction.
    """

    status: int = 0
    printed: list[tuple[int, str]] = field(default_factory=list)
    files: list[tuple[str, str, str, str]] = field(default_factory=list)
    ended: str = ""
    where: str = ""

    def to_bytes(self, token: bytes) -> bytes:
        """Return the record between two tokens; the second token marks it as complete."""
        content = json.dumps(asdict(self)).encode()
        return token + len(content).to_bytes(_FRAME, "big") + content + token

    @classmethod
    def from_bytes(cls, data: bytes, token: bytes) -> Record | None:
        """Return the record that `to_bytes` made; None if the bytes are incomplete or have another origin."""
        if not (cls.is_complete(data, token) and data.startswith(token) and data.endswith(token)):
            return None
        return cls(**json.loads(data[len(token) + _FRAME : -len(token)]))

    @staticmethod
    def is_complete(data: bytes | bytearray, token: bytes) -> bool:
        """Return whether the bytes have the length that they announce."""
        head = len(token) + _FRAME
        announced = int.from_bytes(data[len(token) : head], "big")
        return len(data) >= head and len(data) == head + announced + len(token)


class _Printed(io.TextIOBase):
    """Stream of a command in the child; its texts become part of the record."""

    def __init__(self, number: int, record: Record, real: IO[str]) -> None:
        self._number, self._record = number, record
        self._real_encoding, self._is_terminal = getattr(real, "encoding", "utf-8") or "utf-8", real.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the stream to which the parent will print."""
        return self._real_encoding

    def isatty(self) -> bool:
        """Return whether the parent prints to a terminal."""
        return self._is_terminal

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Append a text to the record."""
        self._record.printed.append((self._number, text))
        return len(text)


class Judge:
    """Judging side of a child: its record, and the streams of the kernel.

    Output to `progress` is shown at once. With `captures`, only the kernel writes to descriptors 1 and 2, so they can
    be muted.
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
    """Make this process the child of a command: the command's output goes to the judge's record from now on."""
    global _judge
    _judge = judge
    sys.stdout, sys.stderr = judge.printed_out, judge.printed_err


def is_child() -> bool:
    """Return whether this process is the child of a command."""
    return _judge is not None


def progress_stream() -> IO[str]:
    """Return the stream for progress: stderr, also where a child collects the command's messages."""
    return sys.stderr if _judge is None else _judge.progress


def keep_file(path: str, label: str, code: str, text: str) -> None:
    """Put a file into the record of this child, so that the parent writes it; messages call it `label`."""
    assert _judge is not None
    _judge.record.files.append((path, label, code, text))


def leave_if_copied() -> None:
    """End this process if a fork in the kernel copied it: only the child itself continues with the command."""
    if _judge is not None and os.getpid() != _judge.process:
        os._exit(0)


@contextmanager
def user_output(to_stderr: bool) -> Iterator[None]:
    """Run code of the user with the streams that it would have without a child.

    With `to_stderr`, its stdout is stderr, so that stdout has only the report.
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
def ending_after(seconds: float | None) -> Iterator[None]:
    """End this child with SIGALRM where the block takes longer than `seconds`; without a child, no limit is kept."""
    if _judge is None or seconds is None:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def muted() -> Iterator[None]:
    """Drop what the kernel prints, also from compiled libraries, where a child captures it."""
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


def shown_once(function: Function) -> Function:
    """Return a function whose output is shown on its first call only; later calls are muted."""
    called = False

    def call(*args: Any, **keywords: Any) -> Any:
        nonlocal called
        with muted() if called else nullcontext():
            called = True
            return function(*args, **keywords)

    return call  # type: ignore[return-value]
