"""Writes docs/instructions: one page per instruction, and an index.

The instruction book is the package simulate.isa; a planner is the function there that checks an instruction and
computes its cost. A page has: the signature and docstring of the planner; the rules that the planner can reach, found
by following the names in its code; the chips whose hardware record passes the rules that depend on the chip only; and
the numbers of the hardware record that the cost is made of, each with its source. The example of a page is a file of
docs/instructions/examples.

    python -m tools.instruction_pages [FOLDER]
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, get_code, get_sentence
from nkw.targets import DEFAULT_TARGET, GENERATIONS, LNC_VARIABLE, TARGET_VARIABLE
from simulate.hardware import hardware
from simulate.isa import INSTRUCTIONS, book, costs, dma_costs
from simulate.isa.enums import EXPORTED
from simulate.numerics import AluOperator
from simulate.run import definedness, indirect, issue
from simulate.run import execute as carry_out

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "instructions"
EXAMPLES = FOLDER / "examples"
"""A script for each instruction, which compares a kernel with NumPy."""
TARGETS = tuple(GENERATIONS.values())
TWO_CORES = ("core_barrier", "sendrecv")
"""Instructions that need a logical core of two physical cores."""
_ISSUING = (issue, definedness, carry_out, indirect)
"""Where an instruction takes effect, with the rules that hold for all."""
_COSTS = (costs.__name__, dma_costs.__name__)
_NOTE = "<!-- Written by `make docs` from {source}; edit that file. -->"


@dataclass
class Reached:
    """The rules and the fields of the hardware record that the code of one function can reach."""

    rules: dict[str, str] = field(default_factory=dict)
    """Sentence by code."""
    limits: set[str] = field(default_factory=set)
    """Fields of the hardware record that are asked outside the cost formulas."""
    numbers: set[str] = field(default_factory=set)
    """Fields of the hardware record that the cost formulas use."""


def reached_from(function: Callable[..., Any]) -> Reached:
    """Return what a function can reach: the names in its code, followed from function to function in simulate.isa."""
    reached = Reached()
    seen: set[int] = set()
    waiting: list[FunctionType] = [_function(function)]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if hasattr(one, "code"):
            reached.rules[get_code(one)] = get_sentence(one)
        fields = reached.numbers if one.__module__ in _COSTS else reached.limits
        fields.update(_hardware_fields(one))
        reached.numbers.update(_named_numbers(one))
        waiting += _used(one)
    reached.limits -= reached.numbers
    return reached


def _function(value: Any) -> FunctionType:
    """Return the undecorated function."""
    return inspect.unwrap(value)


@lru_cache(None)
def _tree(function: FunctionType) -> ast.AST:
    """Return the syntax tree of a function's source."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _hardware_fields(function: FunctionType) -> set[str]:
    """Return the fields of the hardware record that a function reads from a variable called `hardware`."""
    known = hardware(TARGETS[0]).provenance
    return {
        node.attr
        for node in ast.walk(_tree(function))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "hardware"
        and node.attr in known
    }


def _named_numbers(function: FunctionType) -> set[str]:
    """Return the numeric fields of the hardware record that a function names in a string, as a pace or an overhead."""
    known = {
        name
        for name, number in hardware(TARGETS[0]).provenance.items()
        if isinstance(number.value, (int, float)) and not isinstance(number.value, bool)
    }
    return {node.value for node in ast.walk(_tree(function)) if isinstance(node, ast.Constant)} & known


def _used(function: FunctionType) -> list[FunctionType]:
    """Return the functions of simulate.isa that a function names, and the methods of the classes that it names."""
    functions: list[FunctionType] = []
    for node in ast.walk(_tree(function)):
        value = _named(node, function)
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            member = _function(member) if callable(member) else member
            if isinstance(member, FunctionType) and _written_in_the_book(member):
                functions.append(member)
    return functions


def _named(node: ast.AST, function: FunctionType) -> Any:
    """Return the object that a name, or an attribute of a module, has in a function's file.

    Returns None for other nodes and for unknown names.
    """
    if isinstance(node, ast.Name):
        return function.__globals__.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = function.__globals__.get(node.value.id)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None


def _written_in_the_book(function: FunctionType) -> bool:
    """Return whether a function is defined in a file of simulate.isa; generated methods of dataclasses are not."""
    return function.__module__.startswith("simulate.isa.") and Path(function.__code__.co_filename).is_file()


def chips_of(planner: Callable[..., Any]) -> tuple[str, ...]:
    """Return the targets on which an instruction exists: those that pass its rules about the chip alone."""
    rules = list(_chip_rules(_function(planner)))
    return tuple(target for target in TARGETS if all(_passes(rule, target) for rule in rules))


def _chip_rules(function: FunctionType) -> Iterator[Callable[..., Any]]:
    """Yield the rules that a function applies as `rule(hardware)` unconditionally: not inside an `if` or a loop.

    Functions of simulate.isa that it calls unconditionally are followed.
    """
    tree = _tree(function)
    assert isinstance(tree, ast.Module) and isinstance(tree.body[0], ast.FunctionDef)
    for statement in tree.body[0].body:
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call):
            continue
        called = _named(call.func, function)
        if not (isinstance(called, FunctionType) and _written_in_the_book(called)):
            continue
        if not hasattr(called, "code"):
            yield from _chip_rules(called)
        elif [ast.unparse(argument) for argument in call.args] == ["hardware"]:
            yield called


def _passes(rule: Callable[..., Any], target: str) -> bool:
    """Return whether a target's hardware record passes a rule."""
    try:
        rule(hardware(target))
    except RuleViolation:
        return False
    return True


# -- writing -------------------------------------------------------------------------------------------------------


def page(name: str) -> str:
    """Return the Markdown page of one instruction."""
    planner = INSTRUCTIONS[name]
    source = Path(inspect.getsourcefile(_function(planner)) or "").name
    reached = reached_from(planner)
    lines = [
        _NOTE.format(source=f"simulate/isa/instructions/{source}"),
        "",
        f"# nki.isa.{name}",
        "",
        "```python",
        signature(name),
        "```",
        "",
        f"Chips: {', '.join(chips_of(planner))}.",
        "",
        inspect.getdoc(planner) or "",
        "",
        "## Example",
        "",
        *_example(name),
        "",
        "## Rules",
        "",
        *(f"- `{code}`: {sentence}" for code, sentence in sorted(reached.rules.items())),
    ]
    lines += _numbers("Limits and capabilities", reached.limits)
    lines += _numbers("Numbers of the cost", reached.numbers)
    return "\n".join(lines) + "\n"


def example_environment(name: str, target: str) -> dict[str, str]:
    """Return the environment variables for an instruction's example on a chip: target, and cores if it needs two."""
    cores = {LNC_VARIABLE: "2"} if name in TWO_CORES else {}
    return {TARGET_VARIABLE: target, **cores}


def _example(name: str) -> Iterator[str]:
    """Yield the lines of an example: the first line of its docstring, its command and its source."""
    path = EXAMPLES / f"{name}.py"
    title, source = path.read_text(encoding="utf-8").split("\n\n", 1)
    chips = chips_of(INSTRUCTIONS[name])
    target = DEFAULT_TARGET if DEFAULT_TARGET in chips else chips[0]
    setting = "".join(
        f"{variable}={value} "
        for variable, value in example_environment(name, target).items()
        if value != DEFAULT_TARGET
    )
    yield from (title.strip('"'), "", "```sh")
    yield f"{setting}nkw run {path.relative_to(FOLDER.parents[1]).as_posix()}"
    yield from ("```", "", "```python", source.rstrip(), "```")


def signature(name: str) -> str:
    """Return the documented signature as text, one parameter per line."""
    parameters = book.documented_signature(INSTRUCTIONS[name]).parameters.values()
    lines = [f"    {p.name}{_default(p)}," for p in parameters]
    return "\n".join([f"nki.isa.{name}(", *lines, ")"])


def _default(parameter: inspect.Parameter) -> str:
    """Return `=` and the default as a kernel would write it, or "" for a required parameter."""
    value = parameter.default
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, np.generic):
        value = value.item()  # numpy's own repr depends on its print options
    names = {enum_class: name for name, enum_class in EXPORTED.items()}
    if type(value) in names:
        return f"=nki.isa.{names[type(value)]}.{value.name}"
    return f"=nki.language.{value.name}" if isinstance(value, AluOperator) else f"={value!r}"


def _numbers(title: str, fields: set[str]) -> Iterator[str]:
    """Yield the lines of a section with a table of fields of the hardware record: values by chip, and sources.

    Yields nothing if there are no fields.
    """
    if not fields:
        return
    yield from ("", f"## {title}", "", f"| field | {' | '.join(TARGETS)} | source |", "|---|---|---|---|---|")
    for name in sorted(fields):
        rows = [hardware(target).provenance[name] for target in TARGETS]
        sources = list(dict.fromkeys(f"{row.confidence.value}: {row.source}" for row in rows))
        values = " | ".join(_value(row.value) for row in rows)
        yield f"| `{name}` | {values} | {_cell('; '.join(sources))} |"


def _value(value: Any) -> str:
    """Format a value of the hardware record as a table cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _cell(f"{value:g}" if isinstance(value, float) else str(value))


def _cell(text: str) -> str:
    """Return text with the characters escaped that a Markdown table cell cannot hold."""
    return text.replace("|", "\\|").replace("\n", " ")


def index() -> str:
    """Return the Markdown index: all instructions, and the rules that are checked whenever an instruction is issued."""
    rows = [
        f"| [{name}]({name}.md) | {_cell(_first_line(planner))} | {', '.join(chips_of(planner))} |"
        for name, planner in sorted(INSTRUCTIONS.items())
    ]
    common = {
        get_code(rule): get_sentence(rule)
        for module in _ISSUING
        for rule in vars(module).values()
        if hasattr(rule, "code")
    }
    return "\n".join(
        [
            _NOTE.format(source="simulate/isa/instructions"),
            "",
            "# Instructions",
            "",
            "| instruction | meaning | chips |",
            "|---|---|---|",
            *rows,
            "",
            "## Rules of every instruction",
            "",
            "Checked when an instruction is issued, whatever its own rules are:",
            "",
            *(f"- `{code}`: {sentence}" for code, sentence in sorted(common.items())),
            "",
        ]
    )


def _first_line(planner: Callable[..., Any]) -> str:
    """Return the first line of a planner's docstring."""
    return (inspect.getdoc(planner) or "").splitlines()[0]


def pages() -> dict[str, str]:
    """Return the content of every page by its file name."""
    return {"README.md": index(), **{f"{name}.md": page(name) for name in sorted(INSTRUCTIONS)}}


def write(folder: Path) -> None:
    """Write all pages to a folder and remove Markdown files of instructions that no longer exist."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for old in folder.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
