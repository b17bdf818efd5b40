"""What commands print on a terminal, into a pipe and as text: width, colour, alignment, progress."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from threading import Event
from unicodedata import east_asian_width

import pytest

from model.commands.generate.command import create_prompt_progress
from nkw.report import Hanging, Name, Noted, shorten_name, table
from nkw.terminal import progress, rendered, working
from simulate.kernel_by_name import InstructionCount, launch_by_name
from simulate.run.launch import Launch
from simulate.run.observers import Observer, observing
from tests.interruptible import remove_progress

SCRIPT = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(a, columns):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    a_tile_with_a_long_name = nl.load(a)
    for a_column_with_a_long_name_that_says_what_it_counts in nl.affine_range(columns):
        nisa.tensor_tensor(dst=a_tile_with_a_long_name, data1=a_tile_with_a_long_name, data2=a_tile_with_a_long_name, op=nl.add)
    nisa.dma_copy(dst=out[0:127], src=a_tile_with_a_long_name[0:127])
    return out


for columns in (1, 2):
    kernel(np.zeros((128, 64), np.float32), columns)
"""  # noqa: E501  (a line wider than a terminal is the point)

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def simulated(*words: str) -> list[str]:
    return [sys.executable, "-m", "simulate", *words]


def environment(**extra: str) -> dict[str, str]:
    named = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {name: value for name, value in os.environ.items() if name not in named}
    chosen = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "NKI_LEVEL": "0.6"}  # of that level is the script
    return {**kept, "TERM": "xterm-256color", **chosen, **extra}


def on_a_terminal(command: list[str], columns: int = 80, **extra: str) -> str:
    """Return what a command writes to a pseudo terminal, on stdout and stderr."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    running = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment(**extra), close_fds=True
    )
    os.close(follower)
    written = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        written += chunk
    os.close(leader)
    assert running.wait() in (0, 1)
    return written.decode().replace("\r\n", "\n")


def width(line: str) -> int:
    """Return columns of a terminal, without rich."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in line)


@pytest.fixture
def script(tmp_path: Path) -> str:
    folder = tmp_path / "a_folder_whose_name_is_long_enough_to_be_cut" / "模型的内核"
    folder.mkdir(parents=True)
    path = folder / "kernel_script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


COMMANDS = [["time"], ["memory"], ["check", "--orders", "2"]]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("columns", [60, 80, 100])
def test_nothing_is_wider_than_the_terminal(script: str, command: list[str], columns: int) -> None:
    shown = ESCAPE.sub("", on_a_terminal(simulated(*command, script), columns))
    report = [
        line.rpartition("\r")[2] for line in shown.split("\n")
    ]  # progress is drawn before a carriage return
    assert len(report) > 3
    assert max(map(width, report)) <= columns


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_pipe_gets_no_escape_codes_and_the_same_text_whatever_the_terminal(
    script: str, command: list[str]
) -> None:
    texts = []
    for columns in ("40", "200"):
        done = subprocess.run(
            simulated(*command, script), env=environment(COLUMNS=columns), capture_output=True, check=False
        )
        texts.append(done.stdout.decode())
        assert "\x1b" not in texts[-1] + done.stderr.decode()
    assert texts[0] == texts[1]
    if command[0] != "check":  # findings are lines for tools as well, and stay whole
        assert max(map(width, texts[0].split("\n"))) <= 80


@pytest.mark.slow
def test_no_color_leaves_the_words_and_takes_the_escape_codes(script: str) -> None:
    coloured = on_a_terminal(simulated("lint", script))
    plain = on_a_terminal(simulated("lint", script), NO_COLOR="1")
    assert re.search(r"^\x1b\[1;3[13]m(error|warning)\[NKI\d+\]\x1b\[0m ", coloured, re.MULTILINE)
    assert "\x1b" not in plain
    assert ESCAPE.sub("", coloured) == plain


@pytest.mark.slow
def test_an_error_is_red_on_a_terminal_alone() -> None:
    command = simulated("time", "nosuch.py")
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.stderr == "error: nosuch.py is not a file\n"
    shown = on_a_terminal([sys.executable, "-c", "from nkw.terminal import error; error('nothing is here')"])
    assert shown == "\x1b[1;31merror\x1b[0m: nothing is here\n"


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_and_gone_at_the_end() -> None:
    program = """
import sys, time
from nkw.terminal import progress
for number in progress(range(3), "launches"):
    time.sleep(0.6)
print("done")
"""
    shown = on_a_terminal([sys.executable, "-c", program])
    assert "launches" in shown
    assert shown.rstrip().endswith("done")
    assert "\x1b[2K" in shown  # the line is erased
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.stdout, remove_progress(done.stderr)) == ("done\n", "")


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(3), "launches", every=0)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "".join(f"launches: {done} of 3 done\n" for done in range(3)))
    assert list(progress(range(3), "launches", every=1e9)) == [0, 1, 2]
    assert list(progress(range(1), "launches", every=0)) == [0]
    assert capsys.readouterr() == ("", "")


def test_lines_of_progress_are_known_to_tests_that_expect_other_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(progress(range(2), "launches", every=0)) == [0, 1]
    show = create_prompt_progress(every=0)
    for done in range(1, 4):
        show(done, 3)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 5
    assert remove_progress(f"{errors}error: one\n{errors}") == "error: one\n"


def test_work_of_unknown_length_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    described = Event()

    def describe() -> str:
        described.set()
        return "kernel: 7 instructions"

    with working(describe, every=0.001):
        described.wait()
    err = capsys.readouterr().err
    assert err and err.replace("kernel: 7 instructions\n", "") == ""
    with working(describe, every=1e9):
        pass
    assert capsys.readouterr().err == ""


def test_work_that_stays_at_one_phase_prints_its_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    phases, ended = iter(["searching"] * 5 + ["serving"] * 5), Event()

    def describe() -> str:
        phase = next(phases, "")
        if not phase:
            ended.set()
        return phase or "serving"

    with working(describe, every=0.001):
        ended.wait()
    assert capsys.readouterr().err == "searching\nserving\n"


@pytest.mark.slow
def test_work_on_a_terminal_is_one_line_that_is_gone_at_the_end() -> None:
    program = """
from threading import Event
from nkw.terminal import working
asked = Event()
def said():
    asked.set()
    return "kernel " * 40
with working(said):
    asked.wait()
print("done")
"""
    shown = on_a_terminal([sys.executable, "-c", program])
    *told, end = shown.split("\r\x1b[K")
    assert set(told[1:]) == {("kernel " * 40)[:79]}
    assert end == "done\n"


def test_instructions_of_a_running_launch_are_counted() -> None:
    count, seen = InstructionCount(), []

    class After(Observer):
        def ran(self, launch: Launch) -> None:
            seen.append((count.instructions, len(launch.streams[0])))

    with observing(count), observing(After()):
        launch_by_name("nki_kernels:rmsnorm", ["f32[128,64]", "f32[1,64]", "1e-5"])
    ((counted, issued),) = seen
    assert counted == issued > 0


@pytest.mark.slow
def test_what_takes_long_to_load_is_not_loaded_before_it_is_needed() -> None:
    program = """
import sys
import simulate.cli, simulate.profile, simulate.occupancy, simulate.check, simulate.testing
simulate.install("simulate")
from nkw.terminal import error, show_lines
error("nothing"); show_lines("0 errors, 0 warnings\\n")
slow = {"rich", "importlib.metadata", "urllib.request", "numpy.ma.core"}
assert slow.isdisjoint(sys.modules), slow & {*sys.modules}
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "error: nothing\n")


def test_wide_characters_take_two_columns_and_numbers_stay_in_line() -> None:
    rows = [(Name(f"{name}.py:7"), "1.000", "2 %") for name in ("kernel", "模型的内核", "模型的内核_" * 9)]
    head, *lines = rendered([table("line|us|share", rows)]).splitlines()
    assert {width(line) for line in lines} == {80} == {width(head)}
    assert all(line.endswith("1.000    2 %") for line in lines)


def test_a_name_is_cut_at_its_front_whole_components_first() -> None:
    assert shorten_name("folder/kernel.py:12", 19) == "folder/kernel.py:12"
    assert shorten_name("folder/kernel.py:12", 18) == "kernel.py:12"
    assert shorten_name("folder/kernel.py:12", 12) == "kernel.py:12"
    assert shorten_name("folder/kernel.py:12", 11) == "…rnel.py:12"
    assert shorten_name("模型.py:1", 8) == "…型.py:1"


def test_a_table_takes_width_from_words_and_not_from_numbers() -> None:
    row = ("nki_kernels/" + "a" * 90 + ".py:3", "123,456.789", "waits for the tile " * 4)
    (line,) = rendered([table("", [row], left=(0, 2))]).splitlines()
    assert "123,456.789" in line
    assert line.startswith("nki_kernels/a") and line.count("…") == 2
    assert width(line) <= 80


def test_text_is_printed_as_it_is_written() -> None:
    words = "[bold]x[/bold] :smile: tile[0:127] \\[a]"
    assert (
        rendered([words, Hanging(words), table("", [(words, words)])])
        == f"{words}\n{words}\n{words}  {words}\n"
    )


def test_a_note_follows_its_row() -> None:
    noted = Noted(table("line|us", [("a", "1"), ("b", "20")]), ["x = 1", ""])
    assert rendered([noted]) == "line  us\na      1\n  x = 1\nb     20\n"


def test_a_sentence_hangs_under_its_beginning() -> None:
    lines = rendered([Hanging("word " * 40, 4)]).splitlines()
    assert len(lines) > 2
    assert lines[0].startswith("word") and all(line.startswith("    word") for line in lines[1:])
    assert max(map(len, lines)) <= 80
