"""The codes that a function of `nki.language` can raise, found by following the names in its code."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from nkw.errors import get_code
from simulate.isa.book import INSTRUCTIONS
from simulate.memory import NkiTensor
from simulate.run.machine import NeuronCore
from tools.instruction_pages import reached_from

_FOLLOWED = (
    "simulate.nki.",
    "simulate.isa.",
    "simulate.run.machine",
    "simulate.memory.",
    "simulate.numerics.",
)
_OWNERS = (NkiTensor, NeuronCore)
"""Classes whose methods are followed by their name, since the code names an instance."""


@lru_cache(None)
def codes_reached_from(function: Callable[..., Any]) -> frozenset[str]:
    """Return every code that a function of `nki.language`, or a function that it names, can raise."""
    codes: set[str] = set()
    seen: set[FunctionType] = set()
    waiting: list[Any] = [function]
    while waiting:
        current = inspect.unwrap(waiting.pop())
        if not isinstance(current, FunctionType) or current in seen:
            continue
        seen.add(current)
        if current.__module__ == "simulate.nki.isa" and current.__name__ in INSTRUCTIONS:
            codes |= _codes_of_instruction(current.__name__)
        elif current.__module__.startswith(_FOLLOWED):
            if hasattr(current, "code"):
                codes.add(get_code(current))
            tree = ast.parse(textwrap.dedent(inspect.getsource(current)))
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and str(node.value).startswith("NKW-"):
                    codes.add(node.value)
                waiting += _named_by(node, current)
    return frozenset(codes)


@lru_cache(None)
def _codes_of_instruction(name: str) -> frozenset[str]:
    return frozenset(reached_from(INSTRUCTIONS[name]).rules)


def _named_by(node: ast.AST, function: FunctionType) -> Iterator[Any]:
    """Yield the functions that a node of a function's code names, methods of tensors and cores included."""
    if isinstance(node, ast.Name):
        yield inspect.getclosurevars(function).nonlocals.get(node.id, function.__globals__.get(node.id))
    elif isinstance(node, ast.Attribute):
        module = function.__globals__.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(module, ModuleType):
            yield getattr(module, node.attr, None)
        yield from (vars(owner)[node.attr] for owner in _OWNERS if node.attr in vars(owner))
