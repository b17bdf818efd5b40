"""Tasks of a worker process for tests of the pool: they wait, never end, take memory, crash, refuse."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from model.errors import ModelError


class OddTasks:
    """Tasks by name; `echo` returns its argument."""

    def __init__(self, fact: str) -> None:
        self.facts = {"fact": fact}

    def prepare(self, task: str) -> None:
        """Refuse one task before its job starts."""
        if task == "unprepared":
            raise ModelError("cannot be prepared", "NKW-MODEL-CHAT")

    def run(self, task: str, arguments: list[Any]) -> Any:
        """Run a task."""
        if task == "wait":
            Path(arguments[0] + f".{os.getpid()}").touch()
            while not os.path.exists(arguments[0]):
                time.sleep(0.005)
        elif task == "burn":
            while True:
                pass
        elif task == "grow":
            return len(bytes(arguments[0]))
        elif task == "crash":
            os.kill(os.getpid(), getattr(signal, arguments[0]))
        elif task == "refuse":
            raise ModelError("no", "NKW-MODEL-TOKENIZER")
        return [*arguments, os.getpid()]
