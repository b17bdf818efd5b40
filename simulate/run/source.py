"""The source of a kernel line: the loops around it, and the variable that it assigns.

A kernel's loops are unrolled while it runs, so the stream has no loops; they are read from the source. Source that
Python cannot show (`exec` of a string) has no loops and no variables.
"""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from simulate.errors import Location
from simulate.run.location import location
from simulate.run.stream import Line

_DEVICE_LOOPS = ("fori_loop", "while_loop")
_HEADER = 48  # characters of a loop's header that reports show


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a kernel: its header as written, `for k in nl.affine_range(4)`, and its line."""

    header: str
    where: Location


_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Outline:
    """The loops of one code object by the lines of their bodies, outermost first, and its one-name assignments."""

    loops: tuple[tuple[_Span, Loop], ...]
    device: tuple[tuple[_Span, Loop], ...]  # calls that run their body on the device
    names: tuple[tuple[_Span, str], ...]


def loops_of(chain: tuple[Line, ...]) -> tuple[Loop, ...]:
    """The loops that were open at a line and in its callers, outermost first.

    A call of `nl.fori_loop` or `nl.while_loop` is a loop of what it calls.
    """
    found: list[Loop] = []
    for depth, (code, line) in enumerate(chain):
        outline = _outline(code)
        found += [loop for span, loop in outline.loops if span[0] <= line <= span[1]]
        if depth < len(chain) - 1:
            found += [loop for span, loop in outline.device if span[0] <= line <= span[1]]
    return tuple(found)


def assigned(line: Line) -> str | None:
    """The variable that the statement at a line assigns, or the list it appends to, if it is a single name."""
    for span, name in _outline(line[0]).names:
        if span[0] <= line[1] <= span[1]:
            return name
    return None


@lru_cache(maxsize=512)
def _outline(code: CodeType) -> _Outline:
    body = _body(code)
    loops: list[tuple[_Span, Loop]] = []
    device: list[tuple[_Span, Loop]] = []
    names: list[tuple[_Span, str]] = []
    pending = list(reversed(body))
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.For, ast.While)):
            span = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            loops.append((span, Loop(_header(node), location((code, node.lineno)))))
        elif isinstance(node, ast.Call) and _called(node) in _DEVICE_LOOPS:
            bounds = ", ".join(ast.unparse(argument) for argument in node.args)
            header = _short(f"{_called(node)}({bounds})")
            device.append((_lines(node), Loop(header, location((code, node.lineno)))))
        elif (
            isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        ):
            names.append((_lines(node), node.targets[0].id))
        elif isinstance(node, ast.Expr) and (appended := _appended_to(node.value)):
            names.append((_lines(node), appended))
        if not isinstance(node, (*_Function, ast.ClassDef)):
            pending += reversed(list(ast.iter_child_nodes(node)))
    return _Outline(tuple(loops), tuple(device), tuple(names))


def _body(code: CodeType) -> list[ast.AST]:
    """The statements of a code object: of the function that begins on its first line, else of the module."""
    module = _module(code.co_filename)
    if module is None:
        return []
    if code.co_name == "<module>":
        return list(module.body)
    for node in ast.walk(module):
        if isinstance(node, _Function):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            named = getattr(node, "name", "<lambda>") == code.co_name
            if named and first == code.co_firstlineno:
                return list(node.body) if isinstance(node.body, list) else [node.body]
    return []


@lru_cache(maxsize=64)
def _module(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _header(node: ast.For | ast.While) -> str:
    if isinstance(node, ast.While):
        return _short(f"while {ast.unparse(node.test)}")
    return _short(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")


def _appended_to(value: ast.expr) -> str:
    """The list of `tiles.append(…)`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "append":
        return getattr(value.func.value, "id", "")
    return ""


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _lines(node: ast.expr | ast.stmt) -> _Span:
    return node.lineno, node.end_lineno or node.lineno


def _short(text: str) -> str:
    return text if len(text) <= _HEADER else text[: _HEADER - 3] + "..."
