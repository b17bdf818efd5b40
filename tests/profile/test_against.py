"""`time --against`: another kernel or a stored profile, `--fail-above`, and files that hold no profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulate.cli import main
from tests.profile.test_profile_text import SCRIPT

Capture = pytest.CaptureFixture[str]
KERNEL = SCRIPT[: SCRIPT.rindex("doubled(")]
SMALL, LARGE = "f32[128,64]", "f32[128,2048]"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "script.py"
    path.write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    return path


@pytest.fixture
def stored(script: Path, capsys: Capture) -> Path:
    """Write a profile of the kernel with `time --json` and return its path."""
    path = script.with_name("profile.json")
    assert main(["time", f"{script}:doubled", SMALL, "--json", str(path)]) == 0
    capsys.readouterr()
    return path


def test_a_kernel_is_compared_with_itself_on_other_shapes(script: Path, capsys: Capture) -> None:
    kernel = f"{script}:doubled"
    assert main(["time", kernel, LARGE, "--against", kernel, SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("doubled #0 on trn2: ") and "\nagainst doubled #0 on trn2: " in out
    assert "slower\n" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["time", kernel, SMALL, "--against", kernel, LARGE, "--fail-above", "0%"]) == 0
    assert "faster\n" in capsys.readouterr().out


@pytest.mark.parametrize("before", ["--against", "--fail-above"])
def test_a_stored_profile_is_compared_like_its_kernel(
    before: str, script: Path, stored: Path, capsys: Capture
) -> None:
    kernel = f"{script}:doubled"
    assert main(["time", kernel, LARGE, "--against", kernel, SMALL]) == 0
    report = capsys.readouterr().out
    assert main(["time", kernel, LARGE, "--against", str(stored)]) == 0
    assert capsys.readouterr().out == report
    limit = ["--fail-above", "2%", "--against", str(stored)]
    assert (
        main(["time", kernel, LARGE, *(limit if before == "--fail-above" else [*limit[2:], *limit[:2]])]) == 1
    )
    captured = capsys.readouterr()
    assert captured.out == report
    assert captured.err.splitlines()[-1].startswith("slower by more than 2 %: ")
    assert main(["time", kernel, LARGE, *limit[2:], "--fail-above", "900%"]) == 0


def test_a_script_is_compared_after_two_dashes(script: Path, stored: Path, capsys: Capture) -> None:
    script.write_text(SCRIPT)
    assert main(["time", "--against", str(stored), "--fail-above", "0%", str(script)]) == 0
    assert "change: no difference\n" in capsys.readouterr().out
    assert main(["time", "--against", str(stored), "--", str(script)]) == 0
    assert "change: no difference\n" in capsys.readouterr().out


@pytest.mark.slow
def test_an_edited_kernel_shows_the_line_that_costs(script: Path, stored: Path) -> None:
    add = "    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)\n"
    exp = "    nisa.activation(dst=tile, op=nl.exp, data=tile)\n"
    script.write_text("# a comment moves every line\n" + KERNEL.replace(add, add + exp))
    words = ["time", "script.py:doubled", SMALL, "--against", "profile.json", "--json", "new.json"]
    out = subprocess.run(  # a new process: Python keeps the text of a file that it has shown
        [sys.executable, "-m", "simulate", *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert "activation script.py:14 (new)" in out and "nisa.activation(dst=tile, op=nl.exp, data=tile)" in out
    assert "(gone)" not in out
    comparison = json.loads(Path("new.json").read_text())["comparison"]
    assert comparison["lines"][0]["instruction"] == "activation"
    total = sum(row["ns"] - row["against_ns"] for row in comparison["lines"])
    assert total == pytest.approx(comparison["change_ns"], rel=1e-9)  # sums of a dozen numbers


def test_a_refused_kernel_to_compare_with_is_an_error(script: Path, capsys: Capture) -> None:
    kernel = f"{script}:doubled"
    assert main(["time", kernel, SMALL, "--against", kernel, "f32[129,64]"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "error: [NKW-" in captured.err
    assert main(["time", kernel, SMALL, "--against", f"{script}:missing", SMALL]) == 2
    assert capsys.readouterr().err.endswith(
        "has no kernel missing; give the name of a function that it defines\n"
    )


AGAIN = "; write it again with time --json"


def changed(document: dict[str, Any], path: str, value: Any) -> str:
    inner: Any = document
    *steps, last = path.split(".")
    for step in steps:
        inner = inner[int(step) if step.isdecimal() else step]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("command", "memory", "it has no field command with the content time"),
        ("schema", 2, "its schema is 2, not 1"),
        ("launches", [], "it holds no launch"),
        ("launches.0.profile", 1, "a value has the wrong type or is out of range"),
        ("launches.0.profile", -1, "a value has the wrong type or is out of range"),
        ("profiles.0.length_ns", KeyError, "the key 'length_ns' is missing"),
        ("profiles.0.length_ns", True, "a value has the wrong type or is out of range"),
        ("profiles.0.length_ns", 10**400, "a value has the wrong type or is out of range"),
        ("profiles.0.length_ns", 1.0, "the parts of its critical path do not add up to its length"),
        ("profiles.0.path.0.ns", -1.0, "a value has the wrong type or is out of range"),
        ("profiles.0.path.0.text", 3, "a value has the wrong type or is out of range"),
        ("profiles", 3, "a value has the wrong type or is out of range"),
    ],
)
def test_a_changed_profile_is_refused(
    path: str, value: Any, why: str, script: Path, stored: Path, capsys: Capture
) -> None:
    stored.write_text(changed(json.loads(stored.read_text()), path, value))
    assert main(["time", f"{script}:doubled", SMALL, "--against", str(stored)]) == 2
    message = f"error: [NKW-AGAINST-FILE] {stored} is no profile that `time --json` wrote: {why}{AGAIN}\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is no JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{", "it is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[1]", "it has no field command with the content time"),
        (b'{"command": NaN}', "NaN is no number"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"[" * 200_000, "it is nested too deeply"),
        (None, "No such file or directory"),
    ],
)
def test_a_foreign_file_is_refused(content: bytes | None, why: str, script: Path, capsys: Capture) -> None:
    if content is not None:
        Path("foreign.json").write_bytes(content)
    assert main(["time", f"{script}:doubled", SMALL, "--against", "foreign.json"]) == 2
    message = f"error: [NKW-AGAINST-FILE] foreign.json is no profile that `time --json` wrote: {why}"
    assert capsys.readouterr().err.startswith(message.replace(" (char 1)", ""))


def test_profiles_of_two_readings_are_not_compared(script: Path, stored: Path, capsys: Capture) -> None:
    words = ["time", f"{script}:doubled", SMALL, "--against", str(stored), "--reading"]
    assert main([*words, "serial"]) == 2
    message = (
        f"error: [NKW-AGAINST] {str(stored)[:60]} is a profile of the program reading, this run has the serial "
        "reading; give --reading program\n"
    )
    assert capsys.readouterr().err == message
    assert main([*words, "program"]) == 0


def test_options_that_compare_nothing_are_refused(script: Path, capsys: Capture) -> None:
    kernel = f"{script}:doubled"
    assert main(["time", kernel, SMALL, "--fail-above", "2%"]) == 2
    assert "--fail-above needs a baseline; give --against" in capsys.readouterr().err
    assert main(["time", kernel, SMALL, "--against", "profile.json", SMALL]) == 2
    assert "--against profile.json names no kernel, so no words follow it" in capsys.readouterr().err
    for wrong in ("2", "-2%", "nan%", "%", "1e3%"):
        with pytest.raises(SystemExit) as left:
            main(["time", kernel, SMALL, "--against", kernel, SMALL, f"--fail-above={wrong}"])
        assert left.value.code == 2
        assert f"{wrong!r} is no percentage; give for example 2%" in capsys.readouterr().err


def test_the_stored_profile_is_never_overwritten(script: Path, stored: Path, capsys: Capture) -> None:
    before = stored.read_bytes()
    words = ["time", f"{script}:doubled", SMALL, "--against", str(stored), "--json", str(stored)]
    assert main(words) == 2
    assert "this command reads that file" in capsys.readouterr().err
    assert stored.read_bytes() == before
    assert main([*words[:-1], "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["comparison"]["change_ns"] == 0
    assert "change: no difference" in captured.err


def test_help_states_the_exit_status(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["time", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "exit status 1 where the time is longer by more than P per cent, for example 2%" in words
    assert "1 if it or a kernel failed, or --fail-above found a longer time, 2 if" in words
