"""Child processes of the server end without a word if their parent is gone while they start."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.serve.child import _COMMAND, start_child
from tests.interruptible import started


def double(pipe: Connection, number: int) -> None:
    """Send twice a number."""
    pipe.send_bytes(json.dumps(2 * number).encode())


@pytest.mark.slow
def test_a_child_calls_what_it_was_started_for() -> None:
    process, pipe = start_child(double, 21)
    with pipe:
        assert json.loads(pipe.recv_bytes()) == 42
    assert process.wait() == 0


def test_a_child_whose_parent_is_gone_before_the_call_says_nothing() -> None:
    near, far = multiprocessing.Pipe()
    with far:
        command = [sys.executable, "-c", _COMMAND, json.dumps(sys.path), str(far.fileno())]
        child = subprocess.Popen(command, pass_fds=(far.fileno(),), stderr=subprocess.PIPE)
    near.close()
    assert child.communicate()[1] == b""
    assert child.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="no /proc on this system")
def test_replicas_whose_router_is_killed_while_they_start_say_nothing() -> None:
    router = started("-m", "nkw", "serve", "--port", "0", "--replicas", "2")
    children = Path(f"/proc/{router.pid}/task/{router.pid}/children")
    while len(children.read_text().split()) < 2:
        assert router.poll() is None
    router.kill()
    lines = router.communicate()[1].splitlines()  # the replicas share its stderr, so they have ended as well
    assert [line for line in lines if "INFO the predicted clock is" not in line] == []
