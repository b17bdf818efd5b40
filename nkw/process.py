"""Process of a command: standard streams, signals, resource limits, and forks for untrusted work."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper, UnsupportedOperation
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143
"""Exit statuses, as shells count them: 128 and the number of SIGINT or SIGTERM."""

# OpenBLAS, which numpy multiplies with, lets idle threads spin for 2**26 cycles: on busy cores, or between the small
# products of a simulated kernel, they take the time of the thread that works. It reads the variable when it is loaded.
_SPIN_VARIABLE, _LEAST_SPIN = "OPENBLAS_THREAD_TIMEOUT", "4"


SECONDS_MAX = 1e7
"""Upper bound of time limits in options, 116 days."""


def parse_seconds(text: str) -> float:
    """Return the number of seconds that the text of an option gives.

    Raises:
        argparse.ArgumentTypeError: The text is no number, or the number is not above 0 and below SECONDS_MAX.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number of seconds; give more than 0")
    return seconds


@contextmanager
def disable_collector() -> Iterator[None]:
    """Disable the garbage collector in the block, for code that creates many lasting objects without cycles.

    A collector that was disabled before stays disabled.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that unfinished files are removed as after an interrupt."""


def begin(prefix: str = "") -> None:
    """Prepare the process of a command before its imports.

    An interrupt during imports ends the process with one line. Closed standard streams are replaced by empty ones, so
    that files of the command do not get their descriptors. OpenBLAS is told to let idle threads sleep.

    Args:
        prefix: Beginning of messages on stderr.

    Raises:
        SystemExit: Stdout is closed (status 2).
    """
    os.environ.setdefault(_SPIN_VARIABLE, _LEAST_SPIN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: leave(KeyboardInterrupt(), prefix))
    stdout_is_closed = sys.stdout is None
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115
    if stdout_is_closed:
        print(f"{prefix}error: the output cannot be written: stdout is closed", file=sys.stderr)
        sys.exit(2)


def replace_unprintable() -> None:
    """Make stdout print `?`, from now on, for characters that its encoding lacks.

    Nothing changes if stdout is not a text file.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def reopen_streams() -> None:
    """Reopen stdout and stderr if a script has closed them; without a usable stderr its output is dropped."""
    for stream, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, stream).closed:
            with suppress(OSError):
                setattr(sys, stream, open(number, "w", closefd=False))  # noqa: SIM115
    try:
        os.fstat(sys.stderr.fileno())
    except UnsupportedOperation:  # a stream that is no file
        pass
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def imported() -> None:
    """Set the signal handlers of a command after its imports: SIGINT raises KeyboardInterrupt, SIGTERM `Terminated`.

    A signal that was ignored when this process started stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


@contextmanager
def remember_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises the last interrupt of the block again, or returns if there was none.

    NumPy drops an interrupt that arrives while it looks up an attribute, so the caller asks after such calls. SIGINT
    and SIGTERM have their own handlers in the block. Handlers that were set outside of Python are not replaced.
    """
    came: list[KeyboardInterrupt] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        came.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise came[-1]

    def check() -> None:
        if came:
            raise came[-1]

    before = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in before:
        signal.signal(number, interrupted)
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(stopped: KeyboardInterrupt, prefix: str = "") -> NoReturn:
    """Print what ended the command, and end this process at once with status 130 or 143.

    A normal exit would join threads of cores, which may wait forever.

    Args:
        stopped: The interrupt; its arguments are printed.
        prefix: Beginning of the message on stderr.
    """
    terminated = isinstance(stopped, Terminated)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        words = ["terminated" if terminated else "interrupted", *map(str, stopped.args)]
        print(f"\n{prefix}{': '.join(words)}", file=sys.stderr, flush=True)
    os._exit(TERMINATED if terminated else INTERRUPTED)


@dataclass(frozen=True)
class Limits:
    """CPU seconds and bytes of address space that a process may use in addition to what it has used already."""

    cpu_seconds: int
    memory_bytes: int

    def apply(self) -> None:
        """Set the limits on this process, and switch core dumps off; lower limits of the system stay."""
        import resource

        used = measure_address_space()
        for limit, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, int(time.process_time()) + self.cpu_seconds),
            (resource.RLIMIT_AS, used + self.memory_bytes),
        ):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))


def survives(action: Callable[[], object], limits: Limits) -> bool:
    """Call `action` in a fork of this process, under limits; return False if a signal ends the fork, and else True.

    Use it for libraries that abort their process on bad input. An exception counts as survival. The result is True, and
    nothing is called, if the system has no fork.
    """
    if not hasattr(os, "fork"):
        return True
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return not os.WIFSIGNALED(status)
    try:
        limits.apply()
        with quiet():
            action()
    finally:
        os._exit(0)  # whatever was raised, the caller's own call raises again


def run_in_fork(action: Callable[[], bytes], limits: Limits, most_bytes: int) -> bytes | None:
    """Call `action` in a fork of this process, under limits, and return its result.

    Use it for untrusted programs: their memory and changes end with the fork. If the system has no fork, `action` runs
    in this process without limits.

    Args:
        action: The function to call, which must catch its own exceptions.
        limits: Limits of the fork.
        most_bytes: Largest result; a longer result kills the fork.

    Returns:
        The result, or None if the fork fails, is killed or exceeds a limit.
    """
    if not hasattr(os, "fork"):
        return action()
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with open(reader, "rb") as pipe:
            answered = pipe.read(most_bytes + 1)
        if len(answered) > most_bytes:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        return answered if status == 0 else None
    done = 1
    try:
        os.close(reader)
        limits.apply()
        with quiet(), open(writer, "wb") as pipe:
            pipe.write(action())
        done = 0
    finally:
        os._exit(done)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what is written to descriptor 2 (stderr) in the block, also by compiled libraries."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def kill_orphans(spared: frozenset[int]) -> None:
    """Kill all children of this process except `spared`, and wait for their ends.

    On Linux these include orphans that this process has adopted from its descendants; elsewhere nothing happens.

    Args:
        spared: Process ids that stay.
    """
    while orphans := [process for process in list_children() if process not in spared]:
        for process in orphans:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process, 0)


def list_children() -> list[int]:
    """Return the ids of the processes whose parent is this process, also of those that have ended.

    The list is empty on systems other than Linux.
    """
    this_process, processes = os.getpid(), []
    if sys.platform != "linux" or not _has_children():
        return []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == this_process:
                    processes.append(int(name))
    return processes


def _has_children() -> bool:
    """Return whether any process, also one that has ended, has this process as its parent."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def memory_bytes() -> int:
    """Return the host's physical memory in bytes; 2**63 if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**63


def measure_resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    return _memory_map_bytes(1)


def measure_address_space() -> int:
    """Return the address space of this process in bytes, as RLIMIT_AS counts it; 0 if the system does not report it."""
    return _memory_map_bytes(0)


def _memory_map_bytes(column: int) -> int:
    """Return an entry of /proc/self/statm, which counts pages, in bytes; 0 if the file cannot be read.

    Args:
        column: 0 for the address space, 1 for resident memory.
    """
    with suppress(OSError, ValueError, AttributeError), open("/proc/self/statm", encoding="ascii") as pages:
        return int(pages.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
