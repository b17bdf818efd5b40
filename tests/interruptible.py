"""Starts and interrupts processes that react to SIGINT as they do in a user's terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

_PROGRESS = re.compile(r"^(prompt: layer|launches:) \d+ of \d+( done)?\n", re.MULTILINE)
ROOT = Path(__file__).resolve().parents[1]


def remove_progress(errors: str) -> str:
    """Return stderr text without lines of progress, which only appear if a command takes long."""
    return _PROGRESS.sub("", errors)


def started(*words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start Python with these arguments in the top folder of the repository, with its output in pipes.

    The process has the default handling of SIGINT, because a shell may have told background jobs to ignore it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def stopped(running: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
    """Send a signal to a process once it has printed the line `ready`, and return its exit status and its stderr."""
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(number)
    _, err = running.communicate()
    return running.returncode, err
