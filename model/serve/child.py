"""Child processes for replicas and predictions, which end silently if their parent ends at any point of their start."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from model.serve.child import run; "
    "run(int(sys.argv[2]))"
)
"""Program of a child, which imports modules from the folders of its parent, whatever the current folder contains."""


def start_child(
    target: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that calls `target(pipe, *arguments)`; return the process and the parent's end of the pipe.

    multiprocessing would print a traceback of the child if the parent ends before the child has read its call. The call
    is pickled and sent over a socket pair that only these two processes can open. If the child has already ended,
    nothing is raised here; the first read from the pipe raises EOFError or OSError.

    Args:
        target: Function of an importable module.
        *arguments: Its further arguments, which are pickled.
        environment: Environment variables of the child; by default those of the parent.
    """
    near, far = multiprocessing.Pipe()
    path = json.dumps([folder or os.getcwd() for folder in sys.path])
    with far:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, path, str(far.fileno())],
            pass_fds=(far.fileno(),),
            env=environment,
        )
    with suppress(OSError):  # the child has ended; the reader of the pipe notices
        near.send_bytes(pickle.dumps((target, arguments)))
    return process, near


def run(descriptor: int) -> None:
    """Call the function that the parent sends first over the pipe; return without a call if the parent ends before.

    Args:
        descriptor: File descriptor of the child's end of the pipe.
    """
    pipe = Connection(descriptor)
    try:
        target, arguments = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return
    target(pipe, *arguments)
