"""The command `verify`: its text, its JSON, its exit statuses, and the examples of its help and its guide."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import simulate
from simulate.cli import main
from simulate.run.exits import UserExit, convert_exits
from simulate.run.launcher import ToleratedRule
from simulate.verification.timed_reference import SLOW_SECONDS, TimedReference

FOLDER = Path(__file__).parent / "tasks"
PAGE = (Path(simulate.__file__).parents[1] / "docs" / "verify.md").read_text(encoding="utf-8")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `verify` in the folder of the tasks and returns its status, stdout and stderr."""
    monkeypatch.chdir(FOLDER)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["verify", *words])
        return status, *capsys.readouterr()

    return run


def test_the_command_prints_a_verdict_of_at_most_20_lines(command: Any) -> None:
    status, out, _ = command("add.py:add", "f32[200,64]", "f32[200,64]", "--target", "trn1")
    assert status == 0
    lines = out.splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 80
    assert lines[0].startswith("add on trn1: right, clean, ")
    assert lines[-2].startswith("floor ") and "(HBM)" in lines[-2]
    assert re.fullmatch(r"vendor's largest bounds: (\w+ [\d.]+ us(, |$)){2}", lines[-1])


def test_a_reference_of_another_file_is_taken(command: Any) -> None:
    sizes = ("f32[200,64]", "f32[200,64]")
    assert command("add.py:add", *sizes, "--reference", "add.py:add_reference")[0] == 0
    status, out, _ = command("add.py:add", *sizes, "--reference", "silu_gate.py:silu_gate_reference")
    assert status == 1 and out.startswith("add on trn2: WRONG, clean, ")


def test_json_is_the_verdict(command: Any) -> None:
    status, out, err = command("add.py:add", "f32[200,64]", "f32[200,64]", "--json", "-")
    told = json.loads(out)
    assert status == told["status"] == 0 and told["right"] and told["clean"] and told["reason"] == ""
    assert told["findings"] == [] and told["speed"]["floor_bound"] == "HBM"
    larger, smaller = told["speed"]["bounds"]
    assert told["speed"]["time_ns"] >= larger["time_ns"] > smaller["time_ns"] > 0
    assert "add on trn2: right, clean, " in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add.py"], "error: add.py names no kernel; give FILE.py:NAME or MODULE:NAME"),
        (["add.py", "--target", "trn1"], "error: add.py names no kernel; give FILE.py:NAME or MODULE:NAME"),
        (["none.py:add"], "error: [NKW-KERNEL-NAME] none.py is not a file"),
        (["add.py:sum"], "error: [NKW-KERNEL-NAME] add.py has no kernel sum"),
        (["add.py:add", "f33[2]"], "error: [NKW-KERNEL-ARGUMENT] dtype f33 of f33[2] is not known"),
        (
            ["add.py:add_reference", "f32[2]"],
            "error: [NKW-VERIFY] there is no add_reference_reference beside",
        ),
        (
            ["add.py:add", "--reference", "add"],
            "error: [NKW-KERNEL-NAME] add is neither FILE.py:NAME nor MODULE:NAME",
        ),
        (["add.py:add", "f32[2,2]"], "error: [NKW-VERIFY] the reference does not take these arguments: "),
    ],
)
def test_what_the_command_cannot_judge_ends_with_2(command: Any, words: list[str], message: str) -> None:
    status, out, err = command(*words)
    assert status == 2 and out == ""
    assert message in err


def test_more_than_one_rank_is_refused(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("f32[200,64]", "f32[200,64]")
    monkeypatch.setenv("NKW_RANKS", "2")
    status, out, err = command("add.py:add", *sizes)
    assert (status, out) == (2, "")
    one = "error: [NKW-VERIFY] verify runs a kernel on one rank, as a reference takes the arguments of one"
    several = "check_kernel.ranks (docs/testing.md) compares several, and nkw check --ranks looks for faults"
    assert err.endswith(f"{one}, and NKW_RANKS asks for more: unset it; {several}\n")
    assert command("add.py:add", *sizes, "--ranks", "2") == (2, "", f"{one}; {several}\n")
    assert command("add.py:add", *sizes, "--ranks", "1")[0] == 0
    monkeypatch.setenv("NKW_RANKS", "1")
    assert command("add.py:add", *sizes)[0] == 0


KERNELS = """import nki, nki.isa as nisa, nki.language as nl

def moved(x, tile):
    nisa.dma_copy(dst=tile, src=x)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out

@nki.jit
def larger_than_sbuf(x):
    tile = nl.ndarray((128, 60000), dtype=x.dtype, buffer=nl.sbuf)
    return moved(x, tile[0 : x.shape[0], 0 : x.shape[1]])

@nki.jit
def of_level_0_7(x):
    nl.tiles(x, tile_shape=x.shape)
    return moved(x, nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf))

def larger_than_sbuf_reference(x):
    return x

of_level_0_7_reference = larger_than_sbuf_reference
"""


@pytest.mark.slow
def test_rules_of_the_vendors_simulator_are_named_where_they_tolerate(command: Any, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(KERNELS)
    words = (f"{tmp_path}/k.py:larger_than_sbuf", "f32[64,32]")
    status, out, _ = command(*words)
    assert status == 1 and "error[NKW-TILE-SIZE]" in out
    with pytest.warns(ToleratedRule) as caught:
        status, out, _ = command(*words, "--rules", "simulator")
    assert status == 0
    assert "tolerated by the vendor's simulator: NKW-CAPACITY, NKW-TILE-SIZE\n" in out
    assert len(caught) == 2  # and not once for each trial
    assert "tolerated" not in command(f"{tmp_path}/k.py:of_level_0_7", "f32[64,32]")[1]


@pytest.mark.parametrize(("level", "status"), [("0.6", 1), ("0.7", 0)])
def test_the_level_decides_what_exists(command: Any, tmp_path: Path, level: str, status: int) -> None:
    (tmp_path / "k.py").write_text(KERNELS)
    answer = command(f"{tmp_path}/k.py:of_level_0_7", "f32[64,32]", "--level", level)
    assert answer[0] == status
    assert ("[NKW-LEVEL] nl.tiles exists from level 0.7 on" in " ".join(answer[1].split())) == bool(status)


def test_modules_beside_kernel_and_reference_are_imported(command: Any, tmp_path: Path) -> None:
    for folder, name in (("kernels", "add"), ("references", "add_reference")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"beside_{name}.py").write_text((FOLDER / "add.py").read_text())
        (tmp_path / folder / "named.py").write_text(f"from beside_{name} import {name}\n")
    words = (f"{tmp_path}/kernels/named.py:add", "f32[200,64]", "f32[200,64]", "--reference")
    assert command(*words, f"{tmp_path}/references/named.py:add_reference")[0] == 0
    document = f"{tmp_path}/references/named.py"
    status, out, err = command(*words, f"{document}:add_reference", "--json", document)
    assert (status, out) == (2, "") and "this command reads that file" in err


@pytest.mark.slow
def test_the_example_of_the_guide_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    ((program, output),) = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == output


NO_ARRAYS = """import nki, nki.isa as nisa, nki.language as nl
import numpy as np

@nki.jit
def copied(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=nl.load(x))
    return out

@nki.jit
def returns_nothing(x):
    copied(x)

@nki.jit
def exits(x):
    raise SystemExit(0)

@nki.jit
def ends_generator(x):
    raise GeneratorExit

def identity(x):
    return x

def nothing(x):
    pass

def text(x):
    return "an array"

def generator(x):
    yield x

def fails(x):
    return x.no_such_name

def exiting(x):
    raise SystemExit(0)

def refuses_other_sizes(x):
    assert x.shape == (8, 32), f"shape {x.shape}"
    return x
"""


@pytest.mark.parametrize(
    ("kernel", "reference", "message"),
    [
        (
            "copied",
            "nothing",
            "the reference returns None; return an array of real numbers, or a tuple of arrays",
        ),
        (
            "copied",
            "text",
            "the reference returns a str; return an array of real numbers, or a tuple of arrays",
        ),
        (
            "copied",
            "generator",
            "the reference returns a generator; return an array of real numbers, or a tuple of",
        ),
        ("copied", "fails", "the reference fails on random values: AttributeError: "),
        (
            "copied",
            "exiting",
            "the reference fails on random values: [NKW-EXIT] the reference called sys.exit(0)",
        ),
        (
            "exits",
            "identity",
            "the kernel fails on random values: [NKW-EXIT] the kernel exits called sys.exit(0)",
        ),
        (
            "ends_generator",
            "identity",
            "the kernel fails on random values: [NKW-EXIT] the kernel ends_generator raised GeneratorExit",
        ),
    ],
)
def test_without_a_verdict_the_status_is_3_and_the_document_has_the_reason(
    command: Any, tmp_path: Path, kernel: str, reference: str, message: str
) -> None:
    (tmp_path / "k.py").write_text(NO_ARRAYS)
    words = (f"{tmp_path}/k.py:{kernel}", "f32[8,32]", "--reference", f"{tmp_path}/k.py:{reference}")
    status, out, err = command(*words, "--json", "-")
    assert status == 3 and f"error: [NKW-VERIFY] {message}" in err
    told = json.loads(out)
    assert (told["outcome"], len(told)) == ("none", 4) and told["reason"].startswith(
        f"[NKW-VERIFY] {message}"
    )


def test_a_kernel_that_returns_no_array_is_wrong(command: Any, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(NO_ARRAYS)
    words = (f"{tmp_path}/k.py:returns_nothing", "f32[8,32]", "--reference", f"{tmp_path}/k.py:identity")
    status, out, _ = command(*words)
    assert status == 1 and ": the kernel returns None; return an array of real numbers" in " ".join(
        out.split()
    )


def test_trials_that_could_not_be_tried_are_counted(command: Any, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(NO_ARRAYS)
    words = (f"{tmp_path}/k.py:copied", "f32[8,32]", "--reference", f"{tmp_path}/k.py:")
    status, out, _ = command(*words[:-1], f"{words[-1]}refuses_other_sizes")
    assert status == 0 and "\n4 of 10 trials could not be tried\n" in out
    assert "could not be tried" not in command(*words[:-1], f"{words[-1]}identity")[1]


def test_the_text_has_the_hint_of_a_finding_and_whole_messages(command: Any, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(KERNELS)
    words = (f"{tmp_path}/k.py:larger_than_sbuf", "f32[64,32]")
    _, out, _ = command(*words)
    (finding,) = json.loads(command(*words, "--json", "-")[1])["findings"]
    text = " ".join(out.split())
    assert finding["hint"] and f"try: {' '.join(finding['hint'].split())}" in text
    assert " ".join(finding["message"].split()) in text and "…" not in out


def test_a_slow_reference_is_named_and_a_fast_one_is_not() -> None:
    calls = TimedReference(len, calls=41, seconds=SLOW_SECONDS)
    calls(())
    assert calls.remark.startswith("slow reference: len took 2.0 s in 42 calls")
    assert TimedReference(len, calls=9, seconds=SLOW_SECONDS * 0.999).remark == ""


def test_exceptions_of_pytest_keep_their_type() -> None:
    with pytest.raises(pytest.skip.Exception), convert_exits("the reference"):
        pytest.skip("of the user")
    with pytest.raises(KeyboardInterrupt), convert_exits("the reference"):
        raise KeyboardInterrupt
    ends = pytest.raises(UserExit, match="the reference raised GeneratorExit, which ends a program")
    with ends, convert_exits("the reference"):
        raise GeneratorExit
