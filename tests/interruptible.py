"""Processes of a test that take SIGINT as a user's do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

_PROGRESS = re.compile(r"^(prompt: layer|launches:) \d+ of \d+( done)?\n", re.MULTILINE)
ROOT = Path(__file__).resolve().parents[1]


def remove_progress(errors: str) -> str:
    """Return what a command wrote to stderr without lines of progress, which appear on a loaded machine alone."""
    return _PROGRESS.sub("", errors)


def started(*words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start Python with these words in the top folder, with its output in pipes.

    A shell may have told its background jobs to ignore SIGINT, and children inherit that; this one has the default.
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
    """Send a signal to a process after it prints the line `ready`; return its status and stderr."""
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    running.send_signal(number)
    _, err = running.communicate()
    return running.returncode, err
