"""Helper threads of the engine for library calls that release the GIL and take unknown time.

Grammars are compiled and grammar masks computed in these threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from model.workers.grammar import STACK_BYTES

_NICE = 5
"""Increment of the niceness of helper threads, on systems with a niceness of each thread (Linux)."""


class HelperCall(Future[Any]):
    """Future of a call in a helper thread.

    `started` is the clock's time at which a thread began the call, or None. `is_abandoned` tells whether callers have
    given up waiting.
    """

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__()
        self.action = action
        self.started: float | None = None
        self.is_abandoned = False

    def run(self, clock: Callable[[], float]) -> None:
        """Run the call in this thread, and set the future's result or exception.

        Args:
            clock: Returns the time in seconds.
        """
        self.started = clock()
        try:
            self.set_result(self.action())
        except BaseException as error:  # a panic of a library is no Exception
            self.set_exception(error)


class HelperThreads:
    """Fixed number of daemon threads that run calls in the order of their submission.

    An abandoned call continues, because no library call can be interrupted, but a new thread replaces its thread. The
    threads start at the first call.
    """

    def __init__(self, name: str, count: int, clock: Callable[[], float]) -> None:
        self._name = name
        self._count = count
        self._clock = clock
        self._calls: SimpleQueue[HelperCall] = SimpleQueue()
        self._ended = threading.Condition()
        self._started = 0

    def submit(self, action: Callable[[], Any]) -> HelperCall:
        """Queue a call for the next free thread, and return its future; the first call starts the threads."""
        call = HelperCall(action)
        self._calls.put(call)
        while self._started < self._count:
            self._start()
            self._started += 1
        return call

    def abandon(self, call: HelperCall) -> None:
        """Start a thread in place of the one whose call takes too long; the old thread ends with the call.

        Does nothing for a call that is abandoned already.
        """
        if not call.is_abandoned:
            call.is_abandoned = True
            self._start()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition is true or `seconds` have passed.

        The condition is evaluated at once and after each finished call.
        """
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
