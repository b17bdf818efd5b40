"""Child processes that end without a word if their parent is gone, at any point of their start."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from model.serve.child import run; "
    "run(int(sys.argv[2]))"
)
"""Modules are those of the parent, whatever the current folder contains."""


def start_child(target: Callable[..., None], *arguments: Any) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that calls `target(pipe, *arguments)`, and return it with the other end of the pipe.

    multiprocessing would print a traceback of the child if the parent ends before the child has read what to call.
    The call is pickled, and travels over a socket pair that no other process can open.
    """
    near, far = multiprocessing.Pipe()
    path = json.dumps([folder or os.getcwd() for folder in sys.path])
    with far:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, path, str(far.fileno())], pass_fds=(far.fileno(),)
        )
    with suppress(OSError):  # the child has ended; whoever reads from the pipe notices
        near.send_bytes(pickle.dumps((target, arguments)))
    return process, near


def run(descriptor: int) -> None:
    """Call what the parent sends first over the pipe. Return if the parent is gone before that."""
    pipe = Connection(descriptor)
    try:
        target, arguments = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return
    target(pipe, *arguments)
