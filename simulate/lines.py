"""Lines of the user's kernel in reports: their location, and the variable that the statement assigns.

A line is a code object and a line number. Source is read when a report needs it, so a launch that reports nothing
pays nothing. Source that Python cannot show (`exec` of a string) has no variables.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

from nkw.errors import Location

PACKAGE = os.path.dirname(os.path.realpath(__file__)) + "/"
"""The folder of the simulator."""
PACKAGES = (PACKAGE, os.path.join(os.path.dirname(os.path.dirname(PACKAGE)), "nkw") + os.sep)
"""The folders of the simulator and of what it shares with the model, whose frames are no part of a kernel."""

_locations: dict[tuple[int, int, str], tuple[CodeType, Location]] = {}
"""Locations by code, line and working directory; each with its code, so that the code's id stays its own."""

_LONGEST_NAME = 40  # characters of an assigned attribute or subscript
_MOST_NAMES = 3

_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Span = tuple[int, int]


def location(line: tuple[CodeType, int]) -> Location:
    """Return the location of a line: file, line number and function.

    A path below the working directory is relative to it; a cell of a notebook is `In [36]`.
    """
    code, number = line
    key = id(code), number, os.getcwd()
    known = _locations.get(key)
    if known is None:
        from pathlib import Path  # with what it imports, 4 ms of a process that reports nothing

        path = Path(code.co_filename)
        try:
            file = _name_cell(code.co_filename) or str(path.relative_to(key[2]))
        except ValueError:
            file = str(path)
        known = _locations[key] = code, Location(file, number, code.co_name)
    return known[1]


def _name_cell(filename: str) -> str:
    """Return `In [36]` for the source of a notebook's cell; an empty string for any other file."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    cell = format_name(filename)
    return str(cell[1]).replace("In[", "In [") if cell else ""


def find_assigned(line: tuple[CodeType, int]) -> str | None:
    """Return what the statement at a line assigns: a variable, attribute or element, or the list that it appends to.

    For `a, b = f(), g()` over one line, the name is `a or b`. Returns None if the statement assigns nothing, assigns
    more than three targets, or cannot be read.
    """
    names = [name for span, name in _list_assigned_names(line[0]) if span[0] <= line[1] <= span[1]]
    return " or ".join(names) if 0 < len(names) <= _MOST_NAMES else None


def find_assigned_or_empty(line: tuple[CodeType, int] | None) -> str:
    """Return the name from `find_assigned`, or an empty string if there is no name or no line."""
    return (line is not None and find_assigned(line)) or ""


@lru_cache(maxsize=512)
def _list_assigned_names(code: CodeType) -> tuple[tuple[_Span, str], ...]:
    """Return the targets that the statements of a code object assign, each with the (first, last) lines of its value.

    Targets are source text of at most 40 characters; `tiles.append(…)` counts as an assignment to `tiles`.
    """
    names: list[tuple[_Span, str]] = []
    for node in walk_statements(find_body(code) or _find_enclosing_body(code)):
        if isinstance(node, ast.Assign):
            names += _pair_targets(node.targets[0], node.value, _get_lines(node))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            names += _pair_targets(node.target, node.value, _get_lines(node))
        elif isinstance(node, ast.Expr) and (appended := _find_appended_list(node.value)):
            names.append((_get_lines(node), appended))
    return tuple(names)


def _pair_targets(target: ast.expr, value: ast.expr, span: _Span) -> list[tuple[_Span, str]]:
    """Return ((first line, last line), target) for each target of an assignment.

    For `a, b = x, y` each target has the lines of its own value; other tuple assignments, such as `a, b = f()`, give
    none.
    """
    if isinstance(target, (ast.Tuple, ast.List)):
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            pairs = zip(target.elts, value.elts)
            return [pair for one, other in pairs for pair in _pair_targets(one, other, _get_lines(other))]
        return []
    name = ast.unparse(target)
    return [(span, name)] if len(name) <= _LONGEST_NAME else []


def _find_appended_list(value: ast.expr) -> str:
    """Return `tiles` for a call `tiles.append(…)`, or an empty string for any other expression."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "append":
        return getattr(value.func.value, "id", "")
    return ""


def walk_statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of statements and below, in source order; bodies of nested functions and classes are left out."""
    pending = list(reversed(body))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*_Function, ast.ClassDef)):
            pending += reversed(list(ast.iter_child_nodes(node)))


def find_body(code: CodeType) -> list[ast.AST]:
    """Return the statements of a code object's function or module, or an empty list if its source is not found.

    A function is found by its name and first line.
    """
    module = _parse_module(code.co_filename)
    if module is None:
        return []
    if code.co_name == "<module>":
        return list(module.body)
    for node in ast.walk(module):
        if isinstance(node, _Function):
            first = min(
                [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]
            )
            named = getattr(node, "name", "<lambda>") == code.co_name
            if named and first == code.co_firstlineno:
                return list(node.body) if isinstance(node.body, list) else [node.body]
    return []


def _find_enclosing_body(code: CodeType) -> list[ast.AST]:
    """Return the statements of the innermost function around a comprehension, a code object before Python 3.12.

    Outside of functions these are the module's statements. Returns an empty list for any other code object.
    """
    module = _parse_module(code.co_filename)
    if module is None or code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        return []
    body: list[ast.AST] = list(module.body)
    for node in ast.walk(module):  # breadth first, so that an inner function comes later
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first, last = _get_lines(node)
            if first <= code.co_firstlineno <= last:
                body = list(node.body)
    return body


@lru_cache(maxsize=64)
def _parse_module(file: str) -> ast.Module | None:
    """Return the syntax tree of a file, or None if its source cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _get_lines(node: ast.expr | ast.stmt) -> _Span:
    """Return the first and last line of a node."""
    return node.lineno, node.end_lineno or node.lineno
