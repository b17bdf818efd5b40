"""The child process of commands on a kernel by name: a missing record is never a verdict.

Tests of what a command says call it in this process; here one test for each command starts its child.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from nkw.child import Record
from simulate.bundle.entries import DEVICE
from simulate.cli import main
from tests.interruptible import ROOT, started, stopped

KERNELS = """
import os, sys, threading, time
import nki
import nki.isa as nisa
import nki.language as nl

PARAMETERS = (("columns", 32, (32, 16)),)


def copied(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=nl.load(x))
    return out


def prints(x):
    print("printed by the kernel")
    os.write(1, b"written by the kernel\\n")
    return copied(x)


def floods(x):
    os.write(1, b"y" * 200_000)
    return copied(x)


def leaves(x):
    os._exit(0)


def exits(x):
    sys.exit(0)


def ends_generator(x):
    raise GeneratorExit


def crashes(x):
    os.kill(os.getpid(), 9)


def hangs(x):
    copied(x)
    while True:
        pass


def allocates(x):
    return [bytearray(2**24) for _ in range(1000)] and copied(x)


def misspelt(x):
    return copide(x)


def forks(x):
    if os.fork() == 0:
        print("by the copy")
    return copied(x)


def starts_a_process(x):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    return copied(x)


def closes_descriptors(x):
    os.closerange(3, 64)
    for number in range(3, 64):
        os.open(os.environ["VICTIM"], os.O_WRONLY)
    return copied(x)


def ends_soon(x):
    threading.Timer(0.0, os._exit, [0]).start()
    time.sleep(600)
    return copied(x)


def debugged(x):
    breakpoint()
    return copied(x)


def tuned(x, tuning=None):
    if tuning["columns"] == 16:
        os._exit(0)
    return copied(x)


def tuned_by_none(x, tuning=None):
    os._exit(0)


def reference(x):
    return x


def exiting_reference(x):
    sys.exit(0)


def leaving_reference(x):
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "k.py"
    path.write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    return path


class Done(NamedTuple):
    """The end of a command: its exit status, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Ran = Callable[..., Done]


@pytest.fixture
def ran(capfd: pytest.CaptureFixture[str]) -> Ran:
    """Return a function that runs a command, whose child is a fork of this process."""

    def run(*words: str) -> Done:
        capfd.readouterr()
        return Done(main(words, is_process=True), *capfd.readouterr())

    return run


@pytest.fixture
def verified(ran: Ran) -> Ran:
    """Return a function that runs `verify` on a kernel of k.py, by default against `reference` of k.py."""

    def run(kernel: str, *words: str) -> Done:
        reference = [] if "--reference" in words else ["--reference", "k.py:reference"]
        return ran("verify", f"k.py:{kernel}", "f32[8,32]", *reference, *words)

    return run


def started_as_a_user(*words: str) -> subprocess.CompletedProcess[str]:
    """Start a command as a process, with a stdin that is no terminal."""
    command = [sys.executable, "-m", "simulate", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "kernel"),
    [
        ("verify", "leaves"),
        ("check", "crashes"),
        ("time", "leaves"),
        ("memory", "leaves"),
        ("run", "leaves"),
        ("tune", "tuned_by_none"),
        ("bundle", "leaves"),
    ],
)
def test_a_command_whose_child_ends_has_no_verdict(
    command: str, kernel: str, tmp_path: Path, ran: Ran
) -> None:
    more = {"bundle": ["--out", "folder"], "verify": ["--reference", "k.py:reference"]}.get(command, [])
    done = ran(command, f"k.py:{kernel}", "f32[8,32]", *more, "--json", "out.json")
    how = "by signal 9 (SIGKILL)" if kernel == "crashes" else "exited with status 0 before its verdict"
    assert done.returncode == 3 and f"error: no verdict on k.py:{kernel}: the process " in done.stderr
    assert how in done.stderr and done.stdout == ""
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["schema"], told["command"], told["outcome"]) == (1, command, "none")
    assert how in told["reason"] and len(told) == 4
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
def test_calibrate_has_no_result_if_a_measured_kernel_ends_the_process(tmp_path: Path, ran: Ran) -> None:
    entry = {
        "id": "a",
        "family": "kernel",
        "kernel": "k.py:leaves",
        "shapes": "f32[8,32]",
        "dtype": "float32",
    }
    entry |= {"target": "trn2", "latency_us": 3.0, "measured": DEVICE}
    (tmp_path / "measured.json").write_text(json.dumps([entry]))
    done = ran("calibrate", "measured.json", "--json", "-")
    assert done.returncode == 3 and "error: no verdict on calibrate: the process exited" in done.stderr
    assert json.loads(done.stdout)["outcome"] == "none"


SCRIPT = """
import os, sys
import nki
import numpy as np
from k import copied, leaves
print("printed by the script")
{}
"""


@pytest.mark.parametrize("command", ["check", "memory"])
@pytest.mark.parametrize("line", ["os._exit(0)", "nki.simulate(leaves)(np.zeros((8, 32), np.float32))"])
def test_a_script_that_ends_the_process_is_no_pass(command: str, line: str, tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "s.py").write_text(SCRIPT.format(line))
    done = ran(command, "--json", "out.json", "s.py")
    assert done.returncode == 3
    assert "error: no verdict on s.py: the process exited with status 0 before its verdict" in done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["outcome"], set(told) & {"launches", "findings"}) == ("none", set())


FORKS = """
import multiprocessing
x = np.zeros((8, 32), np.float32)
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply(nki.simulate(copied), (x,)).shape == (8, 32)
nki.simulate(copied)(x)
"""


@pytest.mark.parametrize("command", ["check", "memory"])
def test_processes_that_a_script_forks_launch_kernels(command: str, tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "s.py").write_text(SCRIPT.format(FORKS))
    done = ran(command, "--json", "out.json", "s.py")
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "out.json").read_text())["launches"]) == 1


@pytest.mark.parametrize("command", ["check", "memory"])
def test_a_script_that_returns_has_its_verdict(command: str, tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "s.py").write_text(SCRIPT.format("nki.simulate(copied)(np.zeros((8, 32), np.float32))"))
    done = ran(command, "--json", "out.json", "s.py")
    assert done.returncode == 0 and "printed by the script" in done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["outcome"] == "complete"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["exits"], "[NKW-EXIT] the kernel exits called sys.exit(0) before it returned"),
        (["misspelt"], "name 'copide' is not defined"),
        (["prints", "--reference", "k.py:exiting_reference"], "the reference called sys.exit(0)"),
        (["prints", "--reference", "k.py:leaving_reference"], "exited with status 0 before its verdict"),
        (
            ["hangs", "--time-limit", "1"],
            "it reached the time limit of 1 s (--time-limit)",
        ),
        (["allocates", "--memory-limit", "512M"], "MemoryError"),
        (["closes_descriptors"], "exited with status 1 before its verdict"),
        (["ends_soon"], "exited with status 0 before its verdict"),
    ],
)
def test_verify_says_why_it_has_no_verdict(
    words: list[str], reason: str, tmp_path: Path, verified: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "victim").write_text("kept")
    monkeypatch.setenv("VICTIM", str(tmp_path / "victim"))
    done = verified(*words, "--json", "-")
    assert done.returncode == 3
    told = json.loads(done.stdout)
    assert told["outcome"] == "none" and reason in told["reason"] and reason in done.stderr
    assert (tmp_path / "victim").read_text() == "kept"


@pytest.mark.slow
def test_a_right_kernel_keeps_its_verdict_and_its_output_is_shown_once(tmp_path: Path, verified: Ran) -> None:
    done = verified("prints", "--json", "out.json")
    assert done.returncode == 0
    written, _, report = done.stdout.partition("\n")
    assert written == "written by the kernel" and report.startswith("prints on trn2: right, clean, ")
    assert done.stderr == "target trn2\nprinted by the kernel\n"
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["outcome"] == "complete" and told["right"]
    to_stdout = verified("prints", "--json", "-")
    assert json.loads(to_stdout.stdout) == told and "written by the kernel\n" in to_stdout.stderr


@pytest.mark.slow
def test_output_is_cut_after_64_kib(verified: Ran) -> None:
    done = verified("floods", "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["right"]
    assert done.stderr.count("y" * 1000) == 65 and f"{200_000 - 65_536:,} bytes more" in done.stderr


@pytest.mark.slow
def test_a_copy_of_the_child_does_not_go_on_with_the_trials(verified: Ran) -> None:
    done = verified("forks")
    assert done.returncode == 0
    assert done.stdout.count("forks on trn2: right") == 1 and done.stderr.count("by the copy") <= 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no reaper of descendants")
def test_processes_of_the_kernel_end_with_it(tmp_path: Path, ran: Ran) -> None:
    done = ran("run", "k.py:starts_a_process", "f32[8,32]")
    assert done.returncode == 0
    folders = {process.name: _folder_of(process) for process in Path("/proc").glob("[0-9]*")}
    assert [name for name, folder in folders.items() if folder == str(tmp_path)] == [str(os.getpid())]


def _folder_of(process: Path) -> str:
    """Return the working folder of a process; empty for a process that has gone."""
    try:
        return os.readlink(process / "cwd")
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit(0)", "import no_such_module"])
def test_a_file_that_ends_at_its_import_gives_no_verdict(code: str, tmp_path: Path, verified: Ran) -> None:
    (tmp_path / "k.py").write_text(f"{code}\n")
    done = verified("prints", "--json", "-")
    assert done.returncode == 3 and json.loads(done.stdout)["outcome"] == "none"


@pytest.mark.slow
def test_a_candidate_whose_process_ends_is_a_failed_candidate(ran: Ran) -> None:
    pytest.importorskip("optuna")
    done = ran("tune", "k.py:tuned", "f32[8,32]", "--jobs", "1", "--reading", "program", "--json", "-")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["outcome"] == "complete"
    assert "ended with status 0" in done.stderr + done.stdout


def test_sys_exit_in_a_launch_of_a_script_is_status_3(tmp_path: Path, ran: Ran) -> None:
    call = "\nimport numpy as np\nnki.jit({})(np.ones((8, 32), np.float32))\n"
    for kernel, status in (("exits", 3), ("copied", 0)):
        (tmp_path / "script.py").write_text(KERNELS + call.format(kernel))
        for command in ("run", "time"):
            done = ran(command, "script.py")
            assert done.returncode == status
            assert ("[NKW-EXIT] the kernel exits called sys.exit(0)" in done.stderr) == (status == 3)
    (tmp_path / "script.py").write_text("raise SystemExit(5)\n")
    with pytest.raises(SystemExit, match="5"):
        ran("run", "script.py")


@pytest.mark.slow
def test_the_debugger_has_the_terminal(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    words = ["run", "k.py:debugged", "f32[8,32]"]
    running = subprocess.Popen(
        [sys.executable, "-m", "simulate", *words], stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown = b""
    answered = False
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        shown += chunk
        if b"(Pdb)" in shown and not answered:
            answered = True
            os.write(leader, b"p x.shape\nc\n")
    os.close(leader)
    assert running.wait() == 0
    assert b"(8, 32)" in shown and b"debugged on trn2" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_signals_end_the_child_and_keep_their_statuses(
    number: signal.Signals, word: str, tmp_path: Path
) -> None:
    waits = "\n\ndef waits(x):\n    copied(x)\n    os.write(1, b'ready\\n')\n    time.sleep(600)\n"
    (tmp_path / "k.py").write_text(KERNELS + waits)
    words = ["run", "--json", str(tmp_path / "out.json"), f"{tmp_path}/k.py:waits", "f32[8,32]"]
    status, err = stopped(started("-m", "simulate", *words), number)
    assert status == 128 + number
    assert f"\n{word}: waits has issued 2 instructions, the last is dma_copy at " in err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_a_child_without_fork_gives_the_same_verdict() -> None:
    program = (
        "import sys, threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); "
        "from simulate.cli import main; sys.exit(main(is_process=True))"
    )
    words = ["verify", "k.py:prints", "f32[8,32]", "--reference", "k.py:reference"]
    spawned = subprocess.run(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    forked = started_as_a_user(*words)
    assert (spawned.returncode, spawned.stdout) == (0, forked.stdout)


@pytest.mark.slow
def test_usage_errors_stay_2_and_write_nothing(tmp_path: Path, ran: Ran) -> None:
    for words in (
        ["k.py:nothing"],
        ["k.py:prints", "f33[8]"],
        ["k.py:prints", "f32[8,32]", "--reference", "k:"],
    ):
        done = ran("verify", *words, "--json", "out.json")
        assert done.returncode == 2 and "error: " in done.stderr and done.stdout == ""
    assert not (tmp_path / "out.json").exists()


def test_a_limit_is_refused_beside_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text("print('ran')\n")
    with pytest.raises(SystemExit) as left:
        main(["run", "--time-limit", "5", "script.py"])
    assert left.value.code == 2
    assert (
        "[NKW-CHILD-LIMIT] --time-limit limits a kernel by name, and script.py is a script"
        in capsys.readouterr().err
    )
    assert main(["run", "script.py"]) == 0
    assert main(["run", "k.py:copied", "f32[8,32]", "--time-limit", "5", "--memory-limit", "8G"]) == 0


@pytest.mark.parametrize(
    ("option", "text", "taken"),
    [
        ("--time-limit", "0", False),
        ("--time-limit", "0.1", True),
        ("--time-limit", "nan", False),
        ("--memory-limit", "1M", True),
        ("--memory-limit", "1023k", False),
        ("--memory-limit", "1.5GiB", True),
        ("--memory-limit", "-1G", False),
        ("--memory-limit", "much", False),
    ],
)
def test_limits_are_positive_numbers(option: str, text: str, taken: bool) -> None:
    try:
        status = main(["run", "k.py:copied", "f32[8,32]", f"{option}={text}"])
    except SystemExit as left:
        status = left.code  # type: ignore[assignment]
    assert status == (0 if taken else 2)


def test_a_record_is_complete_or_none() -> None:
    record = Record(1, [(1, "text é \ud800"), (2, "")], [("a", "page", "NKW-PAGE-PATH", "x")], "", "")
    token = b"0123456789abcdef"
    data = record.to_bytes(token)
    again = Record.from_bytes(data, token)
    assert again is not None and (again.status, [tuple(line) for line in again.printed]) == (
        1,
        record.printed,
    )
    for cut in range(len(data)):
        assert Record.from_bytes(data[:cut], token) is None
    assert Record.from_bytes(data + b"x", token) is None
    assert Record.from_bytes(b"x" + data, token) is None
    assert Record.from_bytes(data, token[::-1]) is None
    assert Record.from_bytes(data[:-1] + b"?", token) is None
