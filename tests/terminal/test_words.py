"""Words of a command line that people get wrong: unknown options, sizes as arguments, several files for lint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulate.cli import main

Capture = pytest.CaptureFixture[str]
KERNEL = """
import nki
import nki.language as nl


@nki.jit
def copied(x, NB=512):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out
"""


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return f"{path}:copied"


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("check", "--sarif", "; `check --help` lists its options"),
        ("verify", "--over", "; `verify --help` lists its options"),
        ("time", "--advise", "; did you mean --advice?"),
        ("time", "--advise=1", "; did you mean --advice?"),
        ("tune", "--trial", "; did you mean --trials?"),
    ],
)
def test_an_unknown_option_is_called_one(
    words: str, command: str, option: str, meant: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, words, "f32[8,4]", option])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.endswith(f"error: {command} has no option {option.partition('=')[0]}{meant}\n")


def test_numbers_below_zero_are_arguments_of_a_kernel(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    assert main(["run", f"{path}:copied", "f32[8,4]", "-1"]) == 0
    assert main(["run", f"{path}:copied", "f32[8,4]", "-1e-5"]) == 0


def test_tune_names_the_sweep_over_an_argument(words: str, capsys: Capture) -> None:
    assert main(["tune", words, "f32[8,4]"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert (
        "the file of copied declares no parameters; it needs a tuple PARAMETERS of rows (name, default, domain); its "
        "argument NB=512 is timed by `nkw time --sweep NB=128,256,512` with NB=NB"
    ) in message
    assert main(["time", "--sweep", "NB=128,256,512", words, "f32[8,4]", "NB=NB"]) == 0


def test_lint_takes_several_paths_and_reads_a_file_once(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "good.py").write_text(KERNEL)
    (tmp_path / "bad.py").write_text(KERNEL.replace("nl.load(x)", "nl.laod(x)"))
    report = tmp_path / "found.json"
    paths = [str(tmp_path / "good.py"), str(tmp_path / "bad.py"), str(tmp_path)]
    assert main(["lint", *paths, "--json", str(report)]) == 1
    document = json.loads(report.read_text())
    assert document["files"] == 2
    (finding,) = document["findings"]
    assert finding["message"].startswith("nl.laod does not exist. Rule: ")
    assert "try: nl.load" in capsys.readouterr().out
    assert main(["lint", str(tmp_path / "good.py"), str(tmp_path / "good.py")]) == 0
    assert main(["lint", str(tmp_path / "missing.py"), str(tmp_path / "good.py")]) == 1
    assert main(["lint", str(tmp_path / "missing.py")]) == 2


@pytest.mark.slow
def test_the_package_of_beta_1_adds_a_level_to_logging() -> None:
    code = (
        "import simulate; simulate.install('simulate'); import logging; assert not hasattr(logging, 'OFF'); "
        "import neuronxcc.nki; logging.disable(logging.OFF); print(logging.getLogger().isEnabledFor(logging.CRITICAL))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
