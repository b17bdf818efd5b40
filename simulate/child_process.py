"""The parent's side of a command's child process: start it, show what the kernel prints, and await its record.

The record (`nkw.child.Record`) holds exit status, output and files of the command; the child sends it when the
command has ended. A child that ends without one gives no verdict (`ChildEnded`).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

from nkw.child import Record
from nkw.process import Terminated, kill_orphans, list_children
from simulate.child_entry import ChildLimits, become_child, set_process_option

SHOWN_BYTES = 64 * 1024
"""The most output of a kernel that is shown where it is captured."""
_POLL_SECONDS = 0.05  # until the end of a child is noticed whose copies keep the pipes open
_GRACE_SECONDS = 5.0  # for a child that was told to end, or that has sent its record
_CHUNK = 65536
_SUBREAPER = 36  # an option of Linux' prctl


class ChildEnded(Exception):
    """Error for a child that ended without the record of a finished command; the message says how it ended.

    `record`, if set, is the record of what the command had printed until then.
    """


def run_in_child(
    act: Callable[[], int], again: Sequence[str], limits: ChildLimits, captures: bool, out_to_err: bool
) -> Record:
    """Run a command in a child process and return its record; afterwards no process that the child started is left.

    On Linux, the child is a fork of this process if this process has no other Python threads. Otherwise it is a new
    interpreter, which runs the code `again[0]` with the arguments `again[1:]`.

    Args:
        act: The command for a fork; it returns the exit status.
        again: Code and arguments with which a new interpreter runs the same command.
        limits: Limits of the child. After `limits.seconds` it gets SIGTERM, and five seconds later SIGKILL.
        captures: Whether the kernel's output goes through this process, which shows its first 64 KiB. The child then
            starts its own session; otherwise it shares terminal and process group of this process.
        out_to_err: Whether captured stdout is shown on stderr.

    Raises:
        ChildEnded: The child left no record, reached the time limit, or its command failed. The error has the
            attribute `record` if the child sent one.
        KeyboardInterrupt: This process or the child was interrupted or terminated. The child has ended.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    set_process_option(_SUBREAPER, 1)
    spared = frozenset(list_children())
    pipes = [os.pipe() for _ in range(3 if captures else 1)]
    token = os.urandom(16)
    if sys.platform == "linux" and threading.active_count() == 1:
        process = os.fork()
        if not process:
            become_child(act, pipes, token, limits)
    else:
        import subprocess  # takes some milliseconds

        writers = [writer for _, writer in pipes]
        arguments = json.dumps([writers, token.hex(), limits.memory_bytes])
        started = subprocess.Popen(
            [sys.executable, "-c", again[0], arguments, *again[1:]],
            pass_fds=writers,
            start_new_session=captures,
        )
        process = started.pid
    for _, writer in pipes:
        os.close(writer)
    awaited = _Awaited(process, [reader for reader, _ in pipes], token, limits, out_to_err)
    try:
        return awaited.record()
    finally:
        awaited.end(spared)


class _Awaited:
    """Running child process as its parent sees it: the pipes, the limits and the bytes of the record so far."""

    def __init__(
        self, process: int, readers: Sequence[int], token: bytes, limits: ChildLimits, out_to_err: bool
    ) -> None:
        self._process, self._token, self._limits = process, token, limits
        self._captures = len(readers) > 1
        self._data = bytearray()
        self._shown = self._dropped = 0
        self._status: int | None = None  # as os.waitpid returns it
        self._stopped: KeyboardInterrupt | None = None
        self._began = time.monotonic()
        self._terminated_at: float | None = None  # when SIGTERM was sent because of the time limit
        self._kill_at: float | None = None
        self._pipes = selectors.DefaultSelector()
        shown_on = (None, sys.stderr if out_to_err else sys.stdout, sys.stderr)
        for reader, stream in zip(readers, shown_on):
            os.set_blocking(reader, False)
            self._pipes.register(reader, selectors.EVENT_READ, stream)

    def record(self) -> Record:
        """Wait for the end of the child and return its record.

        Raises ChildEnded if the child left no record, reached the time limit, or its command failed;
        KeyboardInterrupt if this process or the child was interrupted or terminated.
        """
        while self._status is None:
            try:
                self._wait()
            except KeyboardInterrupt as stopped:
                self._stop(stopped)
        self._read(0.0)
        if self._dropped:
            shown = f"{SHOWN_BYTES // 1024} KiB"
            print(f"\n… the output is cut after {shown}; {self._dropped:,} bytes more", file=sys.stderr)
        record = Record.from_bytes(bytes(self._data), self._token) if self._status == 0 else None
        if self._stopped is not None:
            if record is not None and record.where:
                self._stopped.args = (record.where,)
            raise self._build_interrupt(record) from None
        if self._terminated_at is not None:
            last = f"; {record.where}" if record is not None and record.where else ""
            ended = ChildEnded(
                f"it reached the time limit of {self._limits.seconds:g} s (--time-limit){last}"
            )
            raise ended if record is None else _attach_record(ended, record)
        if record is None:
            raise ChildEnded(self._describe_end())
        if record.ended in ("interrupted", "terminated"):  # by a signal to the child alone
            alone = Terminated() if record.ended == "terminated" else KeyboardInterrupt()
            alone.args = (record.where,) if record.where else ()
            raise _attach_record(alone, record)
        if record.ended:
            raise _attach_record(ChildEnded(record.ended), record)
        return record

    def end(self, spared: frozenset[int]) -> None:
        """Kill the child and every process that it started, and close the pipes.

        Args:
            spared: Process ids of this process's other children, which are not killed.
        """
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._process, 0)
        if self._captures:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process, signal.SIGKILL)
        kill_orphans(spared)
        for key in list(self._pipes.get_map().values()):
            os.close(key.fd)
        self._pipes.close()

    def _build_interrupt(self, record: Record | None) -> KeyboardInterrupt:
        """Return the interrupt that this process received; a record becomes its attribute `record`."""
        assert self._stopped is not None
        return self._stopped if record is None else _attach_record(self._stopped, record)

    def _wait(self) -> None:
        """Do one round of waiting: read the pipes, reap the child if it has ended, and enforce the time limit.

        Waits at most 50 ms for output. A child that has sent its complete record has five seconds to end, then it is
        killed.
        """
        complete = Record.is_complete(self._data, self._token)
        self._read(0.0 if complete else _POLL_SECONDS)
        self._reap(_GRACE_SECONDS if complete else 0.0)
        now = time.monotonic()
        if self._status is None and self._kill_at is not None and now > self._kill_at:
            self._send(signal.SIGKILL)
        if self._status is not None or self._limits.seconds is None or self._stopped is not None:
            return
        if self._terminated_at is None and now - self._began > self._limits.seconds:
            self._terminated_at = now
            self._send(signal.SIGTERM)  # the child answers with the last instruction
            self._kill_at = now + _GRACE_SECONDS

    def _read(self, seconds: float) -> None:
        """Read all that the pipes have, waiting at most `seconds` for the first bytes.

        Bytes of the record are appended to it, bytes of the kernel's output are shown; a pipe at its end is closed.
        """
        for key, _ in self._pipes.select(seconds):
            while True:
                try:
                    data = os.read(key.fd, _CHUNK)
                except BlockingIOError:
                    break
                if not data:
                    self._pipes.unregister(key.fd)
                    os.close(key.fd)
                    break
                if key.data is None:
                    self._data += data
                else:
                    self._show(data, key.data)
                    break  # the other pipes have their turn

    def _show(self, data: bytes, stream: IO[str]) -> None:
        """Write captured bytes of the kernel to `stream`; beyond 64 KiB in total they are only counted."""
        visible = data[: SHOWN_BYTES - self._shown]
        self._shown += len(visible)
        self._dropped += len(data) - len(visible)
        if not visible:
            return
        if hasattr(stream, "buffer"):
            stream.buffer.write(visible)
        else:
            stream.write(visible.decode(errors="replace"))
        stream.flush()

    def _reap(self, seconds: float) -> None:
        """Store the child's exit status if the child ends within `seconds`.

        With `seconds` above 0, a child that has not ended by then is killed with SIGKILL; with 0 it is left running.
        """
        until = time.monotonic() + seconds
        while self._status is None:
            process, status = os.waitpid(self._process, os.WNOHANG)
            if process:
                self._status = status
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(0.001)
        if seconds and self._status is None:
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the child; does nothing if the child no longer exists."""
        with suppress(ProcessLookupError):
            os.kill(self._process, number)

    def _stop(self, stopped: KeyboardInterrupt) -> None:
        """Note the first interrupt or termination of this process and pass it on; a second one kills the child.

        A terminal sends an interrupt to parent and child alike, so it is passed on only if stdin is no terminal.
        After a termination the child has ten seconds to end.
        """
        if self._stopped is not None:
            self._send(signal.SIGKILL)
            return
        self._stopped = stopped
        if isinstance(stopped, Terminated):
            self._send(signal.SIGTERM)
            self._kill_at = time.monotonic() + 2 * _GRACE_SECONDS
        elif not sys.stdin.isatty():
            self._send(signal.SIGINT)

    def _describe_end(self) -> str:
        """Return, in words, the exit status or the signal with which the child ended."""
        assert self._status is not None
        if not os.WIFSIGNALED(self._status):
            code = os.waitstatus_to_exitcode(self._status)
            return f"the process exited with status {code} before its verdict, as os._exit does"
        number = os.WTERMSIG(self._status)
        if number == signal.SIGALRM:
            return f"the default parameters reached the time limit of {self._limits.seconds or 0:g} s (--time-limit)"
        why = "; the system may have run out of memory" if number == signal.SIGKILL else ""
        return f"the process was ended by signal {number} ({signal.Signals(number).name}){why}"


def _attach_record(error: Any, record: Record) -> Any:
    """Set the attribute `record` of an error to what the command had printed until then; returns the error."""
    error.record = record
    return error
