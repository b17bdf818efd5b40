"""The command `time` with scripts that end early, options in the wrong place, and outputs that cannot be."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulate.cli import main
from tests.interruptible import started, stopped
from tests.profile.test_profile_text import SCRIPT

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise RuntimeError('the data is odd')", 1, "RuntimeError: the data is odd\n"),
    ],
)
@pytest.mark.parametrize("command", ["time", "memory"])
def test_a_script_that_ends_early_still_gets_its_report(
    command: str, end: str, status: int, message: str, script: Path, capsys: Capture
) -> None:
    script.write_text(f"{SCRIPT}\n{end}\n")
    assert main([command, "--target", "trn2", str(script)]) == status
    captured = capsys.readouterr()
    assert captured.out.startswith("doubled #0 on trn2")
    assert captured.err.startswith("target trn2\n")
    assert captured.err.endswith(message)
    assert ("Traceback" in captured.err) == ("RuntimeError" in message)
    assert "runpy" not in captured.err


def test_a_script_that_is_no_python_is_said_in_its_own_words(script: Path, capsys: Capture) -> None:
    script.write_text("def f(:\n")
    assert main(["time", "--target", "trn2", str(script)]) == 1
    err = capsys.readouterr().err
    assert "SyntaxError: invalid syntax" in err
    assert "cli.py" not in err


def test_options_after_a_kernel_are_options(script: Path, tmp_path: Path, capsys: Capture) -> None:
    html = tmp_path / "page.html"
    before = ["time", "--target", "trn1", "--reading", "serial", f"{script}:doubled", "f32[128,64]"]
    after = ["time", f"{script}:doubled", "--target", "trn1", "f32[128,64]", "--reading", "serial"]
    shown = []
    for words in (before, after):
        assert main(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert main([*after, "--html", str(html)]) == 0
    assert html.is_file()
    with pytest.raises(SystemExit) as left:
        main([*after[:-1], "hopeful"])
    assert left.value.code == 2
    assert "invalid choice: 'hopeful'" in capsys.readouterr().err


def test_options_after_a_script_are_refused_with_the_right_order(script: Path, capsys: Capture) -> None:
    script.write_text(f"import sys\nprint(sys.argv[1:])\n{SCRIPT}")
    for late, order in (
        (["--html", "page.html", "--size", "3"], f"--html page.html {script} --size 3"),
        (["3", "--text", "--size", "--target=trn1"], f"--text --target=trn1 {script} 3 --size"),
        (["--ranks", "2"], f"--ranks 2 {script}"),
        (["--target", "trn9"], f"--target trn9 {script}"),
        (["--html"], f"--html {script}"),
        (["--against", "old.json"], f"--against old.json -- {script}"),
        (["--against", "old.json", "--text", "3"], f"--against old.json --text {script} 3"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["time", "--target", "trn2", str(script), *late])
        assert left.value.code == 2
        assert capsys.readouterr() == (
            "",
            f"error: [NKW-OPTION-ORDER] options of time stand before the script: python -m simulate time {order}; "
            "to give them to the script, put -- after its name\n",
        )


def test_all_other_words_after_a_script_are_the_scripts(script: Path, capsys: Capture) -> None:
    script.write_text(f"import sys\nprint(sys.argv[1:])\n{SCRIPT}")
    for words, script_words in (
        (["--size", "3", "-v"], ["--size", "3", "-v"]),
        (["--", "--html", "page.html", "--target"], ["--html", "page.html", "--target"]),
        (["a", "--", "b"], ["a", "--", "b"]),
        (["--help"], ["--help"]),
    ):
        assert main(["time", "--target", "trn2", str(script), *words]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith(f"{script_words}\n")
        assert captured.err == "target trn2\n"


@pytest.mark.parametrize("command", ["run", "time", "memory", "check"])
def test_an_unknown_option_before_a_script_is_refused(command: str, script: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--size", str(script)])
    assert left.value.code == 2
    assert "there is no option --size" in capsys.readouterr().err


def test_no_file_takes_the_place_of_another_or_of_the_script(
    script: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = str(tmp_path / "out")
    for words, why in (
        (
            ["--html", str(script), str(script)],
            f"[NKW-PAGE-PATH] the page cannot be written to {script}: this command reads that file",
        ),
        (
            ["--trace", str(script), f"{script}:doubled", "f32[1,1]"],
            f"[NKW-TRACE-PATH] the trace cannot be written to {script}: this command reads that file",
        ),
        (
            ["--trace", out, "--html", out, str(script)],
            f"[NKW-PAGE-PATH] the page cannot be written to {out}: it is the file of the trace",
        ),
    ):
        assert main(["time", "--target", "trn2", *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {why}")
    assert script.read_text() == SCRIPT
    assert main(["time", "--target", "trn2", "--trace", out, "--html", f"{out}.html", str(script)]) == 0


def test_a_dry_launch_takes_arguments_larger_than_memory(tmp_path: Path, capsys: Capture) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        "import nki, nki.isa as nisa, nki.language as nl\n"
        "@nki.jit\n"
        "def first_rows(a, pieces=1):\n"
        "    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)\n"
        "    for i in range(pieces):\n"
        "        nisa.dma_copy(dst=out[256 * i : 256 * i + 128, :64], src=nl.load(a[:128, :64]))\n"
        "    return out\n"
    )
    words = ["time", "--target", "trn2", f"{kernel}:first_rows"]
    assert main([*words, f"f32[{1 << 30},{1 << 20}]"]) == 0
    assert "4503599627.370" in capsys.readouterr().out
    assert main([*words, f"f32[{1 << 30},{1 << 20}]", "pieces=100"]) == 3
    assert capsys.readouterr().err.endswith("needs more memory than this machine or --memory-limit allows\n")
    assert main([*words, "f32[99999999999,99999999999]"]) == 2
    assert capsys.readouterr().err.endswith("is larger than any memory; give smaller sizes\n")


def test_a_terminal_without_the_characters_gets_others(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = script.with_name("größe.py")
    named.write_text(SCRIPT)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["time", "--target", "trn2", str(named)]) == 0
    sys.stdout.flush()
    assert b"gr??e.py:" in written.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_report_that_cannot_be_written_is_one_sentence(script: Path) -> None:
    words = [sys.executable, "-m", "simulate", "time", "--target", "trn2", str(script)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "target trn2\nerror: the report cannot be written: No space left on device\n",
    )


KERNEL = """import nki, nki.isa as nisa, nki.language as nl, numpy as np, simulate

@nki.jit
def kernel(x):
    tile = nl.load(x)
    print('ready', flush=True)
    while True:
        {turn}

simulate.World("trn2", ranks={ranks}).launch(kernel, [((np.ones((4, 4), np.float32),), {{}})] * {ranks})
"""


def interrupted(script: Path, program: str, *command: str) -> tuple[int, str]:
    """Return status and stderr of a command that is interrupted once it has printed `ready`."""
    script.write_text(program)
    return stopped(started("-m", "simulate", *command, "--target", "trn2", str(script)))


@pytest.mark.slow
def test_an_interrupt_ends_at_once_in_one_word(script: Path) -> None:
    program = "print('ready', flush=True)\nwhile True: pass\n"
    assert interrupted(script, program, "time") == (130, "target trn2\n\ninterrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("turn", ["pass", "nisa.memset(tile, 0)"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_in_a_kernel_says_where_it_was(script: Path, turn: str, ranks: int) -> None:
    status, err = interrupted(script, KERNEL.format(turn=turn, ranks=ranks), "run")
    assert status == 130
    who = "" if ranks == 1 else " on rank 0, core 0,"
    last = f"dma_copy at {script}:5" if turn == "pass" else f"(memset at {script}:8|dma_copy at {script}:5)"
    pattern = rf"target trn2\n\ninterrupted: kernel{who} has issued [\d,]+ instructions, the last is {last} in kernel\n"
    assert re.fullmatch(pattern, err)


@pytest.mark.slow
def test_an_interrupt_that_the_thread_of_a_core_receives_ends_the_launch(script: Path) -> None:
    """The main thread waits meanwhile, and a wait without end would never learn of the interrupt."""
    interrupt = "__import__('signal').pthread_kill(__import__('threading').get_ident(), 2)"
    program = KERNEL.format(turn="pass", ranks=2).replace("print('ready', flush=True)", interrupt)
    script.write_text(program)
    running = started("-m", "simulate", "run", "--target", "trn2", str(script))
    _, err = running.communicate()
    assert running.returncode == 130 and "interrupted: kernel on rank 0, core 0, has issued" in err
