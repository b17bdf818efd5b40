"""The server ends under load, with one engine and with replicas: nothing hangs, nothing stays behind."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="openai is an extra of development (dev)")

from model.errors import ModelError
from model.serve.replicas import replica, replicas
from model.serve.replicas.replica import Replica
from nkw.commands import main
from tests.serve.test_ends import long_stream, wait_until
from tests.serve.test_replicas import Replicas, process

CLIENTS = 8


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    with suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return False


def signal_all(served: Replicas, number: signal.Signals) -> None:
    """Send a signal to the router and to its replicas, as a terminal or systemd does."""
    for pid in (*served.pids.values(), served.running.pid):
        os.kill(pid, number)


def left(served: Replicas, folder: Path) -> list[object]:
    """Return what an ended server left behind: processes, files, and the port if it cannot be bound."""
    leftovers: list[object] = [pid for pid in served.pids.values() if alive(pid)] + list(folder.iterdir())
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", served.port))
        except OSError:
            leftovers.append(served.port)
    return leftovers


@pytest.fixture(
    params=[
        pytest.param((1, signal.SIGINT), id="one engine", marks=pytest.mark.deep),
        pytest.param((2, signal.SIGTERM), id="two replicas"),
    ]
)
def loaded(request: Any, tmp_path: Path) -> Any:
    """Start a server and the streams of eight clients, wait for their first tokens, and send a signal."""
    replicas, number = request.param
    with process("--replicas", str(replicas), environment=os.environ | {"TMPDIR": str(tmp_path)}) as served:
        yield served, [long_stream(served.client(), max_tokens=16) for _ in range(CLIENTS)], number


@pytest.mark.slow
def test_a_signal_lets_the_streams_of_eight_clients_end(loaded: Any, tmp_path: Path) -> None:
    served, streams, number = loaded
    signal_all(served, number)
    assert [[event.choices[0].finish_reason for event in stream][-1] for stream in streams] == [
        "length"
    ] * CLIENTS
    served.running.communicate()
    assert served.running.returncode == 0
    assert left(served, tmp_path) == []


@pytest.mark.slow
def test_a_second_signal_cuts_the_streams_of_eight_clients_off(loaded: Any, tmp_path: Path) -> None:
    served, streams, number = loaded
    signal_all(served, number)

    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", served.port)) != 0

    wait_until(refused)
    signal_all(served, number)
    served.running.communicate()
    assert served.running.returncode == 128 + number
    for stream in streams:
        with suppress(Exception):  # the connection is gone; how the client says so is its own affair
            list(stream)
    wait_until(lambda: left(served, tmp_path) == [])


@pytest.mark.slow
def test_replicas_end_with_a_router_that_is_killed(tmp_path: Path) -> None:
    with process(environment=os.environ | {"TMPDIR": str(tmp_path)}) as served:
        long_stream(served.client())
        assert all(map(alive, served.pids.values())) and list(tmp_path.iterdir())
        served.running.kill()
        served.running.wait()
        wait_until(lambda: left(served, tmp_path) == [])


@pytest.mark.slow
def test_what_a_replica_refuses_is_said_as_by_one_server(tmp_path: Path, capsys: Any) -> None:
    captures = []
    for number in ("1", "2"):
        assert main(["serve", "--port", "0", "--model", str(tmp_path), "--replicas", number]) == 2
        captures.append(capsys.readouterr())
    assert captures[0] == captures[1]
    assert captures[0].err.startswith("nkw: error: ")


@pytest.mark.parametrize(("length", "fits"), [(89, True), (90, True), (91, False)])
def test_sockets_need_a_short_path(length: int, fits: bool) -> None:
    folder = "/" + "x" * (length - 1)
    if fits:
        replicas._check_path(folder)
    else:
        with pytest.raises(ModelError, match="set TMPDIR to another"):
            replicas._check_path(folder)


def test_pauses_before_a_start_grow_until_a_replica_lives_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses, forgotten = 0.0, [], []
    lives = iter([0.0] * 10 + [61.0, 59.0])
    sleep: Callable[[float], Any] = asyncio.sleep

    class Short(Replica):
        async def wait_until_ended(self) -> int | None:
            nonlocal now
            now += next(lives)
            self.up = False
            await sleep(0)
            return -9

        async def start(self) -> None:
            if len(pauses) == 3:
                raise ModelError("not now")
            self.up = True

    async def paused(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(replica.time, "monotonic", lambda: now)
    monkeypatch.setattr(replica.asyncio, "sleep", paused)
    short = Short(argparse.Namespace(), 0, Path("/tmp"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(short.supervise(lambda: forgotten.append(short.restarts)))
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 0.5, 1]
    assert short.restarts == len(forgotten) == 12
