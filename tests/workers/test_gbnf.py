"""GBNF: what llama.cpp's notation says is said in Lark's, anything else is one refusal, and both take linear time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from model.errors import ModelError
from model.workers.gbnf import convert_gbnf_to_lark


@pytest.mark.parametrize(
    ("grammar", "lark"),
    [
        ('root ::= "a"', 'start: "a"'),
        ('root ::= "a" | "b"  # choice', 'start: "a" | "b"'),
        (
            'root ::=\n  ("x" |\n "y")* [a-z]{2} .{1,} "z"?',
            'start: ( "x" | "y" ) * /[a-z]/ {2,2} /./ {1,} "z" ?',
        ),
        ('root ::= ("a" | ) |', 'start: ( "a" | "" ) | ""'),
        ("root ::= ()", 'start: ( "" )'),
        (r'root ::= "\x41\u00e4\U0001F600\n\"\\"', 'start: "Aä😀\\n\\"\\\\"'),
        (r"root ::= [^/\]\-a-c-]", r"start: /[^\u{2f}\u{5d}\u{2d}a-c\u{2d}]/"),
        ('root ::= "a"{1,2}', 'start: "a" {1,2}'),
        ("root ::= x-Y root\nx-Y ::= [0]", "start: R1_X_Y start\nR1_X_Y: /[0]/"),
        ("root ::= a\na ::= b\nb ::= a", "start: r1_a\nr1_a: r2_b\nr2_b: r1_a"),
        ('a ::= "1"\nroot ::= a\na ::= "2"', 'R2_A: "2"\nstart: R2_A'),
    ],
)
def test_gbnf_is_lark(grammar: str, lark: str) -> None:
    assert convert_gbnf_to_lark(grammar) == f"%llguidance {{}}\n{lark}"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "has no rule named root"),
        ('a ::= "b"', "has no rule named root"),
        ("root ::= x", "has no rule named x"),
        ('root "a"', "needs ::= in line 1"),
        ("::= x", "needs the name of a rule in line 1"),
        ("root ::= (", "needs a closing parenthesis in line 1"),
        ('root ::= "a" )', "needs a symbol in line 1"),
        ('root ::= "a"\n\nx ::= "b', "needs the end of a literal in line 3"),
        ('root ::= "' + "\\" * 1001, "needs the end of a literal in line 1"),
        ("root ::= [a", "needs the end of a character class in line 1"),
        ("root ::= []", "needs a character in a class in line 1"),
        ('root ::= "\\q"', "needs an escape such as"),
        ('root ::= "\\x4"', "needs an escape such as"),
        ('root ::= "\\ud800"', "needs an escape such as"),
        ('root ::= "\\U00110000"', "needs an escape such as"),
        ("root ::= *", "needs a symbol in line 1"),
        ('root ::= "a"*+', "needs a symbol in line 1"),
        ('root ::= "a"{1234567890}', "needs a symbol in line 1"),
        ('root ::= "a"{,2}', "needs a symbol in line 1"),
        ('root ::= "a"{²}', "needs a symbol in line 1"),
        ("root ::= " + "(" * 20_000, "needs a closing parenthesis in line 1"),
    ],
)
def test_what_is_not_gbnf_is_one_refusal(grammar: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        convert_gbnf_to_lark(grammar)
    assert caught.value.message.startswith(f"structured outputs: the grammar {message}")


LONG: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: "root ::= " + "(" * n + '"a"' + ")" * n,
    "open parentheses": lambda n: "root ::= " + "(" * n,
    "comments": lambda n: "# no\n" * n + 'root ::= "a"',
    "a literal": lambda n: 'root ::= "' + "\\n" * n + '"',
    "an open literal": lambda n: 'root ::= "' + "\\\\" * n,
    "rules that refer to the next": lambda n: (
        "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(n)) + f'a{n} ::= "x"'
    ),
    "alternatives": lambda n: "root ::= " + '"a" | ' * n + '"b"',
}


@pytest.mark.parametrize("name", LONG)
def test_reading_takes_linear_time(name: str) -> None:
    """Steps of the interpreter are counted, not seconds: three times the text takes three times the calls."""

    def calls(size: int) -> int:
        count = 0

        def note(*event: Any) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            convert_gbnf_to_lark(LONG[name](size))
        except ModelError:
            pass
        finally:
            sys.setprofile(None)
        return count

    small, large = calls(1_000), calls(3_000)
    assert large <= 3.2 * small + 100
