"""docs/instructions is what the instruction book says today, and its examples run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import simulate
from simulate.isa import INSTRUCTIONS
from tools.instruction_pages import (
    EXAMPLES,
    FOLDER,
    chips_of,
    example_environment,
    pages,
    reached_from,
    write,
)


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return pages()


@pytest.mark.slow
def test_pages_are_up_to_date(fresh: dict[str, str]) -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))
    assert not stale, f"run `make docs`: {', '.join(stale)}"


def test_every_instruction_has_a_page_that_the_index_names(fresh: dict[str, str]) -> None:
    assert set(fresh) == {"README.md", *(f"{name}.md" for name in INSTRUCTIONS)}
    assert all(f"[{name}]({name}.md)" in fresh["README.md"] for name in INSTRUCTIONS)


def test_every_example_belongs_to_an_instruction() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_an_example_equals_numpy_on_every_chip_of_its_instruction(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate.install()
    for target in chips_of(INSTRUCTIONS[name]):
        for variable, value in example_environment(name, target).items():
            monkeypatch.setenv(variable, value)
        with simulate.recorded() as launches:
            runpy.run_path(str(EXAMPLES / f"{name}.py"))
        issued = {event.op for launch in launches for stream in launch.streams for event in stream}
        assert name in issued


@pytest.mark.slow
def test_pages_of_instructions_that_are_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "gone.md").write_text("", encoding="utf-8")
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(pages())


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("tensor_copy", ("trn1", "trn2", "trn3")),
        ("range_select", ("trn2", "trn3")),
        ("nc_matmul_mx", ("trn3",)),
        ("rand_get_state", ("trn2", "trn3")),
    ],
)
def test_chips_are_those_that_pass_the_rules_about_the_chip(name: str, chips: tuple[str, ...]) -> None:
    assert chips_of(INSTRUCTIONS[name]) == chips


def test_rules_are_found_in_functions_and_classes_that_a_planner_uses() -> None:
    facts = reached_from(INSTRUCTIONS["tensor_scalar"])
    assert {"NKW-PARTITION-START", "NKW-BITVEC-OPERAND", "NKW-FLOAT32-RANGE"} <= set(facts.rules)
    assert "NKW-MATMUL-DTYPE" not in facts.rules


def test_numbers_of_the_cost_are_told_from_limits() -> None:
    facts = reached_from(INSTRUCTIONS["nc_matmul"])
    assert "matmul_fp32_passes" in facts.numbers
    assert "stationary_free_max" in facts.limits
    assert not facts.numbers & facts.limits
