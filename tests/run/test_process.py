"""The process of a command: closed streams, interrupts however early, terminations, and trials of libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nkw.process import Limits, memory_bytes, quiet, survives
from tests.interruptible import ROOT, started, stopped

PLAN = "-m model plan model/pretrained"


def shell(words: str, redirections: str) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} {words} {redirections}"
    return subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "prefix"), [("-m simulate targets", ""), (PLAN, "nkw: "), ("-m nkw targets", "nkw: ")]
)
def test_a_closed_stdout_is_named(words: str, prefix: str) -> None:
    done = shell(words, ">&-")
    message = f"{prefix}error: the output cannot be written: stdout is closed\n"
    assert (done.returncode, done.stderr) == (2, message)
    assert shell(words, ">&- 2>&-").returncode == 2


@pytest.mark.slow
def test_a_closed_stderr_is_no_obstacle() -> None:
    assert shell("-m simulate targets", "2>&-").stdout == shell("-m simulate targets", "").stdout
    assert shell(f"{PLAN} --tp 77", "2>&-").returncode == 2


@pytest.mark.parametrize(("module", "prefix"), [("simulate", ""), ("model", "nkw: "), ("nkw", "nkw: ")])
def test_an_interrupt_of_the_imports_is_one_line(tmp_path: Path, module: str, prefix: str) -> None:
    (tmp_path / "numpy.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = {"simulate": ["targets"], "model": ["plan", "model/pretrained"], "nkw": ["targets"]}[module]
    running = started("-m", module, *words, environment=environment)
    assert stopped(running) == (130, f"\n{prefix}interrupted\n")


@pytest.mark.parametrize(("number", "word"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_a_signal_leaves_no_unfinished_file(tmp_path: Path, number: signal.Signals, word: str) -> None:
    code = """
import os, sys, time
from pathlib import Path
vars(os).pop("O_TMPFILE", None)  # as on systems where an unfinished file has a name
from nkw.files import complete
from nkw.process import begin, imported, leave
begin()
imported()
try:
    with complete(sys.argv[1], "trace", "NKW-TRACE-PATH") as file:
        file.write("half")
        assert any(Path(sys.argv[1]).parent.iterdir())
        print("ready", flush=True)
        time.sleep(600)
except KeyboardInterrupt as stopped:
    leave(stopped)
"""
    running = started("-c", code, str(tmp_path / "file"))
    assert stopped(running, number) == (128 + number, f"\n{word}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_trial_survives_what_returns_or_raises() -> None:
    limits = Limits(cpu_seconds=5, memory_bytes=2**28)
    assert survives(lambda: None, limits)
    assert survives(lambda: 1 // 0, limits)


@pytest.mark.slow
def test_a_trial_does_not_survive_an_abort_or_an_endless_loop() -> None:
    limits = Limits(cpu_seconds=1, memory_bytes=2**28)

    def turn() -> None:
        while True:
            pass

    assert not survives(lambda: os.kill(os.getpid(), signal.SIGKILL), limits)
    assert not survives(turn, limits)


def test_in_quiet_nothing_reaches_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet():
        os.write(2, b"from a compiled library")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_this_machine_has_memory() -> None:
    assert 2**20 < memory_bytes() < 2**63
