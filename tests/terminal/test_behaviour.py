"""Every verb of `nkw` on a terminal of 80 columns, with NO_COLOR, into a closed pipe, and interrupted."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nkw.verbs import SIMULATOR_VERBS
from tests.calibrate.measured import SMALL, entries
from tests.deep import deep_except
from tests.interruptible import ROOT, started, stopped
from tests.profile.test_profile_text import SCRIPT
from tests.terminal.test_terminal import ESCAPE, environment, on_a_terminal, width

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
WITH_FOLDERS = ("fidelity", "bundle", "compare")  # their examples need a folder, or that there is none
EXAMPLES = {
    verb: shlex.split(description.example)
    for verb, description in SIMULATOR_VERBS.items()
    if verb not in WITH_FOLDERS
}
EXAMPLES["plan"] = ["plan", str(ROOT / "model" / "pretrained"), "--tp", "2"]
EXAMPLES["time --sweep"] = ["time", "script.py:doubled", "f32[128,N]", "--sweep", "N=64,60000"]
EXAMPLES["memory --sweep"] = ["memory", *EXAMPLES["time --sweep"][1:]]
EXAMPLES["generate"] = ["generate", "--max-new-tokens", "2", "--backend", "numpy"]

WAITS = """import os, time
import nki, nki.isa as nisa, nki.language as nl

@nki.jit
def kernel(x):
    if x.shape[1] == 2:
        os.write(1, b"ready\\n")
        time.sleep(600)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x)
    return out
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    if "calibrate" in request.node.name:
        (tmp_path / "measured.json").write_text(json.dumps(entries(SMALL, {})))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def nkw(*words: str) -> list[str]:
    return [sys.executable, "-m", "nkw", *words]


@pytest.mark.slow
@pytest.mark.parametrize("verb", deep_except(EXAMPLES, ("time", "generate")))
def test_a_terminal_of_80_columns_and_no_color_are_respected(verb: str) -> None:
    shown, plain = (on_a_terminal(nkw(*EXAMPLES[verb]), **set_) for set_ in ({}, {"NO_COLOR": "1"}))
    # Progress is drawn before a carriage return.
    lines, kept = (
        [line.rpartition("\r")[2].rstrip() for line in ESCAPE.sub("", text).split("\n")]
        for text in (shown, plain)
    )
    # After the line of the target a script prints what it likes.
    assert max(map(width, lines[1:] if verb == "run" else lines)) <= 80
    assert COLOUR.search(plain) is None
    assert kept == lines


@pytest.mark.slow
@pytest.mark.parametrize("verb", deep_except(EXAMPLES, ("run", "time", "generate")))
def test_a_closed_pipe_ends_a_verb_quietly(verb: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    running = subprocess.Popen(nkw(*EXAMPLES[verb]), stdout=writer, stderr=subprocess.PIPE, env=environment())
    os.close(writer)
    err = running.communicate()[1].decode()
    assert running.returncode in (0, 1)
    assert "Traceback" not in err and "Exception" not in err and "error" not in err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(("verb", "picture"), [("time", "--html"), ("memory", "--svg")])
def test_an_interrupted_sweep_leaves_one_line_and_no_file(
    verb: str, picture: str, ranks: str, tmp_path: Path
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    before = set(tmp_path.iterdir())
    outputs = ["--json", str(tmp_path / "sweep.json"), picture, str(tmp_path / "sweep")]
    words = [verb, "--target", "trn2", "--ranks", ranks, f"{tmp_path}/waits.py:kernel", "f32[128,N]"]
    status, err = stopped(started("-m", "nkw", *words, "--sweep", "N=1,2,3", *outputs))
    assert (status, err) == (130, "target trn2\n\nnkw: interrupted: kernel has issued nothing\n")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "time", "memory", "check", "verify"])
def test_an_interrupt_of_a_script_is_one_line(verb: str, tmp_path: Path) -> None:
    # `check` sends what a script prints to stderr, so the script writes to the descriptor of stdout.
    wait = "import os, time\nos.write(1, b'ready\\n')\ntime.sleep(600)\n"
    path = tmp_path / "waits.py"
    path.write_text(wait)
    status, err = stopped(
        started("-m", "nkw", verb, "--target", "trn2", f"{path}:k" if verb == "verify" else str(path))
    )
    assert (status, err) == (130, "target trn2\n\nnkw: interrupted\n")
