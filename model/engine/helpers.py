"""Threads beside the engine's thread, for library calls that release the GIL and take unknown time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from model.workers.grammar import STACK_BYTES

_NICE = 5
"""Added to the niceness of these threads, where the system has one for each thread (Linux)."""


class HelperCall:
    """A call in a helper thread, and when it started."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.started: float | None = None
        self.is_abandoned = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._then: Callable[[], None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the call has returned or raised."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the call, at most so many seconds, and return whether it has ended."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """Return what the call returned, or raise what it raised; the call has to be done."""
        if self._error is not None:
            raise self._error
        return self._result

    def run(self, clock: Callable[[], float]) -> None:
        """Run the call in this thread."""
        self.started = clock()
        try:
            self._result = self.action()
        except BaseException as error:  # a panic of a library is no Exception
            self._error = error
        self._done.set()


class HelperThreads:
    """A fixed number of daemon threads that run calls in the order in which they come.

    A call that was abandoned goes on, because no library call can be interrupted, but another thread takes the place of
    its thread. The threads start at the first call.
    """

    def __init__(self, name: str, count: int, clock: Callable[[], float]) -> None:
        self._name = name
        self._count = count
        self._clock = clock
        self._calls: SimpleQueue[HelperCall] = SimpleQueue()
        self._ended = threading.Condition()
        self._started = 0

    def submit(self, action: Callable[[], Any]) -> HelperCall:
        """Let a call wait for a thread."""
        call = HelperCall(action)
        self._calls.put(call)
        while self._started < self._count:
            self._start()
            self._started += 1
        return call

    def abandon(self, call: HelperCall) -> None:
        """Replace the thread of a call that takes too long; the thread ends with the call."""
        if not call.is_abandoned:
            call.is_abandoned = True
            self._start()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds, which ends of calls can bring about, at most so many seconds."""
        with self._ended:
            self._ended.wait_for(condition, seconds)

    def _start(self) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        with suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + _NICE)
        while True:
            call = self._calls.get()
            call.run(self._clock)
            with self._ended:
                self._ended.notify_all()
            if call.is_abandoned:
                return
