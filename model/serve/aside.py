"""A process beside the server's, of one thread, that answers questions.

The server has several threads, so its process cannot be copied safely: a lock that another thread holds would stay
locked in the copy. What makes copies of its process, or takes the interpreter for long, is done aside.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from model.errors import ModelError
from model.serve.child import start_child

_SECONDS = 60
"""For one question; the limits of a tokenizer and of a chat template end earlier."""


class Aside:
    """A process in which `make(*arguments)` makes what is called with questions; both are JSON, and so is the answer.

    One thread at a time asks.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        self._make = make
        self._arguments = arguments
        self._pipe, self._process = self._started()

    def ask(self, *question: Any) -> Any:
        """The process's answer. ModelError where the process raised one, or has ended; then a new one is started."""
        try:
            self._pipe.send_bytes(json.dumps(question).encode())
            if not self._pipe.poll(_SECONDS):
                raise EOFError
            found, value = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self.stop()
            self._pipe, self._process = self._started()
            raise ModelError("its process has ended") from None
        if not found:
            raise ModelError(value)
        return value

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _started(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        process, pipe = start_child(_run, self._make, self._arguments)
        return pipe, process


def _run(pipe: Connection, make: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    """The process: answers until its parent has gone. Signals to the whole group are the parent's to obey."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answer = make(*arguments)
    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        said: tuple[bool, Any]
        try:
            said = True, answer(*question)
        except ModelError as error:
            said = False, error.message
        pipe.send_bytes(json.dumps(said).encode())
