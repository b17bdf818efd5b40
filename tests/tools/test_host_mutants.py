"""Mutants of the host code: each operator changes what it names, and the draw stays when other lines change."""

from __future__ import annotations

import ast

import pytest

from tools.host_mutants.operators import draw_sample, mutate_source


def changes(source: str) -> set[tuple[str, str]]:
    return {(mutant.operator, mutant.change) for mutant in mutate_source("file.py", source)}


@pytest.mark.parametrize(
    ("source", "operator", "change"),
    [
        ("x = a < b", "comparison", "a < b -> a <= b"),
        ("x = a >= b", "comparison", "a >= b -> a > b"),
        ("x = a is None", "comparison", "a is None -> a is not None"),
        ("x = a + b", "sign", "a + b -> a - b"),
        ("x = -a", "sign", "-a -> a"),
        ("x -= 1", "sign", "x -= 1 -> x += 1"),
        ("f(a, b)", "arguments", "f(a, b) -> f(b, a)"),
        ("x = not a", "not", "not a -> a"),
        ("x = a and b", "boolean", "a and b -> a or b"),
        ("f(a)", "statement", "f(a) -> deleted"),
        ("x[0] = a", "statement", "x[0] = a -> deleted"),
        ("raise E", "statement", "raise E -> deleted"),
    ],
)
def test_each_operator_makes_its_change(source: str, operator: str, change: str) -> None:
    assert (operator, change) in changes(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""f(a, b)"""',
        "x: a < b = c",
        "def f(a: b | c) -> d | e:\n    return a",
        "if TYPE_CHECKING:\n    f(a, b)",
        "x = a",
        "f(a, a)[0]",
        "x = f'{a}' + 'b'",
    ],
)
def test_what_no_test_could_notice_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_a_mutant_is_the_source_with_one_change() -> None:
    source = "def f(a, b):\n    if not (a <\n            b):\n        g(a, b)  # kept\n    return a\n"
    mutants = mutate_source("file.py", source)
    assert {mutant.operator for mutant in mutants} == {"comparison", "not", "arguments", "statement"}
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(source))
        assert "# kept" in mutant.source and 2 <= mutant.line <= 4


def test_equal_changes_are_told_apart_by_their_occurrence() -> None:
    mutants = [mutant for mutant in mutate_source("file.py", "f(a)\ng(b)\nf(a)\n") if "f(a)" in mutant.change]
    assert [mutant.occurrence for mutant in mutants] == [1, 2]
    assert len({mutant.key for mutant in mutants}) == 2


@pytest.mark.slow
def test_the_draw_takes_every_operator_and_stays_when_lines_move() -> None:
    source = "\n".join(f"x{n} = a{n} < b{n}\nf(c{n}, d{n})\ny{n} = not e{n}" for n in range(20))
    drawn = draw_sample(mutate_source("file.py", source), 8, seed=3)
    assert {mutant.operator for mutant in drawn} == {"comparison", "arguments", "statement", "not"}
    moved = draw_sample(mutate_source("file.py", f"import z\n\n{source}"), 8, seed=3)
    assert [mutant.key for mutant in moved] == [mutant.key for mutant in drawn]
    assert [mutant.line for mutant in moved] == [mutant.line + 2 for mutant in drawn]
    assert [mutant.key for mutant in draw_sample(moved, 8, seed=4)] != [mutant.key for mutant in moved]
