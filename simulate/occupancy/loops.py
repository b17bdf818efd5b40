"""Loops around a line of a kernel, which memory maps show below the instructions.

A kernel's loops are unrolled while it runs, so the stream contains no loops; they are read from the source.
Code without readable source (`exec` of a string) has no loops.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from nkw.errors import Location
from simulate.lines import find_body, location, walk_statements
from simulate.run.stream import Line

_DEVICE_LOOPS = ("fori_loop", "while_loop")
_HEADER = 48  # most characters of a loop's header in reports


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a kernel: its header as written, `for k in nl.affine_range(4)`, and its line."""

    header: str
    where: Location


_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Outline:
    """Loops of a code object with the lines of their bodies, outermost first."""

    loops: tuple[tuple[_Span, Loop], ...]
    device: tuple[tuple[_Span, Loop], ...]  # calls whose body runs on the device


def find_loops(chain: tuple[Line, ...]) -> tuple[Loop, ...]:
    """Return the loops that enclose a line of a kernel or the calls that led to it, outermost first.

    A call of `nl.fori_loop` or `nl.while_loop` is a loop around the lines of the function that it calls.

    Args:
        chain: The lines of the calls, outermost first, and last the line itself; each is (code object, line number).
    """
    loops: list[Loop] = []
    for depth, (code, line) in enumerate(chain):
        outline = _read_loops(code)
        loops += [loop for span, loop in outline.loops if span[0] <= line <= span[1]]
        if depth < len(chain) - 1:
            loops += [loop for span, loop in outline.device if span[0] <= line <= span[1]]
    return tuple(loops)


@lru_cache(maxsize=512)
def _read_loops(code: CodeType) -> _Outline:
    """Read the loops of a code object from its source; none if the source cannot be read."""
    loops: list[tuple[_Span, Loop]] = []
    device: list[tuple[_Span, Loop]] = []
    for node in walk_statements(find_body(code)):
        if isinstance(node, (ast.For, ast.While)):
            span = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            loops.append((span, Loop(_format_header(node), location((code, node.lineno)))))
        elif isinstance(node, ast.Call) and _get_called_name(node) in _DEVICE_LOOPS:
            bounds = ", ".join(ast.unparse(argument) for argument in node.args)
            header = _shorten(f"{_get_called_name(node)}({bounds})")
            device.append((_get_span(node), Loop(header, location((code, node.lineno)))))
    return _Outline(tuple(loops), tuple(device))


def _format_header(node: ast.For | ast.While) -> str:
    """Return the header of a loop statement without its colon, shortened to 48 characters."""
    if isinstance(node, ast.While):
        return _shorten(f"while {ast.unparse(node.test)}")
    return _shorten(f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}")


def _get_called_name(node: ast.Call) -> str:
    """Return the name of the called function without its module, or "" if the callable is no name or attribute."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _get_span(node: ast.expr) -> _Span:
    """Return the first and the last line of an expression."""
    return node.lineno, node.end_lineno or node.lineno


def _shorten(text: str) -> str:
    """Shorten a header to 48 characters, the last three of which are dots then."""
    return text if len(text) <= _HEADER else text[: _HEADER - 3] + "..."
