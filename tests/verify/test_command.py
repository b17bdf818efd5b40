"""The command `verify`: its text, its JSON, its exit statuses, and the examples of its help and its guide."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import simulate
from simulate.cli import main
from simulate.run.launcher import ToleratedRule

FOLDER = Path(__file__).parent / "tasks"
PAGE = (Path(simulate.__file__).parents[1] / "docs" / "verify.md").read_text(encoding="utf-8")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `verify` in the folder of the tasks."""
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
    ("words", "said"),
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
        (["add.py:add", "f32[2,2]"], "error: [NKW-VERIFY] the reference fails on random values: TypeError"),
    ],
)
def test_what_the_command_cannot_judge_ends_with_2(command: Any, words: list[str], said: str) -> None:
    status, out, err = command(*words)
    assert status == 2 and out == ""
    assert said in err


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


def test_rules_of_the_vendors_simulator_are_named_where_they_tolerate(command: Any, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(KERNELS)
    words = (f"{tmp_path}/k.py:larger_than_sbuf", "f32[64,32]")
    status, out, _ = command(*words)
    assert status == 1 and "error[NKW-TILE-SIZE]" in out
    with pytest.warns(ToleratedRule) as given:
        status, out, _ = command(*words, "--rules", "simulator")
    assert status == 0
    assert "tolerated by the vendor's simulator: NKW-CAPACITY, NKW-TILE-SIZE\n" in out
    assert len(given) == 2  # and not once for each trial
    assert "tolerated" not in command(f"{tmp_path}/k.py:of_level_0_7", "f32[64,32]")[1]


@pytest.mark.parametrize(("level", "status"), [("0.6", 1), ("0.7", 0)])
def test_the_level_decides_what_exists(command: Any, tmp_path: Path, level: str, status: int) -> None:
    (tmp_path / "k.py").write_text(KERNELS)
    found = command(f"{tmp_path}/k.py:of_level_0_7", "f32[64,32]", "--level", level)
    assert found[0] == status
    assert ("[NKW-LEVEL] nl.tiles exists from level 0.7 on" in " ".join(found[1].split())) == bool(status)


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


def test_the_example_of_the_guide_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    ((program, output),) = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == output
