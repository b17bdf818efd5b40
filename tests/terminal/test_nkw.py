"""The command `nkw`: the same verbs as `python -m simulate`, and files of users with the names of our packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nkw.commands import main as nkw
from nkw.errors import InvalidArgument
from nkw.verbs import SIMULATOR_VERBS
from simulate.cli import main as simulator
from simulate.shadows import check_names

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def ran(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a folder; `path` stands before the checkout on its path."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT))))},
        capture_output=True,
        text=True,
        check=False,
    )


def help_of(command: object, words: list[str], capsys: Capture) -> str:
    with pytest.raises(SystemExit) as left:
        command(words)  # type: ignore[operator]
    assert left.value.code == 0
    return capsys.readouterr().out


def test_both_command_lines_list_every_verb(capsys: Capture) -> None:
    for command, name in ((nkw, "nkw"), (simulator, "python -m simulate")):
        text = help_of(command, ["--help"], capsys)
        assert text.startswith(f"usage: {name} ")
        listed = re.findall(r"^    (\w+)\s+\S", text, re.MULTILINE)
        assert [name for name in listed if name in SIMULATOR_VERBS] == list(SIMULATOR_VERBS)


@pytest.mark.parametrize("verb", [verb for verb in SIMULATOR_VERBS if verb != "fidelity"])
def test_the_help_of_a_verb_names_the_command_line_it_was_asked_on(verb: str, capsys: Capture) -> None:
    ours = help_of(nkw, [verb, "--help"], capsys)
    theirs = help_of(simulator, [verb, "--help"], capsys)
    assert ours.startswith(f"usage: nkw {verb} ")
    assert theirs.startswith(f"usage: python -m simulate {verb} ")
    assert f"\n  nkw {SIMULATOR_VERBS[verb].example}\n" in ours
    assert f"\n  python -m simulate {SIMULATOR_VERBS[verb].example}\n" in theirs
    assert ours.split("\n\n")[1:2] == theirs.split("\n\n")[1:2]
    assert max(map(len, (ours + theirs).splitlines())) <= 80


def test_a_verb_prints_and_returns_the_same_on_both(tmp_path: Path, capsys: Capture) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import nki\n@nki.jit\ndef k(a):\n    yield a\n")
    for words in (["explain", "NKW-UNWRITTEN"], ["explain", "NKW-NONE"], ["lint", str(wrong)], ["targets"]):
        seen = []
        for command in (simulator, nkw):
            status = command(words)
            seen.append((status, *capsys.readouterr()))
        assert seen[0] == seen[1]
        assert nkw(["sim", *words]) == seen[0][0]
        assert capsys.readouterr().out == seen[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["explain", "NKW-UNWRITTEN"], ["lint", "nkw/verbs.py"], ["targets"]])
def test_verbs_without_a_script_load_no_torch(words: list[str]) -> None:
    code = (
        "import sys; from nkw.commands import main; status = main(sys.argv[1:]); "
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules]); sys.exit(status)"
    )
    done = ran(ROOT, "-c", code, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("[]\n")


@pytest.mark.slow
def test_a_traceback_of_a_script_shows_its_own_frames_only(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise RuntimeError('the data is odd')\n")
    done = [ran(tmp_path, "-m", module, "run", "bad.py") for module in ("nkw", "model", "simulate")]
    assert {run.returncode for run in done} == {1}
    assert len({run.stderr for run in done}) == 1
    assert done[0].stderr.count("File ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", "model", "nki_kernels"])
def test_a_file_that_hides_a_package_is_named_before_anything_is_imported(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')\n")
    started = "import sys; from nkw.__main__ import main; sys.exit(main())"
    (tmp_path / "empty").mkdir()
    hiding = [
        ran(tmp_path, "-m", "nkw", "targets"),
        ran(tmp_path / "empty", "-c", started, path=str(tmp_path)),
    ]
    for done in hiding:
        assert (done.returncode, done.stdout, done.stderr) == (
            2,
            "",
            f"nkw: error: [NKW-SHADOWED] {tmp_path / name}.py has the name of the package {name} of NKI Workbench and "
            "hides it: rename that file, or take its folder from Python's path\n",
        )
    (tmp_path / f"{name}.py").rename(tmp_path / f"my_{name}.py")
    assert ran(tmp_path, "-m", "nkw", "targets").returncode == 0


@pytest.mark.parametrize("command", ["run", "time", "memory", "check"])
def test_a_script_that_imports_a_module_of_our_name_is_refused_in_one_sentence(
    command: str, tmp_path: Path, capsys: Capture
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import helper\nprint('ran')\n")
    (tmp_path / "helper.py").write_text("from model import layers\n")
    (tmp_path / "model.py").write_text("layers = 3\n")
    assert nkw([command, str(script)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: [NKW-SHADOWED] {tmp_path / 'model.py'} has the name of the package model of NKI Workbench, and "
        "`import model` can mean one of them only: rename the former\n"
    )


def test_a_script_whose_modules_have_other_names_runs(tmp_path: Path, capsys: Capture) -> None:
    script = tmp_path / "script.py"
    script.write_text("import my_model\nprint(my_model.layers)\n")
    (tmp_path / "my_model.py").write_text("layers = 3\n")
    (tmp_path / "model.py").write_text("layers = 4\n")  # which nothing imports
    (tmp_path / "simulate").mkdir()  # no package of Python
    assert nkw(["run", "--target", "trn2", str(script)]) == 0
    assert capsys.readouterr().out == "3\n"


def test_names_are_looked_up_as_python_does(tmp_path: Path) -> None:
    script = tmp_path / "simulate.py"
    script.write_text("import simulate\nsimulate.install()\n")
    check_names(str(script), tmp_path)  # the script itself, which wants ours
    other = tmp_path / "other.py"
    other.write_text("import simulate\n")
    with pytest.raises(InvalidArgument, match=r"simulate\.py has the name"):
        check_names(f"{other}:kernel", tmp_path)
    with pytest.raises(InvalidArgument, match=r"simulate\.py has the name"):
        check_names("other:kernel", tmp_path)
    package = tmp_path / "nki_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    with pytest.raises(InvalidArgument, match=r"nki_kernels has the name of the package nki_kernels"):
        check_names("nki_kernels:matmul", tmp_path)
    check_names("nki_kernels:matmul", ROOT)  # ours
    other.write_text("from . import simulate\nimport os\n")
    check_names(str(other), tmp_path)
    other.write_text("import (")  # Python says what is wrong with it
    check_names(str(other), tmp_path)
